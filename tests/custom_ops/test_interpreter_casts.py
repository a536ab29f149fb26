"""The interpreter casts as a GPU does (nearest even, subnormals, float8 saturation), multiplies right, fuses."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.custom_ops import strategies as s


@triton.jit
def _cast_kernel(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_casts_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([17.0, 19.0, -17.0, 0.0019, 2**-9, 2**-10, 3 * 2**-10, 1 + 2**-8, 1 + 3 * 2**-8,
                      -0.0, 447.0, torch.nan, torch.inf, 0.1, 1e-30, 300.7])  # fmt: skip
    want = x.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)
    out = torch.empty(16, dtype=dtype, device=s.DEVICE)
    _cast_kernel[(1,)](x.to(s.DEVICE), out, N=16)
    number = ~want.float().isnan()
    got_bytes, want_bytes = (t.cpu().view(torch.uint8).view(16, -1)[number] for t in (out, want))
    assert torch.equal(got_bytes, want_bytes)
    assert out.float().isnan().cpu().equal(want.float().isnan())


@triton.jit
def _dot_kernel(a: tl.tensor, b: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, tl.dot(tl.load(a + i), tl.load(b + i), input_precision="ieee"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_products_are_exact(dtype: torch.dtype) -> None:
    a, b = (torch.randint(-8, 9, (32, 32)).float().to(dtype).to(s.DEVICE) for _ in range(2))
    out = torch.empty(32, 32, device=s.DEVICE)
    _dot_kernel[(1,)](a, b, out, N=32)
    assert torch.equal(out, a.float() @ b.float())


@triton.jit
def _fma_kernel(x: tl.tensor, y: tl.tensor, z: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


def test_an_fma_rounds_once() -> None:
    one = 1 + 2**-12  # squared: 1 + 2**-11 + 2**-24, the last of which a float32 does not hold
    # Of a sum half way between two float32 the part that a float64 does not hold decides: up, down, the even one.
    rows = [
        (one, one, -(1 + 2**-11), 2**-24),
        (one, -one, 1 + 2**-11, -(2**-24)),
        (one, one, 2**-40, 1 + 2**-11 + 2**-23),
        (one, one, -(2**-40), 1 + 2**-11),
        (one, one, 0.0, 1 + 2**-11),
        (2**-40, 2**-40, 1 + 2**-23, 1 + 2**-23),
        (-0.0, 2.0, 0.0, 0.0),
        (-0.0, 2.0, -0.0, -0.0),
    ]
    x, y, z, want = torch.tensor(rows, device=s.DEVICE).T.contiguous()
    out = torch.empty_like(want)
    _fma_kernel[(1,)](x, y, z, out, N=8)
    s.assert_bitwise(out, want)
