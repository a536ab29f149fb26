from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from custom_ops.sparse_mla_kernels import launch_sparse_mla
from tests.custom_ops import strategies as s
from tests.custom_ops.opcheck import opcheck

PROVIDERS = ("reference", "triton")
SLOTS = 200
LAYOUTS = ("bf16", "fp8_packed", "fp8")
SCALE = 576**-0.5


def cache_of(layout: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and what its rows mean, float64 [slots, 576]."""
    values = s.randn((SLOTS, 576), seed=seed)
    if layout == "bf16":
        cache = values.to(dtype)
        return cache, cache.double()
    quantised = values.to(torch.float8_e4m3fn)
    if layout == "fp8":
        return quantised, quantised.double()
    scales = torch.exp2(s.randn((SLOTS, 4), seed=seed + 1)).contiguous()
    rope = values[:, 512:].bfloat16().contiguous()
    parts = (quantised[:, :512].contiguous(), scales, rope)
    cache = torch.cat([p.view(torch.uint8) for p in parts], 1).contiguous()
    latent = quantised[:, :512].double() * scales.double().repeat_interleave(128, 1)
    return cache, torch.cat((latent, rope.double()), 1)


def arguments(
    lens: list[int], heads: int = 4, k: int = 40, layout: str = "bf16", dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict:  # fmt: skip
    """Selections of ``lens`` distinct slots; beyond them indices far outside the pool, NaN in the result."""
    rows = len(lens)
    topk = torch.full((rows, k), 2**30, dtype=torch.int32)
    for row, length in enumerate(lens):
        topk[row, :length] = s.distinct(SLOTS, length, seed + row).cpu().int()
    return {
        "q": s.randn((rows, heads, 576), dtype, seed),
        "cache": cache_of(layout, seed=seed)[0],
        "topk": topk.to(s.DEVICE),
        "select_lens": torch.tensor(lens, dtype=torch.int32, device=s.DEVICE),
        "out": torch.full((rows, heads, 512), torch.nan, dtype=dtype, device=s.DEVICE),
        "sm_scale": SCALE,
        "layout": layout,
    }


def run(provider: str, args: dict) -> torch.Tensor:
    args["out"].fill_(torch.nan)
    assert s.call("sparse_mla", provider, args) is None
    return args["out"].clone()


def formula(args: dict, values: torch.Tensor) -> torch.Tensor:
    """Row by row in float64."""
    want = torch.zeros(args["out"].shape, dtype=torch.float64, device=s.DEVICE)
    for row, length in enumerate(args["select_lens"].tolist()):
        slots = [int(i) for i in args["topk"][row, :length]]
        if slots and slots[0] == -1:
            slots[0] = 0
        slots = [i for i in slots if i >= 0]
        if slots:
            kv = values[slots]
            scores = args["q"][row].double() @ kv.T * args["sm_scale"]
            want[row] = scores.softmax(-1) @ kv[:, :512]
    return want


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """One rounding of the result, and of the weights and dequantised values where products are bfloat16."""
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-8, torch.float32: 2**-19}[got.dtype]
    largest = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=2 * unit, atol=2 * unit * largest)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_hand(provider: str, layout: str) -> None:
    """Two tokens of scores 0 and ln 3 weigh 1/4 and 3/4; the RoPE dims count in the score only."""
    rows = torch.zeros(4, 576, device=s.DEVICE)
    rows[1, 0], rows[3, 511], rows[3, 575] = 8.0, 16.0, 1.0
    cache = rows.to(torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16)
    if layout == "fp8_packed":
        cache = torch.zeros(4, 656, dtype=torch.uint8, device=s.DEVICE)
        cache[1, 0], cache[3, 511] = 0x48, 0x48  # 4.0
        cache[:, 512:528] = torch.tensor([2.0, 1.0, 1.0, 4.0], device=s.DEVICE).view(torch.uint8)
        cache[3, 655], cache[3, 654] = 0x3F, 0x80  # bfloat16 1.0
    q = torch.zeros(1, 2, 576, device=s.DEVICE)
    q[0, 0, 575] = 2.0
    q[0, 1, 0] = -(2.0**9)  # head 1 turns token 1 off
    args = {
        "q": q,
        "cache": cache,
        "topk": torch.tensor([[1, 3, 2]], dtype=torch.int32, device=s.DEVICE),
        "select_lens": torch.tensor([2], dtype=torch.int32, device=s.DEVICE),
        "out": torch.full((1, 2, 512), torch.nan, device=s.DEVICE),
        "sm_scale": 0.5 * float(torch.tensor(3.0).log()),
        "layout": layout,
    }
    want = torch.zeros(1, 2, 512, device=s.DEVICE)
    want[0, 0, 0], want[0, 0, 511], want[0, 1, 511] = 2.0, 12.0, 16.0
    torch.testing.assert_close(run(provider, args), want, rtol=1e-6, atol=1e-6)


@given(
    lens=st.lists(st.sampled_from((0, 1, 15, 16, 17, 33, 40)), max_size=5),
    heads=st.sampled_from((1, 4, 17, 64, 65)),
    layout=st.sampled_from(LAYOUTS),
    dtype=s.floats,
    holes=st.booleans(),
    seed=s.seeds,
)
def test_is_the_formula(lens: list[int], heads: int, layout: str, dtype: torch.dtype, holes: bool, seed: int) -> None:
    args = arguments(lens, heads, 40, layout, dtype, seed)
    if holes:  # -1 in first place is slot 0, elsewhere nothing
        args["topk"][:, 0] = -1
        args["topk"][:, 3::4] = -1
    want = formula(args, cache_of(layout, seed=seed)[1])
    for provider in PROVIDERS:
        assert_near(run(provider, args), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_caches_of_other_floats(dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    args = arguments([1, 20, 40], dtype=q_dtype)
    args["cache"], values = cache_of("bf16", dtype)
    for provider in PROVIDERS:
        assert_near(run(provider, args), formula(args, values))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pad_rows_attend_slot_0(provider: str, layout: str) -> None:
    args = arguments([1, 1], layout=layout)
    args["topk"][1, :] = -1
    args["topk"][0, 0] = 0
    args["q"][0] = args["q"][1]
    got = run(provider, args)
    slot_0 = cache_of(layout)[1][0, :512]  # one token weighs 1
    assert_near(got, slot_0.expand(2, 4, 512))
    s.assert_bitwise(got[1], got[0])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_selected_does_not_matter(provider: str, layout: str) -> None:
    args = arguments([40, 0, 7], layout=layout)
    args["topk"][:, 5] = -1
    clean = run(provider, args)
    chosen = {int(i) for row, n in zip(args["topk"], [40, 0, 7], strict=True) for i in row[:n] if i >= 0}
    others = [i for i in range(SLOTS) if i not in chosen]
    args["cache"].view(torch.uint8)[others] = 0xFF  # NaN in every layout
    s.assert_bitwise(run(provider, args), clean)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_row_does_not_depend_on_the_others(provider: str) -> None:
    args = arguments([40, 1, 17, 33, 0, 40, 16])
    whole = run(provider, args)
    by_row = ("q", "topk", "select_lens", "out")
    for part in (slice(0, 1), slice(2, 4), slice(1, 7)):
        got = run(provider, args | {name: args[name][part].contiguous() for name in by_row})
        s.assert_bitwise(got, whole[part])
    args["q"][2] = torch.nan
    got = run(provider, args)
    assert got[2].isnan().all()
    got[2] = whole[2]
    s.assert_bitwise(got, whole)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_large_scores_do_not_overflow(provider: str) -> None:
    args = arguments([40, 40], dtype=torch.float32) | {"sm_scale": 1e4}
    assert_near(run(provider, args), formula(args, cache_of("bf16")[1]))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_rows(provider: str) -> None:
    assert run(provider, arguments([])).shape == (0, 4, 512)


def test_wrong_arguments() -> None:
    args = arguments([3, 4])
    refused = lambda change, *said: s.assert_refused("sparse_mla", args | change, *said)  # noqa: E731
    refused({"layout": "fp4"}, "layout", "got 'fp4'")
    refused({"q": args["q"].double()}, "q", "got torch.float64")
    refused({"q": args["q"][..., :512].contiguous()}, "q", "[*, *, 576], got [2, 4, 512]")
    refused({"q": args["q"].repeat(1, 33, 1)}, "q", "1 to 128 heads, got 132")
    refused({"q": args["q"].transpose(0, 1)}, "q", "contiguous")
    refused({"layout": "fp8_packed"}, "cache", "got torch.bfloat16")
    refused({"layout": "fp8"}, "cache", "got torch.bfloat16")
    refused({"layout": "fp8_packed", "cache": cache_of("fp8_packed")[0][:, :576].contiguous()}, "cache", "656")
    refused({"cache": args["cache"].repeat(2, 1)[::2]}, "cache", "contiguous")
    refused({"topk": args["topk"].long()}, "topk", "got torch.int64")
    refused({"topk": args["topk"][:1]}, "topk", "[2, *], got [1, 40]")
    refused({"topk": args["topk"][:, :0]}, "topk", "at least 1 column")
    refused({"select_lens": args["select_lens"].long()}, "select_lens", "got torch.int64")
    refused({"out": args["out"].float()}, "out", "got torch.float32")
    refused({"out": args["out"][:, :2]}, "out", "[2, 4, 512], got [2, 2, 512]")
    with debug_checks():
        refused({}, "topk", "[-1, 200)")
        fine = {"topk": args["topk"].clamp(max=1)}
        refused(fine | {"select_lens": args["select_lens"] + 40}, "select_lens", "[0, 41)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str) -> None:
    opcheck("sparse_mla", arguments([3, 1, 40], layout=layout), written=["out"])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bench(heads: int, layout: str) -> None:
    rows, k = 512, 2048
    cache = cache_of(layout)[0].repeat(300, 1)
    q = torch.randn(rows, heads, 576, device="cuda", dtype=torch.bfloat16)
    topk = torch.randint(0, cache.shape[0], (rows, k), device="cuda", dtype=torch.int32)
    lens = torch.full((rows,), k, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, heads, 512, device="cuda", dtype=torch.bfloat16)
    label = f"sparse_mla 512 rows, {heads} heads, k = 2048, {layout}"
    traffic = rows * k * cache.shape[1] * cache.element_size()
    s.bench(label, lambda: custom_ops.sparse_mla(q, cache, topk, lens, out, SCALE, layout), traffic)


@pytest.mark.parametrize("layout", ["bf16", "fp8_packed"])
def test_whoever_takes_the_chunks_the_bits_are_the_same(layout: str) -> None:
    lens = torch.tensor([1300, 512, 513, 0, 1, 1024], dtype=torch.int32, device=s.DEVICE)
    args = arguments([0] * 6, heads=8, k=1300, layout=layout) | {"select_lens": lens}
    args["topk"] = s.integers(SLOTS, 6 * 1300, 5).view(6, 1300).int()
    args["topk"][0, 600:1100] = -1
    results = []
    for split in (False, True):
        launch_sparse_mla(*args.values(), split=split)
        results.append(args["out"].clone())
        args["out"].fill_(torch.nan)
    s.assert_bitwise(results[1], results[0])
    torch.testing.assert_close(results[0], run("reference", args), rtol=2**-6, atol=2**-6)
