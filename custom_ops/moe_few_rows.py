"""``moe_experts`` for a few rows, in two kernels: launches are all that such a batch costs beside the weights.

One tile holds all rows, so nothing has to be ordered: each program reads the choices of all of them. The second kernel
takes the experts in turn and sums as it goes. The bits are those of the four kernels for any number of rows (seen on
an H200 in bfloat16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._rows import next_power_of_two
from custom_ops.moe_tiles import down_tile, gated_tile

ROWS = 16  # the least that a product takes
# The fastest of six measured on an H200 with hidden 6144: inter 256 and 2048, 1 to 16 rows.
_GATE_COLUMNS, _GATE_DEPTH = 32, 256
_DOWN_COLUMNS, _DOWN_DEPTH = 32, 256
_WARPS, _STAGES = 4, 3


@triton.jit
def _choices(
    ids: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr, TOP: tl.constexpr, TOP_P2: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """[ROWS, TOP_P2]: the experts that the rows choose, -1 for none; where their weights lie; which are there."""
    row, slot = tl.arange(0, ROWS)[:, None], tl.arange(0, TOP_P2)[None, :]
    here = (row < rows) & (slot < TOP)
    place = row * TOP + slot
    return tl.load(ids + place, mask=here, other=-1), place, here


@triton.jit(do_not_specialize=["rows"])
def _gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """out [experts, BM, INTER]: what an expert's first half makes of the rows that choose it; no others are written."""
    expert = tl.program_id(1)
    chosen, _, _ = _choices(ids, rows, BM, TOP, TOP_P2)
    mask = tl.max((chosen == expert).to(tl.int32), 1) > 0
    if tl.max(mask.to(tl.int32), 0) > 0:
        row = tl.arange(0, BM)
        source = x + row.to(tl.int64)[:, None] * HIDDEN
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        weight += expert.to(tl.int64) * 2 * INTER * HIDDEN
        active = gated_tile(source, weight, mask, n, HIDDEN, INTER, BM, BN, BK)
        place = out + (expert * BM + row).to(tl.int64)[:, None] * INTER + n[None, :]
        tl.store(place, active.to(out.dtype.element_ty), mask=mask[:, None] & (n < INTER)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    active: tl.tensor,
    weight: tl.tensor,
    ids: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    chosen, place, here = _choices(ids, rows, BM, TOP, TOP_P2)
    shares = tl.load(gates + place, mask=here, other=0.0)
    row = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for expert in range(EXPERTS):
        serves = chosen == expert
        mask = tl.max(serves.to(tl.int32), 1) > 0
        if tl.max(mask.to(tl.int32), 0) > 0:
            source = active + row[:, None] * INTER
            made = down_tile(source, weight, mask, n, HIDDEN, INTER, BM, BN, BK)
            made *= tl.sum(tl.where(serves, shares, 0.0), 1)[:, None]
            total = tl.where(mask[:, None], total + made.to(out.dtype.element_ty).to(tl.float32), total)
        active += BM * INTER
        weight += HIDDEN * INTER
    target = out + row.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (n < HIDDEN)[None, :])


def launch_few(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """``moe_experts`` of at most ``ROWS`` rows."""
    (rows, hidden), (experts, both, _), top = x.shape, gate_up.shape, ids.shape[1]
    inter = both // 2
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    active = x.new_empty(experts, ROWS, inter)
    shape = {"HIDDEN": hidden, "INTER": inter, "TOP": top, "TOP_P2": next_power_of_two(top), "BM": ROWS}
    options = {"num_warps": _WARPS, "num_stages": _STAGES, "enable_fp_fusion": False}
    _gate_up_kernel[(triton.cdiv(inter, _GATE_COLUMNS), experts)](
        x, gate_up, ids, active, rows, BN=_GATE_COLUMNS, BK=_GATE_DEPTH, **shape, **options
    )
    _down_kernel[(triton.cdiv(hidden, _DOWN_COLUMNS),)](
        active, down, ids, weights, out, rows, EXPERTS=experts, BN=_DOWN_COLUMNS, BK=_DOWN_DEPTH, **shape, **options
    )
    return out


_SIZES = {"HIDDEN": 6144, "INTER": 2048, "TOP": 8, "TOP_P2": 8, "BM": ROWS, "num_warps": _WARPS, "num_stages": _STAGES}
_POINTERS = {"weight": "*bf16", "ids": "*i64", "out": "*bf16", "rows": "i32"}
KERNELS = [
    (_gate_up_kernel, {**_POINTERS, "x": "*bf16"}, {**_SIZES, "BN": _GATE_COLUMNS, "BK": _GATE_DEPTH}),
    (_down_kernel, {**_POINTERS, "active": "*bf16", "gates": "*fp32"},
     {**_SIZES, "EXPERTS": 32, "BN": _DOWN_COLUMNS, "BK": _DOWN_DEPTH}),
]  # fmt: skip
