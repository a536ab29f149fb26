"""The four kernels of ``moe_experts`` for any number of rows.

``plan_kernel`` lists each expert's choices, rows ascending, a chunk of rows a list. Two GEMMs run over blocks of BM
rows of one expert each: x [T, hidden] through [gate; up] [2 * inter, hidden], then the activations through down
[hidden, inter], weighted. A row's only choice goes straight to its place; ``sum_kernel`` adds those of the other rows
in the order of their experts. Rows without an expert here are zeroed beside the first GEMM, which has memory to spare.

The tiles of an expert follow one another, rows first: what shares columns of a weight reads them at about one time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from custom_ops._dependent import let_next_start, wait_for_kernel_before
from custom_ops.moe_tiles import down_tile, gated_tile


@triton.jit(do_not_specialize=["tokens", "chunk"])
def plan_kernel(
    ids: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    tokens: tl.tensor,
    chunk: tl.tensor,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    MOST: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """lists [EXPERTS, tokens]: of each ``chunk`` rows, from the chunk's first on, the choices of an expert.

    counts [EXPERTS, CHUNKS]: how many. A choice is listed as (place * MOST + rank) * 2 + alone: its place in ``ids``,
    how many of the row's experts here come before it, and whether there are no others.
    """
    let_next_start(PDL)
    expert, first = tl.program_id(1), tl.program_id(0) * chunk
    slot = tl.arange(0, TOP_P2)[None, :]
    last = tl.minimum(first + chunk, tokens)
    listed = 0
    lists += expert.to(tl.int64) * tokens + first
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        place = row[:, None] * TOP + slot
        chosen = tl.load(ids + place, mask=(row < last)[:, None] & (slot < TOP), other=EXPERTS)
        serves = chosen == expert
        mine = tl.sum(serves.to(tl.int32), 1)
        rank = tl.sum((chosen < expert).to(tl.int32), 1)
        alone = tl.sum((chosen < EXPERTS).to(tl.int32), 1) == 1
        choice = tl.sum(tl.where(serves, place, 0), 1)
        at = listed + tl.cumsum(mine) - 1
        tl.store(lists + at, (choice * MOST + rank) * 2 + alone.to(tl.int32), mask=mine > 0)
        listed += tl.sum(mine)
    tl.store(counts + expert * CHUNKS + tl.program_id(0), listed)


@triton.jit
def _blocks(totals: tl.tensor, BM: tl.constexpr) -> tl.tensor:
    return (totals + BM - 1) // BM


@triton.jit
def _tile(
    tile: tl.tensor, totals: tl.tensor, EXPERTS_P2: tl.constexpr, BM: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of a tile: its expert, which block of COLUMNS it is, its rows among the expert's choices, which of them are
    there, and how many choices come before the expert's.

    totals [EXPERTS_P2]: the experts' choices.
    """
    blocks = _blocks(totals, BM)
    passed = tl.cumsum(blocks) * COLUMNS <= tile
    expert = tl.sum(passed.to(tl.int32))
    this = tl.arange(0, EXPERTS_P2) == expert
    local = tile - tl.sum(tl.where(passed, blocks, 0)) * COLUMNS
    height = tl.sum(tl.where(this, blocks, 0))
    row = local % height * BM + tl.arange(0, BM)
    mask = row < tl.sum(tl.where(this, totals, 0))
    return expert, local // height, row, mask, tl.sum(tl.where(passed, totals, 0))


@triton.jit
def _zero_rows(
    first: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Zero those of ROWS rows that have no expert here."""
    row, slot = first + tl.arange(0, ROWS), tl.arange(0, TOP_P2)[None, :]
    place = row.to(tl.int64)[:, None] * TOP + slot
    chosen = tl.load(ids + place, mask=(row < tokens)[:, None] & (slot < TOP), other=EXPERTS)
    idle = (row < tokens) & (tl.sum((chosen < EXPERTS).to(tl.int32), 1) == 0)
    if tl.max(idle.to(tl.int32), 0) > 0:
        target = out + row.to(tl.int64)[:, None] * HIDDEN
        for start in range(0, HIDDEN, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            mask = idle[:, None]
            if HIDDEN % BLOCK != 0:
                mask = mask & (column < HIDDEN)
            tl.store(target + column, tl.zeros((ROWS, BLOCK), out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "chunk", "programs"])
def gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    ids: tl.tensor,
    lists: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    totals: tl.tensor,
    active: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    chunk: tl.tensor,
    programs: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    MOST: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    CHUNKS: tl.constexpr,
    FILL_ROWS: tl.constexpr,
    FILL_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The first ``programs`` make the tiles of ``active``, and write totals [EXPERTS] and order: an expert's listed
    choices behind those of the experts before it. The others write the rows of ``out`` that no expert has a part in.
    """
    let_next_start(PDL)
    program = tl.program_id(0)
    if program >= programs:
        _zero_rows(
            (program - programs) * FILL_ROWS, ids, out, tokens, HIDDEN, TOP, TOP_P2, EXPERTS, FILL_ROWS, FILL_BLOCK
        )
        wait_for_kernel_before(PDL)
    else:
        wait_for_kernel_before(PDL)
        COLUMNS: tl.constexpr = (INTER + BN - 1) // BN
        experts, chunks = tl.arange(0, EXPERTS_P2), tl.arange(0, CHUNKS)
        place = experts[:, None] * CHUNKS + chunks[None, :]
        sums = tl.sum(tl.load(counts + place, mask=(experts < EXPERTS)[:, None], other=0), 1)
        if program == 0:
            tl.store(totals + experts, sums, mask=experts < EXPERTS)
        tiles = tl.sum(_blocks(sums, BM)) * COLUMNS
        for tile in tl.range(program, tiles, programs, num_stages=1):
            expert, column, row, mask, before = _tile(tile, sums, EXPERTS_P2, BM, COLUMNS)
            listed = tl.load(counts + expert * CHUNKS + chunks)
            passed = tl.cumsum(listed)[None, :] <= row[:, None]
            skipped = tl.sum(tl.where(passed, listed[None, :], 0), 1)
            entry = lists + expert.to(tl.int64) * tokens
            entry += tl.sum(passed.to(tl.int32), 1) * chunk + row - skipped
            choice = tl.load(entry, mask=mask, other=0)
            ordered = before + row
            if column == 0:
                tl.store(order + ordered, choice, mask=mask)
            source = x + (choice // (2 * MOST * TOP)).to(tl.int64)[:, None] * HIDDEN
            n = column * BN + tl.arange(0, BN)
            matrix = weight + expert.to(tl.int64) * 2 * INTER * HIDDEN
            made = gated_tile(source, matrix, mask, n, HIDDEN, INTER, BM, BN, BK)
            target = active + ordered.to(tl.int64)[:, None] * INTER + n[None, :]
            tl.store(target, made.to(active.dtype.element_ty), mask=mask[:, None] & (n < INTER)[None, :])


@triton.jit
def down_kernel(
    active: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    totals: tl.tensor,
    gates: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    TOP: tl.constexpr,
    MOST: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out: the rows of one expert. parts [T, MOST, HIDDEN]: of the other rows what each expert adds, by rank."""
    let_next_start(PDL)
    wait_for_kernel_before(PDL)
    COLUMNS: tl.constexpr = (HIDDEN + BN - 1) // BN
    experts = tl.arange(0, EXPERTS_P2)
    sums = tl.load(totals + experts, mask=experts < EXPERTS, other=0)
    tiles = tl.sum(_blocks(sums, BM)) * COLUMNS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        expert, column, row, mask, before = _tile(tile, sums, EXPERTS_P2, BM, COLUMNS)
        ordered = before + row
        listed = tl.load(order + ordered, mask=mask, other=0)
        choice = listed // (2 * MOST)
        share = tl.load(gates + choice, mask=mask, other=0.0)
        source = active + ordered.to(tl.int64)[:, None] * INTER
        n = column * BN + tl.arange(0, BN)
        matrix = weight + expert.to(tl.int64) * HIDDEN * INTER
        made = down_tile(source, matrix, mask, n, HIDDEN, INTER, BM, BN, BK) * share[:, None]
        # Rounded, then added to zero, as every part of a sum is: there is no negative zero.
        made = made.to(out.dtype.element_ty).to(tl.float32) + 0.0
        token = (choice // TOP).to(tl.int64)
        apart = parts + (token * MOST + listed // 2 % MOST) * HIDDEN
        target = tl.where(listed % 2 == 1, out + token * HIDDEN, apart)[:, None] + n[None, :]
        tl.store(target, made.to(out.dtype.element_ty), mask=mask[:, None] & (n < HIDDEN)[None, :])


@triton.jit
def sum_kernel(
    parts: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    TOP_P2: tl.constexpr,
    MOST: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program a row: its parts, where several experts have one."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, TOP_P2)
    chosen = tl.load(ids + row * TOP + slot, mask=slot < TOP, other=EXPERTS)
    count = tl.sum((chosen < EXPERTS).to(tl.int32), 0)
    wait_for_kernel_before(PDL)
    if count > 1:
        for start in range(0, HIDDEN, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for part in tl.static_range(MOST):
                there = column < tl.where(part < count, HIDDEN, 0)
                values = tl.load(parts + (row * MOST + part) * HIDDEN + column, mask=there, other=0.0)
                total += values.to(tl.float32)
            tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
