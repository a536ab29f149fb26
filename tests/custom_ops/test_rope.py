from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")


def arguments(rows: int = 5, heads: int = 3, width: int = 128, rope_dim: int = 64, seed: int = 0) -> dict:
    return {
        "x": s.randn((rows, heads, width), torch.bfloat16, seed),
        "positions": s.integers(97, rows, seed),
        "cos_sin_cache": s.rope_table(97, rope_dim),
        "rope_dim": rope_dim,
        "interleaved": False,
    }


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    args = {
        "x": torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], device=s.DEVICE).expand(2, 6),
        "positions": torch.tensor([1, 0], device=s.DEVICE),
        # position 0 turns both pairs by 0 degrees, position 1 the first by 90 and the second by 180
        "cos_sin_cache": torch.tensor([[1.0, 1, 0, 0], [0.0, -1, 1, 0]], device=s.DEVICE),
        "rope_dim": 4,
    }
    half = s.call("apply_rope", provider, args | {"interleaved": False})
    pairs = s.call("apply_rope", provider, args | {"interleaved": True})
    assert half.tolist() == [[-3, -2, 1, -4, 5, 6], [1, 2, 3, 4, 5, 6]]  # pairs (1, 3) and (2, 4)
    assert pairs.tolist() == [[-2, 1, -3, -4, 5, 6], [1, 2, 3, 4, 5, 6]]  # pairs (1, 2) and (3, 4)


@given(
    rows=s.tokens,
    heads=st.sampled_from((0, 1, 5)),
    width=st.sampled_from((64, 100, 128, 192)),
    rope_dim=st.sampled_from((2, 6, 64)),
    interleaved=st.booleans(),
    dtype=s.floats,
    layout=s.layouts,
    seed=s.seeds,
)
def test_triton_equals_reference(
    rows: int,
    heads: int,
    width: int,
    rope_dim: int,
    interleaved: bool,
    dtype: torch.dtype,
    layout: str,
    seed: int,
) -> None:
    args = arguments(rows, heads, width, rope_dim, seed) | {"interleaved": interleaved}
    args["x"] = s.randn((rows, heads, width) if heads else (rows, width), dtype, seed, layout)
    want = s.call("apply_rope", "reference", args)
    got = s.call("apply_rope", "triton", args)
    s.assert_bitwise(got, want)
    s.assert_bitwise(want[..., rope_dim:], args["x"].contiguous()[..., rope_dim:])
    for result in (got, want):
        s.assert_fake_is_exact("apply_rope", tuple(args.values()), result)


@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_is_the_complex_product(interleaved: bool) -> None:
    args = arguments(7) | {"interleaved": interleaved}
    x = args["x"][..., :64].double()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :32], x[..., 32:])
    cos, sin = args["cos_sin_cache"][args["positions"]].double()[:, None].chunk(2, -1)
    turned = torch.complex(a, b) * torch.complex(cos, sin)
    halves = torch.cat((turned.real, turned.imag), -1)
    want = torch.view_as_real(turned).flatten(-2) if interleaved else halves
    got = s.call("apply_rope", "reference", args | {"x": args["x"].float()})[..., :64]
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nan_stays_in_its_row(provider: str) -> None:
    args = arguments(9)
    clean = s.call("apply_rope", provider, args)
    args["x"][4] = torch.nan
    got = s.call("apply_rope", provider, args)
    assert got[4].isnan().all()
    s.assert_bitwise(torch.cat((got[:4], got[5:])), torch.cat((clean[:4], clean[5:])))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_heads_that_lie_far_apart(tmp_path: Path, provider: str) -> None:
    args = arguments(2)
    near = s.call("apply_rope", provider, args)
    s.assert_bitwise(s.call("apply_rope", provider, args | {"x": s.far_apart(args["x"], tmp_path)}), near)
    torch.cuda.empty_cache()  # 8 GB, which other processes use


def test_wrong_arguments() -> None:
    args = arguments()
    refused = lambda change, *said: s.assert_refused("apply_rope", args | change, *said)  # noqa: E731
    refused({"x": args["x"].long()}, "x", "got torch.int64")
    refused({"x": args["x"][None]}, "x", "[T, D] or [T, H, D], got [1, 5, 3, 128]")
    refused({"rope_dim": 63}, "rope_dim", "got 63")
    refused({"rope_dim": 130}, "rope_dim", "got 130")
    refused({"rope_dim": 0}, "rope_dim", "got 0")
    refused({"rope_dim": 32}, "cos_sin_cache", "[*, 32], got [97, 64]")
    refused({"positions": args["positions"].int()}, "positions", "got torch.int32")
    refused({"positions": args["positions"][:4]}, "positions", "[5], got [4]")
    refused({"cos_sin_cache": args["cos_sin_cache"].bfloat16()}, "cos_sin_cache", "got torch.bfloat16")
    refused({"cos_sin_cache": s.rope_table(97, 128)[:, ::2]}, "cos_sin_cache", "contiguous")
    s.assert_refused_on_another_device("apply_rope", args, "positions", "cos_sin_cache")
    with debug_checks():
        refused({"positions": args["positions"] + 97}, "positions", "in [0, 97)")
        refused({"positions": args["positions"] - 97}, "positions", "in [0, 97)")


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(torch.ops.sparse_pcg.apply_rope.default, tuple(arguments(rows).values()))


@pytest.mark.gpu
def test_bench() -> None:
    args = arguments(512, 64)
    s.bench("apply_rope 512 x 64 x 128 bf16", lambda: custom_ops.apply_rope(**args), 2 * 2 * 512 * 64 * 128)
