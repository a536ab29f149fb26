"""Triton kernels of ``fill_batch_metadata``: one takes tensors, the other finds all that varies in a block of integers.

The latter's arguments are the same for every batch, so that a captured launch of it serves them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from custom_ops.batch_metadata import PAGE

ROWS = 128  # that one program fills
COPY = 1024  # entries of the page table that one program copies at a time
_REQUESTS = 64  # that are counted at a time

CONSTANTS = {"PAGE_SIZE": PAGE, "ROWS": ROWS, "REQUESTS": _REQUESTS, "COPY": COPY}


@triton.jit
def _fill(
    prefix_lens: tl.tensor,
    new_lens: tl.tensor,
    table: tl.tensor,
    table_stride: tl.tensor,
    new_ids: tl.tensor,
    ids_step: tl.tensor,
    tail_ids: tl.tensor,
    tails_step: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    select_lens: tl.tensor,
    request_of_row: tl.tensor,
    static_page_table: tl.tensor,
    num_rows: tl.tensor,
    input_ids: tl.tensor,
    last_rows: tl.tensor,
    requests: tl.tensor,
    pages: tl.tensor,
    row_blocks: tl.tensor,
    rows: tl.tensor,
    static_pages: tl.tensor,
    index_topk: tl.tensor,
    IDS: tl.constexpr,
    LAST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COPY: tl.constexpr,
) -> None:
    """The first ``row_blocks`` programs fill ROWS rows each, the others take turns at copying the page table.

    A row finds its request by counting the requests that end at or before it, so no scan crosses programs.
    tails_step: 0 without tails; else a row takes the id after its own, a request's last row its tail.
    """
    if tl.program_id(0) < row_blocks:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        owner = tl.zeros((ROWS,), tl.int32)
        first = tl.zeros((ROWS,), tl.int32)
        total = 0
        for at in range(0, requests, REQUESTS):
            request = at + tl.arange(0, REQUESTS)
            length = tl.load(new_lens + request, mask=request < requests, other=0)
            end = total + tl.cumsum(length)
            passed = (end[None, :] <= row[:, None]) & (request < requests)[None, :]
            owner += tl.sum(passed.to(tl.int32), axis=1)
            first += tl.sum(tl.where(passed, length[None, :], 0), axis=1)
            total += tl.sum(length)
            if LAST:  # noqa: SIM102  (the outer one is decided when the kernel is compiled)
                if tl.program_id(0) == 0:
                    tl.store(last_rows + request, tl.maximum(end - 1, 0).to(tl.int64), mask=request < requests)
        valid = row < total
        position = tl.load(prefix_lens + owner, mask=valid, other=0) + row - first
        page = tl.load(table + owner.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        stored = row < rows
        tl.store(positions + row, tl.where(valid, position, 0).to(tl.int64), mask=stored)
        tl.store(slots + row, tl.where(valid, slot, 0), mask=stored)
        tl.store(kv_lens + row, tl.where(valid, position + 1, 0), mask=stored)
        tl.store(select_lens + row, tl.where(valid, tl.minimum(position + 1, index_topk), 1), mask=stored)
        tl.store(request_of_row + row, tl.where(valid, owner, 0), mask=stored)
        if IDS:
            tails = tl.zeros((ROWS,), tl.int32) + tl.minimum(tails_step, 1).to(tl.int32) > 0
            own = tl.load(new_lens + owner, mask=valid & tails, other=0)
            last = (row - first == own - 1) & tails
            taken = (row + tails.to(tl.int32)).to(tl.int64) * ids_step
            following = tl.load(new_ids + taken, mask=valid & ~last, other=0).to(tl.int64)
            tail = tl.load(tail_ids + owner.to(tl.int64) * tails_step, mask=valid & last, other=0).to(tl.int64)
            tl.store(input_ids + row, following + tail, mask=stored)
        if tl.program_id(0) == 0:
            tl.store(num_rows, total)
    else:
        copies = tl.num_programs(0) - row_blocks
        for begin in range((tl.program_id(0) - row_blocks) * COPY, requests * pages, copies * COPY):
            entry = begin + tl.arange(0, COPY)
            inside = entry < requests * pages
            request = (entry // pages).to(tl.int64)
            source = table + request * table_stride + entry % pages
            target = static_page_table + request * static_pages + entry % pages
            tl.store(target, tl.load(source, mask=inside), mask=inside)


# What varies from batch to batch must not make another kernel: compiling one would stall a request.
@triton.jit(
    do_not_specialize=["requests", "pages", "row_blocks", "tails_step", "rows", "static_pages", "index_topk"],
    do_not_specialize_on_alignment=["prefix_lens", "new_lens", "page_table", "new_ids", "tail_ids"],
)
def fill_kernel(
    prefix_lens: tl.tensor,
    new_lens: tl.tensor,
    page_table: tl.tensor,
    new_ids: tl.tensor,
    tail_ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    select_lens: tl.tensor,
    request_of_row: tl.tensor,
    static_page_table: tl.tensor,
    num_rows: tl.tensor,
    input_ids: tl.tensor,
    last_rows: tl.tensor,
    requests: tl.tensor,
    pages: tl.tensor,
    row_blocks: tl.tensor,
    tails_step: tl.tensor,
    rows: tl.tensor,
    static_pages: tl.tensor,
    index_topk: tl.tensor,
    IDS: tl.constexpr,
    LAST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COPY: tl.constexpr,
) -> None:
    """tails_step: 1 with tail_ids, 0 without."""
    _fill(
        prefix_lens, new_lens, page_table, pages, new_ids, 1, tail_ids, tails_step,
        positions, slots, kv_lens, select_lens, request_of_row, static_page_table, num_rows, input_ids, last_rows,
        requests, pages, row_blocks, rows, static_pages, index_topk, IDS, LAST, PAGE_SIZE, ROWS, REQUESTS, COPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_blocks", "rows", "static_pages", "index_topk"])
def fill_described_kernel(
    header: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    select_lens: tl.tensor,
    request_of_row: tl.tensor,
    static_page_table: tl.tensor,
    num_rows: tl.tensor,
    input_ids: tl.tensor,
    last_rows: tl.tensor,
    row_blocks: tl.tensor,
    rows: tl.tensor,
    static_pages: tl.tensor,
    index_topk: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COPY: tl.constexpr,
) -> None:
    """header: int64, as ``metadata_header.Description`` lists them."""
    requests = tl.load(header).to(tl.int32)
    pages = tl.load(header + 1).to(tl.int32)
    lens = tl.load(header + 2).to(tl.pointer_type(tl.int32))
    table = tl.load(header + 3).to(tl.pointer_type(tl.int32))
    table_stride = tl.load(header + 4)
    ids = tl.load(header + 5).to(tl.pointer_type(tl.int32))
    ids_step = tl.load(header + 6)
    tails = tl.load(header + 7).to(tl.pointer_type(tl.int32))
    tails_step = tl.load(header + 8)
    _fill(
        lens, lens + requests, table, table_stride, ids, ids_step, tails, tails_step,
        positions, slots, kv_lens, select_lens, request_of_row, static_page_table, num_rows, input_ids, last_rows,
        requests, pages, row_blocks, rows, static_pages, index_topk, True, True, PAGE_SIZE, ROWS, REQUESTS, COPY,
    )  # fmt: skip


_BUFFERS = {
    "positions": "*i64",
    "slots": "*i64",
    "kv_lens": "*i32",
    "select_lens": "*i32",
    "request_of_row": "*i32",
    "static_page_table": "*i32",
    "num_rows": "*i32",
    "input_ids": "*i64",
    "last_rows": "*i64",
    **dict.fromkeys(("row_blocks", "rows", "static_pages", "index_topk"), "i32"),
}
_SOURCES = {
    "prefix_lens": "*i32",
    "new_lens": "*i32",
    "page_table": "*i32",
    "new_ids": "*i64",
    "tail_ids": "*i64",
    **dict.fromkeys(("requests", "pages", "tails_step"), "i32"),
}
KERNELS = [
    *((fill_kernel, {**_SOURCES, **_BUFFERS}, {"IDS": ids, "LAST": ids, **CONSTANTS}) for ids in (True, False)),
    (fill_described_kernel, {"header": "*i64", **_BUFFERS}, CONSTANTS),
]
