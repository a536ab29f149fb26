from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import OPS
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def arguments(rows: int = 5, width: int = 128, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict:
    return {
        "x": s.randn((rows, width), dtype, seed, std=3),
        "weight": s.randn((width,), torch.float32, seed + 1),
        "bias": s.randn((width,), torch.float32, seed + 2),
        "eps": 1e-6,
    }


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    tensor = lambda *values: torch.tensor(values, device=s.DEVICE)  # noqa: E731
    x, weight, bias = tensor([1.0, 3.0], [8.0, 4.0]), tensor(2.0, 10.0), tensor(1.0, 0.5)
    args = {"x": x, "weight": weight, "bias": bias, "eps": 0.0}
    # (x - mean) / std is (-1, 1) and (1, -1)
    s.assert_bitwise(s.call("layernorm", provider, args), tensor([-1.0, 10.5], [3.0, -9.5]))
    s.assert_bitwise(s.call("layernorm", provider, args | {"bias": None}), tensor([-2.0, 10.0], [2.0, -10.0]))
    # variances 1 and 4 with eps 3 and 0: eps is added to the variance, before the root
    args |= {"eps": 3.0, "bias": None}
    s.assert_bitwise(s.call("layernorm", provider, args)[:1], tensor([-1.0, 5.0]))


@given(
    rows=s.tokens,
    width=st.sampled_from((1, 7, 128, 200, 1025)),
    dtype=s.floats,
    own_affine=st.booleans(),
    with_bias=st.booleans(),
    layout=s.layouts,
    seed=s.seeds,
)
def test_agrees_with_torch(
    rows: int, width: int, dtype: torch.dtype, own_affine: bool, with_bias: bool, layout: str, seed: int
) -> None:
    args = arguments(rows, width, dtype, seed)
    args["x"] = s.randn((rows, 3, width), dtype, seed, layout, std=3)
    if own_affine:
        args |= {"weight": args["weight"].to(dtype), "bias": args["bias"].to(dtype)}
    if not with_bias:
        args["bias"] = None
    x, weight, bias = (None if t is None else t.double() for t in list(args.values())[:3])
    want = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-6)
    for provider in PROVIDERS:
        got = s.call("layernorm", provider, args)
        assert got.is_contiguous() and got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        s.assert_fake_is_exact("layernorm", tuple(args.values()), got)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_are_independent(provider: str) -> None:
    args = arguments(17)
    clean = s.call("layernorm", provider, args)
    args["x"][3] = torch.nan
    args["x"][9, 100] = torch.inf
    got = s.call("layernorm", provider, args)
    others = [i for i in range(17) if i not in (3, 9)]
    s.assert_bitwise(got[others], clean[others])
    assert got[3].isnan().all() and got[9].isnan().all()
    s.assert_bitwise(s.call("layernorm", provider, args | {"x": args["x"][:2]}), clean[:2])


def test_wrong_arguments() -> None:
    args = arguments()
    s.assert_refused("layernorm", args | {"x": args["x"].double()}, "x", "got torch.float64")
    s.assert_refused("layernorm", args | {"x": torch.zeros(())}, "x", "at least one dimension")
    s.assert_refused("layernorm", args | {"x": args["x"][:, :0]}, "x", "got 0")
    s.assert_refused("layernorm", args | {"weight": args["weight"][:64]}, "weight", "got [64]")
    s.assert_refused("layernorm", args | {"weight": None}, "weight", "got NoneType")
    s.assert_refused("layernorm", args | {"weight": args["weight"].half()}, "weight", "got torch.float16")
    s.assert_refused("layernorm", args | {"bias": args["bias"][None]}, "bias", "got [1, 128]")
    strided = torch.zeros(256, device=s.DEVICE)[::2]
    s.assert_refused("layernorm", args | {"bias": strided}, "bias", "contiguous")
    s.assert_refused_on_another_device("layernorm", args, "weight", "bias")


def test_flashinfer_says_why_it_cannot_serve() -> None:
    op = OPS["layernorm"]
    args = {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in arguments().items()}
    supports = op.providers["flashinfer"].supports
    assert "on a CUDA device" in (supports(*args.values()) or "")
    with pytest.raises(RuntimeError, match="layernorm: provider 'flashinfer' was asked for but cannot serve"):
        s.call("layernorm", "flashinfer", args)


@pytest.mark.gpu
def test_flashinfer_agrees() -> None:
    if why := OPS["layernorm"].refusal("flashinfer", *arguments().values()):
        pytest.skip(why)
    args = arguments(17)
    got = s.call("layernorm", "flashinfer", args)
    want = s.call("layernorm", "reference", args)
    s.assert_same_meta(got, want)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert OPS["layernorm"].refusal("flashinfer", *(args | {"bias": None}).values())


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(torch.ops.sparse_pcg.layernorm.default, tuple(arguments(rows, 32).values()))


@pytest.mark.gpu
def test_bench() -> None:
    args = arguments(8192)
    s.bench("layernorm 8192 x 128 bf16", lambda: custom_ops.layernorm(**args), 2 * 2 * 8192 * 128)
