"""Walsh-Hadamard transform of the last dim: y = scale * x @ H_n, H_n[i, j] = (-1)^popcount(i & j).

n additions and subtractions in each of log2(n) stages, in float32, in the same order in every provider:
they agree bitwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._register import Provider, define, require
from custom_ops._rows import as_rows, require_float

MAX_DIM = 4096


@triton.jit
def _butterfly(x: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    pairs = tl.permute(tl.reshape(x, (ROWS, N // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, N))


@triton.jit
def hadamard_rows(x: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr, LOG_N: tl.constexpr) -> tl.tensor:
    """Unscaled transform of each row of a float32 tile [ROWS, N]."""
    for stage in tl.static_range(LOG_N):
        x = _butterfly(x, ROWS, N, 1 << stage)
    return x


# Elements and warps of a program: by time on an H200.
_ELEMENTS = 1024
_WARPS = 1


# The row count is never specialised on: a new batch size must not compile anything.
@triton.jit(do_not_specialize=["num_rows"])
def _hadamard_kernel(
    x: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    LOG_N: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, N)
    mask = (row < num_rows)[:, None]
    row = row.to(tl.int64)[:, None]
    tile = tl.load(x + row * row_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tile = hadamard_rows(tile, ROWS, N, LOG_N) * scale
    tl.store(out + row * N + column[None, :], tile.to(out.dtype.element_ty), mask=mask)


def _check(x: torch.Tensor, scale: float) -> None:
    require_float("hadamard", "x", x)
    n = x.shape[-1]
    require(0 < n <= MAX_DIM and n & (n - 1) == 0, "hadamard", "x", f"a power of two up to {MAX_DIM} wide", n)


def hadamard_reference(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Plain PyTorch: the specification of ``hadamard``."""
    n = x.shape[-1]
    y = x.float().reshape(-1, n)
    half = 1
    while half < n:
        a, b = y.view(-1, n // (2 * half), 2, half).unbind(2)
        y = torch.stack((a + b, a - b), 2).view(-1, n)
        half *= 2
    return (y * scale).to(x.dtype).view(x.shape)


def _fake(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _triton(x: torch.Tensor, scale: float) -> torch.Tensor:
    n = x.shape[-1]
    out = x.new_empty(x.shape)
    if x.numel():
        rows = as_rows(x, n)
        block = max(1, _ELEMENTS // n)
        _hadamard_kernel[(triton.cdiv(rows.shape[0], block),)](
            rows, out, rows.stride(0), rows.shape[0], scale, ROWS=block, N=n, LOG_N=n.bit_length() - 1,
            num_warps=8 if n > 2048 else _WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


define(
    "hadamard(Tensor x, float scale) -> Tensor",
    reference=hadamard_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)

KERNELS = [
    (
        _hadamard_kernel,
        {"x": "*bf16", "out": "*bf16", "row_stride": "i32", "num_rows": "i32", "scale": "fp32"},
        {"ROWS": 1024 // n, "N": n, "LOG_N": n.bit_length() - 1},
    )
    for n in (128, 512)
]


def hadamard(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Walsh-Hadamard transform of the last dim, in natural order, times ``scale``.

    x: [..., n], bfloat16, float16 or float32, any strides; n a power of two, at most 4096.
    scale: factor on the result; ``n ** -0.5`` makes the transform orthonormal.
    Returns a contiguous tensor of x's shape and dtype; computed in float32 and rounded once.
    Raises ValueError for another dtype or width.
    """
    return torch.ops.sparse_pcg.hadamard(x, scale)
