"""The routed experts of a mixture: out[t] = sum over t's choices of weight * down[e] @ (silu(gate) * up).

Four kernels. ``_plan_kernel`` orders the choices by expert, rows ascending. Two GEMMs run over blocks of BM rows of
one expert each: x [T, hidden] through [gate; up] [2 * inter, hidden], then the activations through down
[hidden, inter], weighted. ``_sum_kernel`` adds a row's choices in the order of their experts. Grids are bounded by
shapes; the blocks that the routing leaves empty end at once. A few rows take two kernels instead (moe_few_rows.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from custom_ops._checks import FLOATS, check_range, check_tensor
from custom_ops._register import Provider, define, require
from custom_ops._rows import next_power_of_two
from custom_ops.moe_few_rows import ROWS as FEW_ROWS
from custom_ops.moe_few_rows import launch_few
from custom_ops.moe_tiles import down_tile, gated_tile

_PLAN_BLOCK = 4096
_SUM_BLOCK = 1024
_FEW_EXPERTS = 32  # that take turns


@triton.jit(do_not_specialize=["choices"])
def _plan_kernel(ids: tl.tensor, order: tl.tensor, ends: tl.tensor, choices: tl.tensor, BLOCK: tl.constexpr) -> None:
    """A program an expert: its choices, as indices into ``ids``, go behind those of the experts before it."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        before += (tl.load(ids + start + at, mask=start + at < choices, other=expert) < expert).to(tl.int32)
    end = tl.sum(before)
    for start in range(0, choices, BLOCK):
        choice = start + at
        mine = (choice < choices) & (tl.load(ids + choice, mask=choice < choices, other=0) == expert)
        count = tl.cumsum(mine.to(tl.int32))
        tl.store(order + end + count - 1, choice, mask=mine)
        end += tl.sum(mine.to(tl.int32))
    tl.store(ends + expert, end)


@triton.jit
def _rows_of_block(
    order: tl.tensor, ends: tl.tensor, EXPERTS: tl.constexpr, EXPERTS_P2: tl.constexpr, BM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The expert of this program's block, the block's rows among the ordered choices, which of them are there, their
    choices, and whether any is.

    Expert e has the blocks up to ends[e] // BM + e: as many as its rows need or one more, and none of them depends on
    the sizes of the others but through ``ends``.
    """
    block = tl.program_id(1)
    experts = tl.arange(0, EXPERTS_P2)
    end = tl.load(ends + experts, mask=experts < EXPERTS, other=0)
    passed = (experts < EXPERTS) & (end // BM + experts < block)
    expert = tl.sum(passed.to(tl.int32))
    first = tl.max(tl.where(passed, end, 0))
    last = tl.sum(tl.where(experts == expert, end, 0))
    start = first + (block - first // BM - expert) * BM
    row = start + tl.arange(0, BM)
    mask = row < last
    return expert, row, mask, tl.load(order + row, mask=mask, other=0), start < last


@triton.jit
def _gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    expert, row, mask, choice, any_row = _rows_of_block(order, ends, EXPERTS, EXPERTS_P2, BM)
    if any_row:
        source = x + (choice // TOP).to(tl.int64)[:, None] * HIDDEN
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        weight += expert.to(tl.int64) * 2 * INTER * HIDDEN
        active = gated_tile(source, weight, mask, n, HIDDEN, INTER, BM, BN, BK)
        place = out + row.to(tl.int64)[:, None] * INTER + n[None, :]
        tl.store(place, active.to(out.dtype.element_ty), mask=mask[:, None] & (n < INTER)[None, :])


@triton.jit
def _down_kernel(
    active: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    expert, row, mask, choice, any_row = _rows_of_block(order, ends, EXPERTS, EXPERTS_P2, BM)
    if any_row:
        source = active + row.to(tl.int64)[:, None] * INTER
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        weight += expert.to(tl.int64) * HIDDEN * INTER
        total = down_tile(source, weight, mask, n, HIDDEN, INTER, BM, BN, BK)
        total *= tl.load(gates + choice, mask=mask, other=0.0)[:, None]
        place = out + choice.to(tl.int64)[:, None] * HIDDEN + n[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=mask[:, None] & (n < HIDDEN)[None, :])


@triton.jit
def _sum_kernel(
    per_choice: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, TOP_P2)
    # What no expert of these has written is left as it is in memory.
    chosen = tl.load(ids + row * TOP + slot, mask=slot < TOP, other=EXPERTS)
    total = tl.zeros((BLOCK,), tl.float32)
    expert = tl.min(chosen)
    for _ in tl.static_range(TOP):
        there = column < tl.where(expert < EXPERTS, HIDDEN, 0)
        place = row * TOP + tl.sum(tl.where(chosen == expert, slot, 0))
        values = tl.load(per_choice + place * HIDDEN + column, mask=there, other=0.0)
        total = tl.where(there, total + values.to(tl.float32), total)
        expert = tl.min(tl.where(chosen > expert, chosen, EXPERTS))
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)


class Tiles(NamedTuple):
    """Rows of a block; columns of a program of the first GEMM and of the second; depth of a step; warps."""

    rows: int
    gate_columns: int
    down_columns: int
    depth: int
    warps: int


_FEW = Tiles(16, 64, 128, 128, 4)
_SOME = Tiles(64, 64, 128, 64, 4)
_MANY_NARROW = Tiles(128, 64, 128, 64, 4)
_MANY_WIDE = Tiles(128, 128, 128, 64, 8)


def tiles_for(rows_per_expert: float, inter: int) -> Tiles:
    """The fastest of those measured on an H200 with hidden 6144: inter 256 and 2048, 16 to 8192 rows."""
    if rows_per_expert <= _FEW.rows:
        return _FEW
    if rows_per_expert <= _SOME.rows:
        return _SOME
    return _MANY_WIDE if inter >= 1024 else _MANY_NARROW


def _check(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
) -> None:
    op = "moe_experts"
    check_tensor(op, "x", x, FLOATS, (None, None))
    (tokens, hidden), dtype, device = x.shape, x.dtype, x.device
    check_tensor(op, "gate_up", gate_up, dtype, (None, None, hidden), device, contiguous=True)
    experts, both, _ = gate_up.shape
    require(experts > 0, op, "gate_up", "of at least one expert", list(gate_up.shape))
    require(both > 0 and both % 2 == 0, op, "gate_up", "of an even number of rows", list(gate_up.shape))
    check_tensor(op, "down", down, dtype, (experts, hidden, both // 2), device, contiguous=True)
    check_tensor(op, "weights", weights, torch.float32, (tokens, None), device)
    require(weights.shape[1] > 0, op, "weights", "of at least one choice a row", list(weights.shape))
    check_tensor(op, "ids", ids, torch.int64, tuple(weights.shape), device)
    require(num_experts >= experts, op, "num_experts", f"at least the {experts} experts here", num_experts)
    check_range(op, "ids", ids, 0, experts + 1)


def moe_experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Plain PyTorch: the specification of ``moe_experts``. Every expert is evaluated on every row."""
    experts = gate_up.shape[0]
    # The last column takes what goes to no expert here, several times over: it is dropped.
    gates = weights.new_zeros((x.shape[0], experts + 1)).scatter(1, ids, weights)[:, :experts].unsqueeze(2)
    # One GEMM over all experts each way; the second one sums over them.
    gate, up = F.linear(x, gate_up.flatten(0, 1)).unflatten(1, gate_up.shape[:2]).chunk(2, dim=-1)
    active = (F.silu(gate) * up).float()
    # where, not a product alone: an expert that a row does not use may overflow on it
    weighted = torch.where(gates != 0, active * gates, 0.0).to(x.dtype)
    return F.linear(weighted.flatten(1), down.transpose(0, 1).flatten(1))


def _fake(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _triton_supports(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
) -> str | None:
    return "takes bfloat16 or float16" if x.dtype == torch.float32 else None


def launch(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    """``moe_experts`` by the kernels with these tiles."""
    (tokens, hidden), (experts, both, _), top = x.shape, gate_up.shape, ids.shape[1]
    inter = both // 2
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    rows = tokens * min(top, experts)  # no row names an expert twice
    order, ends = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (rows, experts))
    _plan_kernel[(experts,)](ids, order, ends, tokens * top, BLOCK=_PLAN_BLOCK, num_warps=8)
    active, per_choice = x.new_empty(rows, inter), x.new_empty(tokens * top, hidden)
    blocks = rows // tiles.rows + experts
    shape = {"HIDDEN": hidden, "INTER": inter, "EXPERTS": experts, "EXPERTS_P2": next_power_of_two(experts)}
    options = {"BM": tiles.rows, "BK": tiles.depth, "num_warps": tiles.warps, "num_stages": 3}
    options["enable_fp_fusion"] = False
    _gate_up_kernel[(triton.cdiv(inter, tiles.gate_columns), blocks)](
        x, gate_up, order, ends, active, TOP=top, BN=tiles.gate_columns, **shape, **options
    )
    _down_kernel[(triton.cdiv(hidden, tiles.down_columns), blocks)](
        active, down, order, ends, weights, per_choice, BN=tiles.down_columns, **shape, **options
    )
    _sum_kernel[(tokens, triton.cdiv(hidden, _SUM_BLOCK))](
        per_choice, ids, out, HIDDEN=hidden, TOP=top, TOP_P2=next_power_of_two(top), EXPERTS=experts, BLOCK=_SUM_BLOCK
    )
    return out


def _triton(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    if len(x) <= FEW_ROWS and len(gate_up) <= _FEW_EXPERTS:
        return launch_few(x, gate_up, down, weights, ids)
    tiles = tiles_for(ids.numel() / num_experts, down.shape[2])
    return launch(x, gate_up, down, weights, ids, tiles)


define(
    "moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, int num_experts) -> Tensor",
    reference=moe_experts_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton, supports=_triton_supports)},
    preference=("triton",),
)

_SIZES = {"HIDDEN": 6144, "EXPERTS": 32, "EXPERTS_P2": 32}
_POINTERS = {"order": "*i32", "ends": "*i32", "weight": "*bf16", "out": "*bf16"}
KERNELS = [
    (_plan_kernel, {"ids": "*i64", "order": "*i32", "ends": "*i32", "choices": "i32"},
     {"BLOCK": _PLAN_BLOCK, "num_warps": 8}),
    (_sum_kernel, {"per_choice": "*bf16", "ids": "*i64", "out": "*bf16"},
     {"HIDDEN": 6144, "TOP": 8, "TOP_P2": 8, "EXPERTS": 32, "BLOCK": _SUM_BLOCK}),
    *(
        entry
        for tiles, inter in ((_FEW, 2048), (_SOME, 2048), (_MANY_NARROW, 256), (_MANY_WIDE, 2048))
        for options in ({"BM": tiles.rows, "BK": tiles.depth, "num_warps": tiles.warps, "num_stages": 3},)
        for entry in (
            (_gate_up_kernel, {**_POINTERS, "x": "*bf16"},
             {**_SIZES, "INTER": inter, "TOP": 8, "BN": tiles.gate_columns, **options}),
            (_down_kernel, {**_POINTERS, "active": "*bf16", "gates": "*fp32"},
             {**_SIZES, "INTER": inter, "BN": tiles.down_columns, **options}),
        )
    ),
]  # fmt: skip


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """The weighted sum of what each row's routed experts, SwiGLU MLPs, make of it.

    x: [T, hidden], bfloat16, float16 or float32. gate_up: [experts, 2 * inter, hidden], the rows of the gate before
    those of the up projection; down: [experts, hidden, inter]; both contiguous and of x's dtype.
    weights: float32 [T, k]. ids: int64 [T, k], in [0, experts); ``experts`` (the number of them) for a choice whose
    expert is not here, such as all of a pad row. A row names an expert once at most.
    num_experts: the experts that the router chose among, >= experts: tiles are chosen for T * k / num_experts rows an
    expert.
    Returns [T, hidden] in x's dtype; rows without an expert here are zero, whatever x and weights hold.
    The kernels take bfloat16 and float16. They read nothing on the host, and sum in one order: a row's result depends
    on its own values alone, and on T only through the height of the tiles (on an H200 tiles of 16 to 128 rows gave
    the same bits).
    Raises ValueError for another dtype, shape or device.
    """
    return torch.ops.sparse_pcg.moe_experts(x, gate_up, down, weights, ids, num_experts)
