from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from tests.custom_ops import strategies as s
from tests.custom_ops.opcheck import opcheck

PROVIDERS = ("reference", "triton")
E4M3 = torch.float8_e4m3fn
HEADS = st.sampled_from((1, 3, 8, 64))


def int32(values: list[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(s.DEVICE)


def exact(shape: tuple[int, ...], seed: int, high: int = 3) -> torch.Tensor:
    """Small whole numbers: every product and sum is exact in float32, in any order."""
    return torch.randint(-high, high + 1, shape, generator=s.generator(seed)).float().to(s.DEVICE)


def pool(pages: int, seed: int) -> torch.Tensor:
    """An index-K cache of whole numbers and power-of-two scales."""
    keys = exact((pages, 64 * 128), seed).to(E4M3).view(torch.uint8)
    scales = torch.exp2(exact((pages, 64), seed + 1)).view(torch.uint8)
    return torch.cat((keys, scales), 1).contiguous()


def unpaged(cache: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, 128] and scales [n] of these pages, token by token."""
    rows = cache[pages.long()]
    keys = rows[:, :8192].contiguous().view(E4M3).float().view(-1, 128)
    return keys, rows[:, 8192:].contiguous().view(torch.float32).flatten()


def formula(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return torch.einsum("ths,th->ts", scores, weights.double()) * scale.double()


def ragged(rows: int, heads: int, width: int, seed: int) -> dict:
    """Ranges of every kind; K and scales outside all of them are NaN."""
    low = torch.randint(0, width // 2 + 1, (rows,), generator=s.generator(seed))
    size = torch.randint(0, width // 2 + 1, (rows,), generator=s.generator(seed + 1))
    size[1::3] = 0
    k, scale = exact((width, 128), seed + 2), torch.exp2(exact((width,), seed + 3))
    column = torch.arange(width)
    seen = ((column >= low[:, None]) & (column < (low + size)[:, None])).any(0).to(s.DEVICE)
    k[~seen], scale[~seen] = torch.nan, torch.nan
    return {
        "q_fp8": exact((rows, heads, 128), seed + 4).to(E4M3),
        "k_fp8": k.to(E4M3),
        "k_scale": scale,
        "weights": exact((rows, heads, 1), seed + 5),
        "starts": int32(low),
        "ends": int32(low + size),
    }


def paged(rows: int, heads: int, seed: int, lengths: tuple[int, ...] = (0, 1, 63, 64, 65, 128, 200)) -> dict:
    """Rows of 3 requests in any order; page table entries that no row needs point outside the pool."""
    lens = torch.tensor([lengths[i % len(lengths)] for i in range(rows)], dtype=torch.int32)
    requests = s.integers(3, rows, seed).int()
    table = s.distinct(16, 3 * 4, seed).int().view(3, 4)
    for request in range(3):
        mine = lens.to(s.DEVICE)[requests == request]
        used = -(-int(mine.max()) // 64) if len(mine) else 0
        table[request, used:] = 2**30
    return {
        "q_fp8": exact((rows, heads, 128), seed + 1).to(E4M3),
        "cache": pool(16, seed + 2),
        "weights": exact((rows, heads), seed + 4),
        "kv_lens": int32(lens),
        "request_of_row": requests,
        "page_table": table,
        "max_kv_len": max(lengths),
    }


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    q = torch.zeros(1, 2, 128, device=s.DEVICE)
    q[0, 0, :2], q[0, 1, 5] = torch.tensor([1.0, 2.0]), 4.0
    k = torch.zeros(3, 128, device=s.DEVICE)
    k[0, :2], k[1, 5], k[2, 0] = torch.tensor([3.0, 1.0]), 2.0, -1.0
    args = {
        "q_fp8": q.to(E4M3),
        "k_fp8": k.to(E4M3),
        "k_scale": torch.tensor([1.0, 0.5, 1.0], device=s.DEVICE),
        "weights": torch.tensor([[10.0, -1.0]], device=s.DEVICE),
        "starts": int32([0]),
        "ends": int32([3]),
    }
    # Token 0: head 0 gives 5, times 10. Token 1: head 1 gives 8, times -1, scale 1/2.
    # Token 2: head 0 gives -1, cut off.
    assert s.call("mqa_logits", provider, args).tolist() == [[50.0, -4.0, 0.0]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_page_layout_by_hand(provider: str) -> None:
    cache = torch.zeros(3, 8448, dtype=torch.uint8, device=s.DEVICE)
    cache[2, 64 * 128 - 1] = 0x38  # token 63, dim 127: e4m3 1.0
    cache[2, 8192 + 4 * 63 : 8192 + 4 * 64] = torch.tensor([0, 0, 0x40, 0x40], dtype=torch.uint8)  # 3.0
    cache[1, 0] = 0x40  # token 0, dim 0: 2.0
    cache[1, 8192:8196] = torch.tensor([0, 0, 0x80, 0x3F], dtype=torch.uint8)  # 1.0
    q = torch.zeros(1, 1, 128, device=s.DEVICE)
    q[0, 0, 0], q[0, 0, 127] = 7.0, 5.0
    args = {
        "q_fp8": q.to(E4M3),
        "cache": cache,
        "weights": torch.ones(1, 1, device=s.DEVICE),
        "kv_lens": int32([65]),
        "request_of_row": int32([1]),
        "page_table": int32([[0, 0], [2, 1]]),
        "max_kv_len": 65,
    }
    got = s.call("paged_mqa_logits", provider, args)[0].tolist()
    assert got[62:] == [0.0, 15.0, 14.0]


@given(rows=s.tokens, heads=HEADS, width=st.sampled_from((1, 60, 128, 130)), seed=s.seeds)
def test_ragged_is_the_formula(rows: int, heads: int, width: int, seed: int) -> None:
    args = ragged(rows, heads, width, seed)
    want = formula(args["q_fp8"], args["k_fp8"], args["k_scale"], args["weights"].flatten(1)).float()
    column = torch.arange(width, device=s.DEVICE)
    inside = (column >= args["starts"][:, None]) & (column < args["ends"][:, None])
    for provider in PROVIDERS:
        got = s.call("mqa_logits", provider, args)
        s.assert_fake_is_exact("mqa_logits", tuple(args.values()), got)
        assert torch.equal(got[inside], want[inside]), s.mismatch(got[inside], want[inside])


@given(rows=s.tokens, heads=HEADS, seed=s.seeds)
def test_paged_is_the_formula(rows: int, heads: int, seed: int) -> None:
    args = paged(rows, heads, seed)
    results = {provider: s.call("paged_mqa_logits", provider, args) for provider in PROVIDERS}
    for provider, got in results.items():
        s.assert_fake_is_exact("paged_mqa_logits", tuple(args.values()), got)
        for row in range(rows):
            length, request = int(args["kv_lens"][row]), int(args["request_of_row"][row])
            k, scale = unpaged(args["cache"], args["page_table"][request, : -(-length // 64)])
            want = formula(args["q_fp8"][row : row + 1], k, scale, args["weights"][row : row + 1])
            assert torch.equal(got[row, :length], want[0, :length].float()), (provider, row)


def test_real_values_agree() -> None:
    args = paged(17, 32, 3)
    args["q_fp8"] = s.randn((17, 32, 128), seed=1).to(E4M3)
    args["cache"][:, :8192] = s.randn((16, 8192), seed=2).to(E4M3).view(torch.uint8)
    args["weights"] = s.randn((17, 32), seed=3)
    want, got = (s.call("paged_mqa_logits", provider, args) for provider in PROVIDERS)
    seen = torch.arange(want.shape[1], device=s.DEVICE) < args["kv_lens"][:, None]
    # On a GPU the FP8 tensor cores may keep fewer than float32's bits of a sum.
    tolerance = 2e-3 if s.ON_GPU else 1e-5
    torch.testing.assert_close(
        got[seen], want[seen], rtol=tolerance, atol=tolerance * float(want[seen].abs().max())
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_row_does_not_depend_on_the_others(provider: str) -> None:
    args = paged(17, 8, 4)
    args["q_fp8"] = s.randn((17, 8, 128), seed=5).to(E4M3)
    args["weights"] = s.randn((17, 8), seed=6)
    whole = s.call("paged_mqa_logits", provider, args)
    by_row = ("q_fp8", "weights", "kv_lens", "request_of_row")
    for part in (slice(0, 1), slice(5, 7), slice(3, 17)):
        got = s.call("paged_mqa_logits", provider, args | {name: args[name][part] for name in by_row})
        for row, length in enumerate(args["kv_lens"][part].tolist()):
            s.assert_bitwise(got[row, :length], whole[part][row, :length])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nan_stays_in_its_row(provider: str) -> None:
    args = paged(5, 8, 7, lengths=(100,))
    clean = s.call("paged_mqa_logits", provider, args)
    args["q_fp8"].view(torch.uint8)[2, 3, 4] = 0x7F
    got = s.call("paged_mqa_logits", provider, args)
    assert got[2].isnan().all()
    got[2] = clean[2]
    s.assert_bitwise(got, clean)


def test_wrong_arguments() -> None:
    args = paged(4, 8, 1)
    refused = lambda change, *said: s.assert_refused("paged_mqa_logits", args | change, *said)  # noqa: E731
    refused({"q_fp8": args["q_fp8"].float()}, "q_fp8", "got torch.float32")
    refused({"q_fp8": args["q_fp8"][..., :64].contiguous()}, "q_fp8", "[*, *, 128], got [4, 8, 64]")
    refused({"q_fp8": args["q_fp8"].transpose(0, 1)}, "q_fp8", "contiguous")
    refused({"q_fp8": args["q_fp8"].repeat(1, 17, 1)}, "q_fp8", "1 to 128 heads, got 136")
    refused({"weights": args["weights"].half()}, "weights", "got torch.float16")
    refused({"weights": args["weights"][:3]}, "weights", "[4, 8], got [3, 8]")
    refused({"cache": args["cache"][:, :8192].contiguous()}, "cache", "[*, 8448], got [16, 8192]")
    refused({"cache": args["cache"].view(torch.int8)}, "cache", "got torch.int8")
    refused({"kv_lens": args["kv_lens"].long()}, "kv_lens", "got torch.int64")
    refused({"request_of_row": args["request_of_row"][:3]}, "request_of_row", "[4], got [3]")
    refused({"page_table": args["page_table"].long()}, "page_table", "got torch.int64")
    refused({"max_kv_len": 257}, "max_kv_len", "in [0, 256]")
    with debug_checks():
        refused({"max_kv_len": 50}, "kv_lens", "[0, 51), got 0 .. 64")
        refused({"request_of_row": args["request_of_row"] + 3}, "request_of_row", "[0, 3)")
        for page in (-1, 16):
            table = args["page_table"].clone()
            table[args["request_of_row"][2], 0] = page  # row 2 sees 63 tokens
            refused({"page_table": table}, "page_table", "in [0, 16)")
        custom_ops.paged_mqa_logits(**args)
    for q in (args["q_fp8"][0, 0, 0], args["q_fp8"][0]):
        refused({"q_fp8": q}, "q_fp8", f"got {list(q.shape)}")
    plain = ragged(4, 8, 50, 1)
    refused = lambda change, *said: s.assert_refused("mqa_logits", plain | change, *said)  # noqa: E731
    refused({"k_fp8": plain["k_fp8"].view(torch.uint8)}, "k_fp8", "got torch.uint8")
    refused({"k_scale": plain["k_scale"][:-1]}, "k_scale", "[50], got [49]")
    refused({"starts": plain["starts"].long()}, "starts", "got torch.int64")
    refused({"ends": plain["ends"][1:]}, "ends", "[4], got [3]")
    for q in (plain["q_fp8"][0, 0, 0], plain["q_fp8"][0]):
        refused({"q_fp8": q}, "q_fp8", f"got {list(q.shape)}")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_opcheck(rows: int) -> None:
    # Every column in range: what lies outside is undefined, and need not be the same twice.
    whole = ragged(rows, 4, 66, 1)
    whole["k_fp8"], whole["k_scale"] = exact((66, 128), 2).to(E4M3), torch.exp2(exact((66,), 3))
    whole["starts"].zero_()
    whole["ends"].fill_(66)
    opcheck("mqa_logits", whole)
    opcheck("paged_mqa_logits", paged(rows, 4, 1, lengths=(200,)))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads", "width"), [(512, 64, 32768), (512, 32, 8192)])
def test_bench(rows: int, heads: int, width: int) -> None:
    q = torch.randn(rows, heads, 128, device="cuda").to(E4M3)
    cache = pool(width // 64, 0)
    weights = torch.rand(rows, heads, device="cuda")
    lens = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    table = torch.arange(width // 64, dtype=torch.int32, device="cuda")[None]
    args = (q, cache, weights, lens, torch.zeros_like(lens), table, width)
    label = f"paged_mqa_logits {rows} x {width}, {heads} heads"
    s.bench(label, lambda: custom_ops.paged_mqa_logits(*args), 4 * rows * width)
    k, scale = custom_ops.index_k_gather(cache, table, lens[:1], width)
    plain = (q, k, scale, weights, torch.zeros_like(lens), lens)
    s.bench(
        f"mqa_logits {rows} x {width}, {heads} heads", lambda: custom_ops.mqa_logits(*plain), 4 * rows * width
    )
