"""Rotary position embedding of the first ``rope_dim`` dims.

Pair i of a head turns by the angle of frequency i: (a, b) -> (a cos - b sin, b cos + a sin). The pair is
(2i, 2i + 1) when interleaved, else (i, i + rope_dim / 2). The table is [cos | sin], one row a position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._checks import check_range, check_tensor
from custom_ops._register import Provider, define, require
from custom_ops._rows import next_power_of_two, require_float, unit_stride


@triton.jit
def load_pairs(
    source: tl.tensor, mask: tl.tensor, ROWS: tl.constexpr, HALF: tl.constexpr, ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The two elements of each pair, float32 [ROWS, HALF] each; every load is of elements side by side.

    source: [ROWS, 1] pointers to rows, read where mask [ROWS, 1]. HALF: a power of two, at least ROPE_DIM / 2.
    """
    if INTERLEAVED:
        dim = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(source + dim, mask=mask & (dim < ROPE_DIM), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (ROWS, HALF, 2)))
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = mask & (pair < ROPE_DIM // 2)
        a = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + ROPE_DIM // 2 + pair, mask=inside, other=0.0).to(tl.float32)
        return a, b


@triton.jit
def rotated(
    a: tl.tensor, b: tl.tensor, table_row: tl.tensor, mask: tl.tensor, HALF: tl.constexpr, ROPE_DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The pairs turned by the angles of their row. table_row: [ROWS, 1] pointers into the cos | sin table."""
    pair = tl.arange(0, HALF)[None, :]
    inside = mask & (pair < ROPE_DIM // 2)
    cos = tl.load(table_row + pair, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(table_row + ROPE_DIM // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def joined(
    a: tl.tensor, b: tl.tensor, ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tl.tensor:
    """[ROWS, 2 * HALF]: the pairs in the places that ``load_pairs`` took them from, where HALF is ROPE_DIM / 2."""
    pairs = tl.join(a, b)
    if not INTERLEAVED:
        pairs = tl.permute(pairs, (0, 2, 1))
    return tl.reshape(pairs, (ROWS, 2 * HALF))


# Programs of few rows and few warps: many of them hide the latency of two loads in a row (position, then angles).
_ELEMENTS = 2048
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _rope_kernel(
    x: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_rows: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """REST: a power of two, at least the width beyond ROPE_DIM; 0: there is none."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = row < num_rows
    token = (row // heads).to(tl.int64)
    source = x + token * token_stride + (row % heads).to(tl.int64) * head_stride
    target = out + row.to(tl.int64) * width
    table_row = table + tl.load(positions + token, mask=mask, other=0) * ROPE_DIM
    a, b = load_pairs(source, mask, ROWS, HALF, ROPE_DIM, INTERLEAVED)
    if REST > 0:
        dim = ROPE_DIM + tl.arange(0, REST)[None, :]
        inside = mask & (dim < width)
        tl.store(target + dim, tl.load(source + dim, mask=inside), mask=inside)
    a, b = rotated(a, b, table_row, mask, HALF, ROPE_DIM)
    if INTERLEAVED:
        dim = tl.arange(0, 2 * HALF)[None, :]
        y = joined(a, b, ROWS, HALF, True)
        tl.store(target + dim, y.to(out.dtype.element_ty), mask=mask & (dim < ROPE_DIM))
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = mask & (pair < ROPE_DIM // 2)
        tl.store(target + pair, a.to(out.dtype.element_ty), mask=inside)
        tl.store(target + ROPE_DIM // 2 + pair, b.to(out.dtype.element_ty), mask=inside)


def check_positions(
    op: str, x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int
) -> None:
    """positions int64 [T], the table float32 [max positions, rope_dim]; both contiguous on x's device."""
    check_tensor(op, "positions", positions, torch.int64, (x.shape[0],), x.device, contiguous=True)
    check_tensor(
        op, "cos_sin_cache", cos_sin_cache, torch.float32, (None, rope_dim), x.device, contiguous=True
    )
    check_range(op, "positions", positions, 0, cos_sin_cache.shape[0])


def _check(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int, interleaved: bool
) -> None:
    require_float("apply_rope", "x", x)
    require(x.dim() in (2, 3), "apply_rope", "x", "of shape [T, D] or [T, H, D]", list(x.shape))
    fits = rope_dim % 2 == 0 and 0 < rope_dim <= x.shape[-1]
    require(fits, "apply_rope", "rope_dim", f"even, in [2, {x.shape[-1]}]", rope_dim)
    check_positions("apply_rope", x, positions, cos_sin_cache, rope_dim)


def apply_rope_reference(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int, interleaved: bool
) -> torch.Tensor:
    """Plain PyTorch: the specification of ``apply_rope``."""
    table = cos_sin_cache[positions].view(x.shape[0], *(1,) * (x.dim() - 2), rope_dim)
    cos, sin = table.chunk(2, -1)
    turning = x[..., :rope_dim].float()
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    turning = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turning.to(x.dtype), x[..., rope_dim:]), -1).contiguous()


def _fake(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int, interleaved: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _triton(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int, interleaved: bool
) -> torch.Tensor:
    out = x.new_empty(x.shape)
    if x.numel():
        x = unit_stride(x)
        tokens, heads, width = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
        rest = next_power_of_two(width - rope_dim) if width > rope_dim else 0
        block = max(1, _ELEMENTS // next_power_of_two(width))
        _rope_kernel[(triton.cdiv(tokens * heads, block),)](
            x, positions, cos_sin_cache, out, x.stride(0), x.stride(1) if x.dim() == 3 else 0,
            tokens * heads, heads, width,
            ROPE_DIM=rope_dim, INTERLEAVED=interleaved, ROWS=block, HALF=next_power_of_two(rope_dim // 2),
            REST=rest, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


define(
    "apply_rope(Tensor x, Tensor positions, Tensor cos_sin_cache, int rope_dim, bool interleaved) -> Tensor",
    reference=apply_rope_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)

KERNELS = [
    (
        _rope_kernel,
        {
            "x": "*bf16", "positions": "*i64", "table": "*fp32", "out": "*bf16", "token_stride": "i32",
            "head_stride": "i32", "num_rows": "i32", "heads": "i32", "width": "i32",
        },
        {"ROPE_DIM": 64, "INTERLEAVED": interleaved, "ROWS": 8, "HALF": 32, "REST": 64},
    )
    for interleaved in (False, True)
]  # fmt: skip


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding of the first ``rope_dim`` dims of each head; the others are copied.

    x: [T, H, D] or [T, D], bfloat16, float16 or float32, any strides.
    positions: int64 [T], rows of ``cos_sin_cache``: float32 [max positions, rope_dim] = [cosines | sines].
    interleaved: pairs are (2i, 2i + 1); else (i, i + rope_dim / 2).
    Returns a contiguous tensor of x's shape and dtype; computed in float32 and rounded once.
    Raises ValueError for another dtype, shape or device; positions are checked under ``debug_checks``.
    """
    return torch.ops.sparse_pcg.apply_rope(x, positions, cos_sin_cache, rope_dim, interleaved)
