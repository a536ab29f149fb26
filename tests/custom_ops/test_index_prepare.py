from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from tests.custom_ops import strategies as s
from tests.custom_ops.test_index_cache import PAGES, POISON, poisoned_cache

PROVIDERS = ("reference", "triton")
V32 = {"interleaved": False, "hadamard": True, "round_scale": True}
GLM = {"interleaved": True, "hadamard": False, "round_scale": False}
routes = st.sampled_from((V32, GLM, {"interleaved": True, "hadamard": True, "round_scale": False}))


def k_arguments(
    rows: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    layout: str = "contiguous",
    route: dict = GLM,
) -> dict:
    return {
        "k": s.randn((rows, 128), dtype, seed, layout, std=3),
        "weight": s.randn((128,), seed=seed + 1) + 1,
        "bias": s.randn((128,), seed=seed + 2),
        "eps": 1e-6,
        "positions": s.integers(97, rows, seed),
        "cos_sin_cache": s.rope_table(),
        "interleaved": route["interleaved"],
        "hadamard": route["hadamard"],
        "cache": poisoned_cache(),
        "slots": s.distinct(PAGES * 64, rows, seed),
        "round_scale": route["round_scale"],
    }


def exact_statistics(rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, 128] of +a and -a, as many of each: mean 0 and variance a^2, in any order of summation."""
    orders = [torch.randperm(128, generator=s.generator(seed + i)) for i in range(rows)]
    signs = torch.stack(orders) % 2 * 2 - 1
    a = 2.0 ** torch.randint(-4, 5, (rows, 1), generator=s.generator(seed))
    return (signs * a).to(dtype).to(s.DEVICE)


def q_arguments(
    rows: int = 5,
    heads: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    layout: str = "contiguous",
    route: dict = GLM,
) -> dict:
    return {
        "q": s.randn((rows, heads, 128), dtype, seed, layout),
        "positions": s.integers(97, rows, seed),
        "cos_sin_cache": s.rope_table(),
        **route,
    }


def tokens_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [slots, 128], scales [slots]) of a cache."""
    return cache[:, :8192].reshape(-1, 128), cache[:, 8192:].contiguous().view(torch.float32).reshape(-1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_k_by_hand(provider: str) -> None:
    k = torch.full((1, 128), 1.0, device=s.DEVICE)
    k[0, 1::2] = -1.0  # normalised to itself; with weight 224 and bias 0: +-224
    weight = torch.full((128,), 224.0, device=s.DEVICE)
    weight[0], weight[2] = 448.0, 56.0
    table = torch.tensor([[1.0] * 32 + [0.0] * 32, [0.0] * 32 + [1.0] * 32], device=s.DEVICE)
    args = {
        "k": k, "weight": weight, "bias": None, "eps": 0.0,
        "positions": torch.tensor([1], device=s.DEVICE), "cos_sin_cache": table,  # a turn by 90 degrees
        "interleaved": True, "hadamard": False, "cache": poisoned_cache(),
        "slots": torch.tensor([66], device=s.DEVICE), "round_scale": False,
    }  # fmt: skip
    s.call("index_k_prepare_store", provider, args)
    # (448, -224) -> (224, 448), (56, -224) -> (224, 56), (224, -224) -> (224, 224); then as it was; scale 1
    token = args["cache"][1, 256 : 256 + 128].tolist()
    assert token[:6] == [0x76, 0x7E, 0x76, 0x66, 0x76, 0x76]
    assert token[62:66] == [0x76, 0x76, 0x76, 0xF6]
    assert args["cache"][1, 8200:8204].tolist() == [0x00, 0x00, 0x80, 0x3F]
    # Pairs (i, i + 32): (448, 224) -> (-224, 448), odd ones (-224, -224) -> (224, -224).
    args["interleaved"] = False
    s.call("index_k_prepare_store", provider, args)
    token = args["cache"][1, 256 : 256 + 128].tolist()
    assert token[:3] == [0xF6, 0x76, 0xF6] and token[32:35] == [0x7E, 0xF6, 0x66]


@given(rows=s.tokens, dtype=s.floats, with_bias=st.booleans(), route=routes, seed=s.seeds)
def test_k_equals_reference_bitwise(
    rows: int, dtype: torch.dtype, with_bias: bool, route: dict, seed: int
) -> None:
    args = k_arguments(rows, dtype, seed, route=route) | {"eps": 0.0}
    if rows:
        args["k"] = exact_statistics(rows, dtype, seed)
    if not with_bias:
        args["bias"] = None
    caches = [poisoned_cache(), poisoned_cache()]
    for provider, cache in zip(PROVIDERS, caches, strict=True):
        assert s.call("index_k_prepare_store", provider, args | {"cache": cache}) is None
    s.assert_bitwise(caches[1], caches[0])


@given(rows=s.tokens, dtype=s.floats, own_affine=st.booleans(), layout=s.layouts, route=routes, seed=s.seeds)
def test_k_agrees_with_the_single_operators(
    rows: int, dtype: torch.dtype, own_affine: bool, layout: str, route: dict, seed: int
) -> None:
    args = k_arguments(rows, dtype, seed, layout, route)
    if own_affine:
        args |= {"weight": args["weight"].to(dtype), "bias": args["bias"].to(dtype)}
    key = custom_ops.layernorm(
        args["k"] if route["hadamard"] else args["k"].float(),
        *(t if route["hadamard"] else t.float() for t in (args["weight"], args["bias"])),
        1e-6,
    )
    rotation = args["positions"], args["cos_sin_cache"], 64, route["interleaved"]
    key = custom_ops.apply_rope(key, *rotation).to(dtype)
    if route["hadamard"]:
        key = custom_ops.hadamard(key, 128**-0.5)
    single = poisoned_cache()
    custom_ops.index_k_store(key, single, args["slots"], route["round_scale"])
    fused = {}
    for provider in PROVIDERS:
        fused[provider] = poisoned_cache()
        s.call("index_k_prepare_store", provider, args | {"cache": fused[provider]})
    if not s.ON_GPU:  # there the single operators are Triton's, whose sums are ordered in another way
        s.assert_bitwise(fused["reference"], single)
    # A sum in another order moves a value by its last bits, and so a code, or a rounded scale, by one step.
    (codes, scale), (want_codes, want_scale) = tokens_of(fused["triton"]), tokens_of(fused["reference"])
    back, want = (
        c[args["slots"]].view(torch.float8_e4m3fn).float() * f[args["slots"], None]
        for c, f in ((codes, scale), (want_codes, want_scale))
    )
    torch.testing.assert_close(back, want, rtol=0.14, atol=1e-3)
    untouched = torch.ones(PAGES * 64, dtype=torch.bool, device=s.DEVICE)
    untouched[args["slots"]] = False
    assert (codes[untouched] == POISON).all()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("route", [V32, GLM], ids=["v32", "glm"])
def test_k_pad_rows_touch_the_dummy_slot_only(provider: str, route: dict) -> None:
    args = k_arguments(16, route=route)
    args["slots"][11:] = 0
    args["positions"][11:] = 0
    s.call("index_k_prepare_store", provider, args)
    poisoned = args | {"k": args["k"].clone(), "cache": poisoned_cache()}
    poisoned["k"][11:] = torch.nan
    s.call("index_k_prepare_store", provider, poisoned)
    for cache in (args["cache"], poisoned["cache"]):
        cache[0, :128] = cache[0, 8192:8196] = 0
    s.assert_bitwise(poisoned["cache"], args["cache"])


@given(
    rows=s.tokens,
    heads=st.sampled_from((1, 2, 5)),
    dtype=s.floats,
    layout=s.layouts,
    route=routes,
    seed=s.seeds,
)
def test_q_triton_equals_the_single_operators(
    rows: int, heads: int, dtype: torch.dtype, layout: str, route: dict, seed: int
) -> None:
    args = q_arguments(rows, heads, dtype, seed, layout, route)
    rotation = args["positions"], args["cos_sin_cache"], 64, route["interleaved"]
    q = custom_ops.apply_rope(args["q"], *rotation)
    if route["hadamard"]:
        q = custom_ops.hadamard(q, 128**-0.5)
    single = custom_ops.quant_fp8(q, 128, route["round_scale"])
    for provider in PROVIDERS:
        got = s.call("index_q_prepare", provider, args)
        s.assert_e4m3(got[0], single[0])
        s.assert_bitwise(got[1], single[1])
        s.assert_fake_is_exact("index_q_prepare", tuple(args.values()), got)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("route", [V32, GLM], ids=["v32", "glm"])
def test_q_nan_stays_in_its_head(provider: str, route: dict) -> None:
    args = q_arguments(route=route)
    clean = s.call("index_q_prepare", provider, args)
    args["q"][2, 1, 5] = torch.nan
    q, scale = s.call("index_q_prepare", provider, args)
    assert q[2, 1].float().isnan().all() and scale[2, 1].isnan().all()
    q[2, 1], scale[2, 1] = clean[0][2, 1], clean[1][2, 1]
    s.assert_bitwise(q, clean[0])
    s.assert_bitwise(scale, clean[1])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_q_heads_that_lie_far_apart(tmp_path: Path, provider: str) -> None:
    args = q_arguments(2)
    near = s.call("index_q_prepare", provider, args)
    far = s.call("index_q_prepare", provider, args | {"q": s.far_apart(args["q"], tmp_path)})
    for got, wanted in zip(far, near, strict=True):
        s.assert_bitwise(got, wanted)
    torch.cuda.empty_cache()  # 8 GB, which other processes use


def test_wrong_k_arguments() -> None:
    args = k_arguments()
    refused = lambda change, *said: s.assert_refused("index_k_prepare_store", args | change, *said)  # noqa: E731
    refused({"k": args["k"][:, :64]}, "k", "[*, 128], got [5, 64]")
    refused({"k": args["k"].double()}, "k", "got torch.float64")
    refused({"weight": args["weight"][:64]}, "weight", "[128], got [64]")
    refused({"weight": None}, "weight", "got NoneType")
    refused({"bias": args["bias"].half()}, "bias", "got torch.float16")
    refused({"positions": args["positions"][:4]}, "positions", "[5], got [4]")
    refused({"cos_sin_cache": s.rope_table(97, 32)}, "cos_sin_cache", "[*, 64], got [97, 32]")
    refused({"cache": args["cache"].view(-1, 4224)}, "cache", "[*, 8448]")
    refused({"slots": args["slots"].int()}, "slots", "got torch.int32")
    names = ("weight", "bias", "positions", "cos_sin_cache", "cache", "slots")
    s.assert_refused_on_another_device("index_k_prepare_store", args, *names)
    with debug_checks():
        refused({"slots": args["slots"] + 256}, "slots", "in [0, 256)")
        refused({"positions": args["positions"] - 97}, "positions", "in [0, 97)")
        custom_ops.index_k_prepare_store(**args)


def test_wrong_q_arguments() -> None:
    args = q_arguments()
    refused = lambda change, *said: s.assert_refused("index_q_prepare", args | change, *said)  # noqa: E731
    refused({"q": args["q"][..., :64]}, "q", "[*, *, 128], got [5, 3, 64]")
    refused({"q": args["q"][:, 0]}, "q", "got [5, 128]")
    refused({"q": args["q"].long()}, "q", "got torch.int64")
    refused({"positions": args["positions"].int()}, "positions", "got torch.int32")
    refused({"cos_sin_cache": args["cos_sin_cache"].half()}, "cos_sin_cache", "got torch.float16")
    s.assert_refused_on_another_device("index_q_prepare", args, "positions", "cos_sin_cache")


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_opcheck(rows: int) -> None:
    k, q = k_arguments(rows, route=V32), q_arguments(rows, route=V32)
    torch.library.opcheck(torch.ops.sparse_pcg.index_k_prepare_store.default, tuple(k.values()))
    torch.library.opcheck(torch.ops.sparse_pcg.index_q_prepare.default, tuple(q.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("route", [V32, GLM], ids=["v32", "glm"])
def test_bench(route: dict) -> None:
    k = k_arguments(512, route=route) | {"cache": poisoned_cache(64), "slots": s.distinct(64 * 64, 512)}
    s.bench("index_k_prepare_store 512", lambda: custom_ops.index_k_prepare_store(**k), 512 * (256 + 132))
    q = q_arguments(512, 64, route=route)
    s.bench("index_q_prepare 512 x 64", lambda: custom_ops.index_q_prepare(**q), 512 * 64 * (256 + 132))
