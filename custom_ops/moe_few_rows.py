"""``moe_experts`` for a few rows, in two kernels: launches are all that such a batch costs beside the weights.

One tile holds all rows, so nothing has to be ordered: each program reads the choices of all of them. The second kernel
takes the experts in turn and sums as it goes; it starts with the first one, and where no row has an expert here it
has nothing to wait for before it writes zeros. The bits are those of the four kernels for any number of rows (seen on
an H200 in bfloat16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._dependent import let_next_start, overlaps, wait_for_kernel_before
from custom_ops._rows import next_power_of_two
from custom_ops.moe_tiles import Tile, down_tile, gated_tile

ROWS = 16  # the least that a product takes

# The fastest of six measured on an H200 with hidden 6144: inter 256 and 2048, 1 to 16 rows.
_GATE = Tile(32, 256, 4, 3)
_GATE_NARROW = Tile(16, 256, 4, 5)  # fewer columns for more programs: each is bound by how much it has in flight
_DOWN = Tile(32, 256, 4, 3)
_NARROW = 512  # columns of an expert up to which it is


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
    PDL: tl.constexpr,
) -> None:
    """out [experts, BM, INTER]: what an expert's first half makes of the rows that choose it; no others are written."""
    let_next_start(PDL)
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
    PDL: tl.constexpr,
) -> None:
    chosen, place, here = _choices(ids, rows, BM, TOP, TOP_P2)
    shares = tl.load(gates + place, mask=here, other=0.0)
    row = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    if tl.max(tl.max(((chosen >= 0) & (chosen < EXPERTS)).to(tl.int32), 1), 0) > 0:
        wait_for_kernel_before(PDL)
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
    wait_for_kernel_before(PDL)


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
    pdl = overlaps(x)
    shape = {"HIDDEN": hidden, "INTER": inter, "TOP": top, "TOP_P2": next_power_of_two(top), "BM": ROWS, "PDL": pdl}
    gate, second = _GATE if inter > _NARROW else _GATE_NARROW, _DOWN
    _gate_up_kernel[(triton.cdiv(inter, gate.columns), experts)](
        x, gate_up, ids, active, rows, **shape, **gate.options()
    )
    _down_kernel[(triton.cdiv(hidden, second.columns),)](
        active, down, ids, weights, out, rows, EXPERTS=experts, **shape, **second.options(), launch_pdl=pdl
    )
    return out


_SIZES = {"HIDDEN": 6144, "TOP": 8, "TOP_P2": 8, "BM": ROWS, "PDL": True}
_POINTERS = {"weight": "*bf16", "ids": "*i64", "out": "*bf16", "rows": "i32"}
KERNELS = [
    *(
        (_gate_up_kernel, {**_POINTERS, "x": "*bf16"}, {**_SIZES, "INTER": inter, **tile.options()})
        for inter, tile in ((2048, _GATE), (256, _GATE_NARROW))
    ),
    (_down_kernel, {**_POINTERS, "active": "*bf16", "gates": "*fp32"},
     {**_SIZES, "INTER": 2048, "EXPERTS": 32, **_DOWN.options(), "launch_pdl": True}),
]  # fmt: skip
