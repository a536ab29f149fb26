"""The CUDA C++ kernel of the index keys: its code runs here as C++ on the CPU, every thread of a block a fiber."""

from __future__ import annotations

import ctypes
import functools
import struct

import hypothesis.strategies as st
import pytest
import torch
import triton
from hypothesis import given, settings

import custom_ops
from custom_ops import index_keys_cuda as keys
from custom_ops._nvrtc import CudaError, _nvrtc, build
from custom_ops._register import use_provider
from custom_ops.hadamard import hadamard_reference
from custom_ops.index_cache import index_k_store_reference
from custom_ops.rope import apply_rope_reference
from tests.custom_ops import strategies as s
from tests.custom_ops.host_library import host_library, needs_compiler
from tests.custom_ops.test_index_cache import poisoned_cache
from tests.custom_ops.test_index_prepare import GLM, V32, exact_statistics, k_arguments, tokens_of

SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-38, 3e38, torch.inf, -torch.inf, torch.nan])
AFFINE = (torch.float32, torch.bfloat16)
ROWS = (1, 3, 4, 5, 33)


def on_host(args: dict, seed: int = 0) -> torch.Tensor:
    """A cache, poisoned before, as the kernel leaves it."""
    cache = poisoned_cache(len(args["cache"]))
    served = {name: args[name] for name in ("k", "weight", "bias", "eps", "positions", "cos_sin_cache", "slots")}
    packed = struct.pack("@" + keys.LAYOUT, *keys.arguments(**served, cache=cache))
    run = host_library("keys_host.cpp", *keys.macros(args["weight"].dtype)).keys_on_host
    run.restype = ctypes.c_bool
    assert run(packed, keys.blocks(len(args["k"])), seed)
    return cache


def sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """[T, 1]: the sums of the rows of float32 [T, 128] as the kernel adds them."""
    eights = x.unflatten(1, (16, 8)).unbind(2)
    sums = functools.reduce(torch.add, eights)
    for half in (8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half:]
    return sums


def weighted(args: dict) -> torch.Tensor:
    """float32 [T, 128]: the rows normalised, times weight."""
    k = args["k"].float()
    centred = k - sum_in_order(k) / 128
    return centred * (1.0 / torch.sqrt(sum_in_order(centred * centred) / 128 + args["eps"])) * args["weight"].float()


def expected(args: dict) -> torch.Tensor:
    """The cache as the reference leaves it, but for the order of LayerNorm's sums."""
    key = weighted(args)
    key = (key if args["bias"] is None else key + args["bias"].float()).to(args["k"].dtype)
    key = apply_rope_reference(key, args["positions"], args["cos_sin_cache"], 64, False)
    cache = poisoned_cache(len(args["cache"]))
    index_k_store_reference(hadamard_reference(key, 128**-0.5), cache, args["slots"], True)
    return cache


def by(provider: str, args: dict) -> torch.Tensor:
    """A cache, poisoned before, as a provider leaves it."""
    cache = poisoned_cache(len(args["cache"]))
    s.call("index_k_prepare_store", provider, args | {"cache": cache})
    return cache


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """All slots, so those that nothing was stored to as well. A NaN is one whatever its bits."""
    (codes, scales), (want_codes, want_scales) = tokens_of(got), tokens_of(want)
    s.assert_e4m3(codes, want_codes)
    s.assert_bitwise(scales.nan_to_num(-1.0, posinf=torch.inf), want_scales.nan_to_num(-1.0, posinf=torch.inf))


def rows_apart(k: torch.Tensor, stride: int) -> torch.Tensor:
    """The same rows, ``stride`` elements from one to the next; NaN between them."""
    wide = torch.full((len(k), max(stride, 128)), torch.nan, dtype=k.dtype, device=k.device)
    wide[:, :128] = k
    return wide[:1].expand(len(k), -1)[:, :128] if stride == 0 else wide[:, :128]


def arguments(rows: int, seed: int = 0, affine: torch.dtype = torch.float32, with_bias: bool = True) -> dict:
    args = k_arguments(rows, torch.bfloat16, seed, route=V32)
    return args | {"weight": args["weight"].to(affine), "bias": args["bias"].to(affine) if with_bias else None}


@needs_compiler
@settings(max_examples=40)
@given(
    rows=st.sampled_from(ROWS),
    stride=st.sampled_from((128, 144, 256, 0)),
    affine=st.sampled_from(AFFINE),
    with_bias=st.booleans(),
    power=st.integers(-40, 60),
    special=st.sampled_from((0.0, 0.0, 0.002, 0.5)),
    seed=s.seeds,
)
def test_equals_the_reference_but_for_the_order_of_sums(
    rows: int, stride: int, affine: torch.dtype, with_bias: bool, power: int, special: float, seed: int
) -> None:
    args, generator = arguments(rows, seed, affine, with_bias), s.generator(seed)
    k = args["k"] * 2.0**power
    chosen = torch.rand(k.shape, generator=generator) < special
    drawn = SPECIAL[torch.randint(len(SPECIAL), k.shape, generator=generator)].to(k.dtype)
    args["k"] = rows_apart(torch.where(chosen, drawn, k), stride)
    assert "not on a CUDA device" in str(keys.refuses(**args))  # nothing else is against it
    assert_same(on_host(args, seed), expected(args))


def cancelled(seed: int) -> dict:
    """A bias that cancels the row: what is left is zero, or the last bits in which mean or variance differ."""
    args = arguments(1, seed)
    args["k"] *= (2.0 ** torch.randint(-8, 8, (128,), generator=s.generator(seed))).to(args["k"])
    there = {name: args[name].cpu() for name in ("k", "weight")}
    return args | {"bias": -weighted(there | {"eps": args["eps"]})[0].to(s.DEVICE)}


@needs_compiler
def test_sums_in_its_order() -> None:
    for seed in range(60):
        args = cancelled(seed)
        codes, scales = tokens_of(on_host(args))
        assert (codes[args["slots"]] & 127 == 0).all() and scales[args["slots"]] == 2.0**-22


@needs_compiler
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_the_reference(rows: int, affine: torch.dtype) -> None:
    for seed in range(3):
        args = arguments(rows, seed, affine, with_bias=seed > 0) | {"eps": 0.0}
        args["k"] = exact_statistics(rows, torch.bfloat16, seed)
        assert_same(on_host(args), by("reference", args))


# A sum in another order moves a value by its last bits, and so a code, or a scale, by one step.
@needs_compiler
def test_agrees_with_the_reference() -> None:
    args = arguments(33)
    both = []
    for cache in (on_host(args), by("reference", args)):
        codes, scales = tokens_of(cache)
        both.append(codes[args["slots"]].view(torch.float8_e4m3fn).float() * scales[args["slots"], None])
    torch.testing.assert_close(*both, rtol=0.14, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_rows_without_variance(eps: float) -> None:
    args = arguments(5) | {"eps": eps}
    args["k"][0], args["k"][1], args["k"][2], args["k"][3] = 0.0, -0.0, 3.140625, -1e30
    got, want = on_host(args), by("reference", args)
    assert_same(got, want)
    _, scales = tokens_of(got)
    assert scales[args["slots"][:4]].isnan().all() == (eps == 0.0) and scales[args["slots"][4]].isfinite()


@needs_compiler
def test_one_bad_element_makes_a_row_nan_and_no_other() -> None:
    args = arguments(5)
    clean = on_host(args)
    args["k"][1, 3], args["k"][4, 100] = torch.nan, -torch.inf
    codes, scales = tokens_of(on_host(args))
    bad = args["slots"][[1, 4]]
    assert (codes[bad] & 127 == 127).all() and scales[bad].isnan().all()
    codes[bad], scales[bad] = (t[bad] for t in tokens_of(clean))
    s.assert_bitwise(codes, tokens_of(clean)[0])
    s.assert_bitwise(scales, tokens_of(clean)[1])


# The key is the bias alone: any magnitude that a bias has.
@needs_compiler
def test_the_scale_of_every_power() -> None:
    args = arguments(1)
    args["k"].zero_()
    found = set()
    for power in range(-20, 128):
        # Times 128 ** -0.5 and rounded, the second is 448 by a power of two, and the third the next above.
        for mantissa in (1.0, 1.23828125, 1.2421875, 1.9921875):
            args["bias"] = torch.zeros(128)
            args["bias"][64 + power % 64] = int(mantissa * 128) / 128 * 2.0**power
            args["bias"][127 - power % 64] = mantissa % 2**-7 * 2.0**power
            got = on_host(args)
            assert_same(got, by("reference", args))
            found.add(tokens_of(got)[1][args["slots"]].item())
    assert found == {2.0**power for power in range(-22, 117)}  # from 1e-4 / 448 upwards


@needs_compiler
def test_an_infinite_key() -> None:
    args = arguments(3)
    args["k"].zero_()
    args["bias"].fill_(0.0)[70] = 3.4e38  # finite, until it is rounded to bfloat16
    got = on_host(args)
    assert_same(got, by("reference", args))
    assert tokens_of(got)[1][args["slots"]].isposinf().all()


# Of -0 and +0 in the order of a row of the transform's matrix, one element is a sum of -0 alone.
@needs_compiler
@pytest.mark.parametrize("with_bias", [True, False])
def test_no_bias_leaves_the_sign_of_zero(with_bias: bool) -> None:
    args = arguments(3)
    args["k"].zero_()
    args["cos_sin_cache"] = torch.tensor([1.0] * 32 + [0.0] * 32).repeat(97, 1)
    args["weight"] = torch.where(torch.arange(128) & 32 == 0, -1.0, 1.0)
    args["bias"] = torch.zeros(128) if with_bias else None
    got = on_host(args)
    assert_same(got, by("reference", args))
    codes, _ = tokens_of(got)
    assert codes[args["slots"]].sum() == (0 if with_bias else 3 * 0x80)


def test_refusals_say_why() -> None:
    args = arguments(8)
    why = lambda change: str(keys.refuses(**args | change))  # noqa: E731
    for change in (GLM, {"interleaved": True}, {"round_scale": False}, {"k": args["k"].half()}):
        assert "bfloat16, pairs of halves, the transform and rounded scales" in why(change)
    assert "weight and bias of one dtype" in why({"bias": args["bias"].bfloat16()})
    wide = torch.zeros(8, 160, dtype=torch.bfloat16, device=s.DEVICE)
    for k in (wide[:, :152].contiguous()[:, :128], args["k"].t().contiguous().t()):
        assert "multiples of 16 elements" in why({"k": k})
    assert "multiples of 16 bytes" in why({"k": wide[:, 4:132]})
    odd = torch.zeros(97 * 64 + 1, device=s.DEVICE)[1:]
    for change in ({"weight": odd[:128]}, {"bias": odd[:128]}, {"cos_sin_cache": odd.view(97, 64)}):
        assert "multiples of 16 bytes" in why(change)
    if s.DEVICE == "cpu":
        assert "not on a CUDA device" in why({})
        assert "not on a CUDA device" in why({"bias": None, "k": wide[:, 8:136]})
    if not torch.cuda.is_available():
        assert "no CUDA device" in str(keys.missing())
        with use_provider("index_k_prepare_store", "cuda"), pytest.raises(RuntimeError, match="no CUDA device"):
            custom_ops.index_k_prepare_store(**args)


def test_it_comes_first() -> None:
    names = [name for name, _, _ in custom_ops.providers_of("index_k_prepare_store")]
    assert names == ["cuda", "triton", "reference"]


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_compiles(capability: tuple[int, int], affine: torch.dtype) -> None:
    try:
        _nvrtc()
    except CudaError as error:
        pytest.skip(f"no NVRTC: {error}")
    assert build("index_keys.cu", capability, keys.macros(affine))[:4] == b"\x7fELF"


def on_gpu(rows: int, stride: int = 128, affine: torch.dtype = torch.float32, with_bias: bool = True) -> dict:
    args = arguments(rows, rows, affine, with_bias)
    pages = rows // 64 + 2
    slots = s.distinct(pages * 64, rows, rows)
    return args | {"k": rows_apart(args["k"], stride), "cache": poisoned_cache(pages), "slots": slots}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 33, 1000, 8192])
def test_equals_the_reference_on_the_gpu(rows: int) -> None:
    args = on_gpu(rows) | {"k": exact_statistics(rows, torch.bfloat16, rows), "eps": 0.0}
    for provider in ("cuda", "triton"):
        assert_same(by(provider, args), by("reference", args))


@pytest.mark.gpu
@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="Triton 3.6 takes sums in this order")
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33, 77, 512, 1000, 4096, 8192])
def test_equals_triton_on_the_gpu(rows: int, affine: torch.dtype) -> None:
    for stride, with_bias in ((128, True), (144, False), (256, True)):
        args = on_gpu(rows, stride, affine, with_bias)
        if rows > 2:
            args["k"][1, :8] = SPECIAL.to(args["k"])
            args["k"][2] = 0.25
        assert_same(by("cuda", args), by("triton", args))


@pytest.mark.gpu
@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="Triton 3.6 takes sums in this order")
def test_sums_in_the_order_of_triton_on_the_gpu() -> None:
    for seed in range(60):
        args = cancelled(seed)
        assert_same(by("cuda", args), by("triton", args))


@pytest.mark.gpu
def test_bench() -> None:
    for rows in (512, 8192):
        args = on_gpu(rows)
        for provider in ("cuda", "triton"):
            with use_provider("index_k_prepare_store", provider):
                run = lambda args=args: custom_ops.index_k_prepare_store(**args)  # noqa: E731
                s.bench(f"index_k_prepare_store {rows} {provider}", run, rows * (256 + 132))
