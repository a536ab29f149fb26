"""Block-wise quantisation to float8 e4m3: scale = max(amax, 1e-4) / 448 a block, q = x / scale.

With ``round_scale`` the scale is rounded up to a power of two (the exponent-only scale format of
DeepSeek-V3.2). A block that holds a NaN becomes NaN throughout, scale included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._register import Provider, define, require
from custom_ops._rows import as_rows, next_power_of_two, require_float

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """|x| as the bits of a float32, in the order of the values; NaN is above everything."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quotient(x: tl.tensor, divisor: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """x / divisor, rounded as a division rounds it. inverse: 1 / divisor, rounded; all of one shape.

    Two corrections of x * inverse, without a division's tests for values that are too small or too large and the
    branch behind them. An exact remainder is +0, so that its product with -1 / divisor is -0, which leaves any q as
    it is, signed zeros too. Negated by a product: in Triton up to 3.6 -x is 0 - x, which makes +0 of either zero.
    """
    opposite, minus_inverse = x * -1.0, inverse * -1.0
    q = x * inverse
    q = tl.fma(tl.fma(q, divisor, opposite), minus_inverse, q)
    return tl.fma(tl.fma(q, divisor, opposite), minus_inverse, q)


@triton.jit
def scale_of_magnitude(bits: tl.tensor, ROUND_SCALE: tl.constexpr) -> tl.tensor:
    """The e4m3 scale of blocks whose largest ``magnitude`` is ``bits``."""
    amax = bits.to(tl.float32, bitcast=True)
    floored = tl.maximum(amax, 1e-4)
    largest, inverse = tl.full(amax.shape, 448.0, tl.float32), tl.full(amax.shape, 1 / 448, tl.float32)
    scale = _quotient(floored, largest, inverse)
    if ROUND_SCALE:
        # Carry any mantissa bit into the exponent: exact, unlike exp2(ceil(log2(scale))).
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    return tl.where(amax < float("inf"), scale, amax)


@triton.jit
def e4m3_scale(x: tl.tensor, axis: tl.constexpr, ROUND_SCALE: tl.constexpr) -> tl.tensor:
    """The scale of each block of a float32 tile, reduced over ``axis`` (kept with size 1)."""
    return scale_of_magnitude(tl.max(magnitude(x), axis, keep_dims=True), ROUND_SCALE)


@triton.jit
def _inverse_power(scale: tl.tensor) -> tl.tensor:
    """1 / scale of a power of two, infinity or NaN: the exponent's opposite."""
    inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return tl.where(scale < float("inf"), inverse, tl.where(scale == float("inf"), 0.0, scale))


@triton.jit
def to_e4m3(x: tl.tensor, scale: tl.tensor, ROUND_SCALE: tl.constexpr) -> tl.tensor:
    """x / scale as e4m3; NaN stays NaN. ROUND_SCALE: as ``scale`` was made. The cast saturates by itself."""
    if ROUND_SCALE:
        y = x * _inverse_power(scale)  # exact, so it is the quotient
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        # Of an infinite scale nothing is left to correct; of quotients too small for it e4m3 makes zero anyway.
        divisor = tl.where(inverse == 0.0, 0.0, scale)
        y = _quotient(x, tl.broadcast_to(divisor, x.shape), tl.broadcast_to(inverse, x.shape))
    return y.to(tl.float8e4nv)


# Elements and warps of a program.
_ELEMENTS = 1024
_WARPS = 2


@triton.jit(do_not_specialize=["num_rows"])
def _quant_kernel(
    x: tl.tensor,
    q: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    blocks_per_row: tl.tensor,
    block_size: tl.tensor,
    ROUND_SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, WIDTH)[None, :]
    valid = block < num_rows.to(tl.int64) * blocks_per_row
    mask = valid[:, None] & (column < block_size)
    source = (block // blocks_per_row) * row_stride + (block % blocks_per_row) * block_size
    tile = tl.load(x + source[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    block_scale = e4m3_scale(tile, 1, ROUND_SCALE)
    tl.store(q + block[:, None] * block_size + column, to_e4m3(tile, block_scale, ROUND_SCALE), mask=mask)
    tl.store(scale + block[:, None], block_scale, mask=valid[:, None])


def _check(x: torch.Tensor, block_size: int = 128, round_scale: bool = False) -> None:
    require_float("quant_fp8", "x", x)
    require(block_size > 0, "quant_fp8", "block_size", "positive", block_size)
    whole = x.shape[-1] > 0 and x.shape[-1] % block_size == 0
    require(whole, "quant_fp8", "x", f"a multiple of block_size {block_size} wide", x.shape[-1])


def e4m3_scale_reference(amax: torch.Tensor, round_scale: bool) -> torch.Tensor:
    """float32 scale of blocks whose largest magnitudes are ``amax`` (float32, any shape)."""
    # A tensor as the divisor: CUDA multiplies by the rounded inverse of a scalar, which is not the same.
    scale = amax.clamp(min=AMAX_FLOOR) / torch.full_like(amax, E4M3_MAX)
    if round_scale:
        rounded = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    return scale


def quant_fp8_reference(
    x: torch.Tensor, block_size: int = 128, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: the specification of ``quant_fp8``."""
    q, scale = _empty(x, block_size)
    blocks = x.float().contiguous().unflatten(-1, (-1, block_size))
    scale.copy_(e4m3_scale_reference(blocks.abs().amax(-1), round_scale))
    q.copy_((blocks / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).view(x.shape))
    return q, scale


def _empty(x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return q, x.new_empty((*x.shape[:-1], x.shape[-1] // block_size), dtype=torch.float32)


def _fake(
    x: torch.Tensor, block_size: int = 128, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, block_size)


def _triton(
    x: torch.Tensor, block_size: int = 128, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _empty(x, block_size)
    if x.numel():
        rows = as_rows(x, x.shape[-1])
        blocks_per_row = x.shape[-1] // block_size
        width = next_power_of_two(block_size)
        blocks = max(1, _ELEMENTS // width)
        _quant_kernel[(triton.cdiv(rows.shape[0] * blocks_per_row, blocks),)](
            rows, q, scale, rows.stride(0), rows.shape[0], blocks_per_row, block_size,
            ROUND_SCALE=round_scale, BLOCKS=blocks, WIDTH=width, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale


define(
    "quant_fp8(Tensor x, int block_size=128, bool round_scale=False) -> (Tensor, Tensor)",
    reference=quant_fp8_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)

KERNELS = [
    (
        _quant_kernel,
        {
            "x": "*bf16", "q": "*fp8e4nv", "scale": "*fp32", "row_stride": "i32", "num_rows": "i32",
            "blocks_per_row": "i32", "block_size": "i32",
        },
        {"ROUND_SCALE": round_scale, "BLOCKS": _ELEMENTS // 128, "WIDTH": 128, "num_warps": _WARPS},
    )
    for round_scale in (False, True)
]  # fmt: skip


def quant_fp8(
    x: torch.Tensor, block_size: int = 128, round_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one float32 scale for each block of ``block_size`` elements of the last dim.

    x: [..., n], bfloat16, float16 or float32, any strides; n a multiple of ``block_size``.
    round_scale: round scales up to powers of two.
    Returns (q, scale): q float8_e4m3fn of x's shape, scale float32 [..., n / block_size], both contiguous;
    x is about q * scale, scale = max(amax, 1e-4) / 448.
    Raises ValueError for another dtype or width.
    """
    return torch.ops.sparse_pcg.quant_fp8(x, block_size, round_scale)
