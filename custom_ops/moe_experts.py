"""The routed experts of a mixture: out[t] = sum over t's choices of weight * down[e] @ (silu(gate) * up).

The kernels are in moe_kernels.py, those of a few rows in moe_few_rows.py. Grids are bounded by shapes; programs that
the routing leaves without work end at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from custom_ops._checks import FLOATS, check_range, check_tensor
from custom_ops._dependent import overlaps
from custom_ops._register import Provider, define, require
from custom_ops._rows import next_power_of_two
from custom_ops.moe_few_rows import ROWS as FEW_ROWS
from custom_ops.moe_few_rows import launch_few
from custom_ops.moe_kernels import down_kernel, gate_up_kernel, plan_kernel, sum_kernel
from custom_ops.moe_tiles import Tile

_FEW_EXPERTS = 32  # that take turns
_CHUNKS = 32  # that the plan divides the rows into
_PLAN_ROWS = 256  # that it looks at in one step
_PROGRAMS = 1056  # of a GEMM at most: each takes further tiles then
_FILL_ROWS = 16  # of a program that writes zeros
_FILL_BLOCK = 512
_SUM_BLOCK = 2048
_ENOUGH = 64  # programs of the first GEMM for which columns are worth dividing
_LEAST_COLUMNS = 16


class Tiles(NamedTuple):
    """Rows of a block, tiles of the first GEMM and of the second."""

    rows: int
    gate: Tile
    down: Tile


_FEW = Tiles(16, Tile(32, 256, 4, 3), Tile(64, 128, 4, 3))
_SOME = Tiles(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 3))
_MANY_NARROW = Tiles(128, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))
_MANY_WIDE = Tiles(128, Tile(64, 128, 8, 3), Tile(256, 64, 8, 3))
# The first GEMM where its programs are few: each is bound by how much it has in flight.
_SLIM = {64: (128, 4, 6), 128: (128, 8, 4)}


def tiles_for(rows_per_expert: float, inter: int, experts: int = 256) -> Tiles:
    """By what was measured on an H200 with hidden 6144: inter 256 and 2048, 1 to 8192 rows.

    rows_per_expert: as the router spreads them. experts: here.
    """
    if rows_per_expert <= _FEW.rows:
        tiles = _FEW
    elif rows_per_expert <= _SOME.rows:
        tiles = _SOME
    else:
        tiles = _MANY_WIDE if inter >= 1024 else _MANY_NARROW
    columns, blocks = tiles.gate.columns, experts * math.ceil(rows_per_expert / tiles.rows)
    while tiles.rows in _SLIM and columns > _LEAST_COLUMNS and blocks * triton.cdiv(inter, columns) < _ENOUGH:
        columns //= 2
    return tiles if columns == tiles.gate.columns else tiles._replace(gate=Tile(columns, *_SLIM[tiles.rows]))


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
    if x.dtype == torch.float32:
        return "takes bfloat16 or float16"
    if 2 * ids.numel() * min(ids.shape[1], len(down)) >= 1 << 31:
        return "choices are more than it counts"
    return None


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
    integers = lambda *shape: torch.empty(shape, dtype=torch.int32, device=x.device)  # noqa: E731
    most, pdl = min(top, experts), overlaps(x)  # no row names an expert twice
    chunk = triton.cdiv(tokens, _CHUNKS)
    lists, counts = integers(experts, tokens), integers(experts, _CHUNKS)
    order, totals = integers(tokens * most), integers(experts)
    active, parts = x.new_empty(tokens * most, inter), x.new_empty(tokens * most if most > 1 else 0, hidden)
    routing = {"TOP": top, "MOST": most, "EXPERTS": experts, "PDL": pdl}
    choices = {**routing, "TOP_P2": next_power_of_two(top)}
    shape = {"HIDDEN": hidden, "INTER": inter, "EXPERTS_P2": next_power_of_two(experts), "BM": tiles.rows}
    blocks = tokens * most // tiles.rows + experts
    plan_kernel[(_CHUNKS, experts)](ids, lists, counts, tokens, chunk, **choices, CHUNKS=_CHUNKS, BLOCK=_PLAN_ROWS)
    programs = min(_PROGRAMS, triton.cdiv(inter, tiles.gate.columns) * blocks)
    gate_up_kernel[(programs + triton.cdiv(tokens, _FILL_ROWS),)](
        x, gate_up, ids, lists, counts, order, totals, active, out, tokens, chunk, programs,
        **choices, **shape, **tiles.gate.options(), CHUNKS=_CHUNKS, FILL_ROWS=_FILL_ROWS, FILL_BLOCK=_FILL_BLOCK,
        launch_pdl=pdl,
    )  # fmt: skip
    programs = min(_PROGRAMS, triton.cdiv(hidden, tiles.down.columns) * blocks)
    down_kernel[(programs,)](
        active, down, order, totals, weights, parts, out,
        **routing, **shape, **tiles.down.options(), launch_pdl=pdl,
    )  # fmt: skip
    if most > 1:
        sum_kernel[(tokens,)](parts, ids, out, **choices, HIDDEN=hidden, BLOCK=_SUM_BLOCK, launch_pdl=pdl)
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
    tiles = tiles_for(ids.numel() / num_experts, down.shape[2], len(down))
    return launch(x, gate_up, down, weights, ids, tiles)


define(
    "moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, int num_experts) -> Tensor",
    reference=moe_experts_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton, supports=_triton_supports)},
    preference=("triton",),
)

_ROUTING = {"TOP": 8, "TOP_P2": 8, "MOST": 8, "EXPERTS": 32, "PDL": True}
_INT32 = dict.fromkeys(("tokens", "chunk", "programs"), "i32")
_POINTERS = {"ids": "*i64", **dict.fromkeys(("lists", "counts", "order", "totals"), "*i32"), "weight": "*bf16"}
_POINTERS |= {"gates": "*fp32", **dict.fromkeys(("x", "active", "parts", "out"), "*bf16"), **_INT32}
KERNELS = [
    (plan_kernel, _POINTERS, {**_ROUTING, "CHUNKS": _CHUNKS, "BLOCK": _PLAN_ROWS}),
    (sum_kernel, _POINTERS, {**_ROUTING, "HIDDEN": 6144, "BLOCK": _SUM_BLOCK, "launch_pdl": True}),
    *(
        entry
        for tiles, inter in (
            (_FEW, 2048), (_SOME, 2048), (_MANY_NARROW, 256), (_MANY_WIDE, 2048), (tiles_for(1, 256, 4), 256),
            (tiles_for(64, 256, 4), 256), (tiles_for(256, 256, 4), 256),
        )
        for sizes in ({**_ROUTING, "HIDDEN": 6144, "INTER": inter, "EXPERTS_P2": 32, "BM": tiles.rows},)
        for entry in (
            (gate_up_kernel, _POINTERS,
             {**sizes, **tiles.gate.options(), "CHUNKS": _CHUNKS, "FILL_ROWS": _FILL_ROWS, "FILL_BLOCK": _FILL_BLOCK,
              "launch_pdl": True}),
            (down_kernel, _POINTERS, {**sizes, **tiles.down.options(), "launch_pdl": True}),
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
