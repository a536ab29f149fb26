"""Every per-row buffer of a batch, pad tail included, from (prefix lengths, new lengths, page table)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._checks import check_range, check_tensor
from custom_ops._register import Provider, debug_checks_on, define, require
from custom_ops.batch_metadata import PAGE

_ROWS = 128
_REQUESTS = 64
_COPY = 1024


@triton.jit(do_not_specialize=["requests", "pages", "row_blocks"])
def _fill_kernel(
    prefix_lens: tl.tensor,
    new_lens: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    select_lens: tl.tensor,
    request_of_row: tl.tensor,
    static_page_table: tl.tensor,
    num_rows: tl.tensor,
    requests: tl.tensor,
    pages: tl.tensor,
    row_blocks: tl.tensor,
    rows: tl.tensor,
    static_pages: tl.tensor,
    index_topk: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COPY: tl.constexpr,
) -> None:
    """The first programs fill ROWS rows each, the others copy COPY entries of the page table each.

    A row finds its request by counting the requests that end at or before it, so no scan crosses programs.
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
        valid = row < total
        position = tl.load(prefix_lens + owner, mask=valid, other=0) + row - first
        page = tl.load(page_table + owner * pages + position // PAGE_SIZE, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        stored = row < rows
        tl.store(positions + row, tl.where(valid, position, 0).to(tl.int64), mask=stored)
        tl.store(slots + row, tl.where(valid, slot, 0), mask=stored)
        tl.store(kv_lens + row, tl.where(valid, position + 1, 0), mask=stored)
        tl.store(select_lens + row, tl.where(valid, tl.minimum(position + 1, index_topk), 1), mask=stored)
        tl.store(request_of_row + row, tl.where(valid, owner, 0), mask=stored)
        if tl.program_id(0) == 0:
            tl.store(num_rows, total)
    else:
        entry = (tl.program_id(0) - row_blocks) * COPY + tl.arange(0, COPY)
        inside = entry < requests * pages
        target = static_page_table + (entry // pages) * static_pages + entry % pages
        tl.store(target, tl.load(page_table + entry, mask=inside), mask=inside)


def _triton(
    prefix_lens: torch.Tensor,
    new_lens: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    select_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    static_page_table: torch.Tensor,
    num_rows: torch.Tensor,
    index_topk: int,
) -> None:
    requests, pages = page_table.shape
    rows = positions.shape[0]
    row_blocks = max(1, triton.cdiv(rows, _ROWS))  # one at least: it writes num_rows
    _fill_kernel[(row_blocks + triton.cdiv(requests * pages, _COPY),)](
        prefix_lens,
        new_lens,
        page_table,
        positions,
        slots,
        kv_lens,
        select_lens,
        request_of_row,
        static_page_table,
        num_rows,
        requests,
        pages,
        row_blocks,
        rows,
        static_page_table.shape[1],
        index_topk,
        PAGE_SIZE=PAGE,
        ROWS=_ROWS,
        REQUESTS=_REQUESTS,
        COPY=_COPY,
    )


def fill_batch_metadata_reference(
    prefix_lens: torch.Tensor,
    new_lens: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    select_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    static_page_table: torch.Tensor,
    num_rows: torch.Tensor,
    index_topk: int,
) -> None:
    """The specification, any device, no host sync."""
    requests, pages = page_table.shape
    static_page_table[:requests, :pages] = page_table
    if requests == 0 or pages == 0:
        for buffer, pad in ((positions, 0), (slots, 0), (kv_lens, 0), (select_lens, 1), (request_of_row, 0)):
            buffer.fill_(pad)
        num_rows.zero_()
        return
    ends = new_lens.long().cumsum(0)
    row = torch.arange(positions.shape[0], device=positions.device)
    valid = row < ends[-1]
    request = torch.searchsorted(ends, row, right=True).clamp(max=requests - 1)
    position = prefix_lens.long()[request] + row - (ends - new_lens)[request]
    page = page_table[request, (position // PAGE).clamp(0, pages - 1)].long()
    positions.copy_(torch.where(valid, position, 0))
    slots.copy_(torch.where(valid, page * PAGE + position % PAGE, 0))
    kv_lens.copy_(torch.where(valid, position + 1, 0))
    select_lens.copy_(torch.where(valid, (position + 1).clamp(max=index_topk), 1))
    request_of_row.copy_(torch.where(valid, request, 0))
    num_rows.copy_(ends[-1:])


def _check(
    prefix_lens: torch.Tensor,
    new_lens: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    select_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    static_page_table: torch.Tensor,
    num_rows: torch.Tensor,
    index_topk: int,
) -> None:
    op, device, i32, i64 = "fill_batch_metadata", positions.device, torch.int32, torch.int64
    check_tensor(op, "prefix_lens", prefix_lens, i32, (None,), device, contiguous=True)
    check_tensor(op, "new_lens", new_lens, i32, (prefix_lens.shape[0],), device, contiguous=True)
    check_tensor(op, "page_table", page_table, i32, (prefix_lens.shape[0], None), device, contiguous=True)
    check_tensor(op, "positions", positions, i64, (None,), contiguous=True)
    rows = (positions.shape[0],)
    check_tensor(op, "slots", slots, i64, rows, device, contiguous=True)
    check_tensor(op, "kv_lens", kv_lens, i32, rows, device, contiguous=True)
    check_tensor(op, "select_lens", select_lens, i32, rows, device, contiguous=True)
    check_tensor(op, "request_of_row", request_of_row, i32, rows, device, contiguous=True)
    check_tensor(op, "static_page_table", static_page_table, i32, (None, None), device, contiguous=True)
    check_tensor(op, "num_rows", num_rows, i32, (1,), device)
    fits = all(g <= s for g, s in zip(page_table.shape, static_page_table.shape, strict=True))
    require(fits, op, "page_table", f"at most {list(static_page_table.shape)}", list(page_table.shape))
    require(index_topk >= 1, op, "index_topk", "at least 1", index_topk)
    if debug_checks_on() and prefix_lens.numel():
        total = int(new_lens.long().sum())
        require(total <= rows[0], op, "new_lens", f"of sum at most {rows[0]}", total)
        check_range(op, "new_lens", new_lens, 0, rows[0] + 1)
        check_range(op, "prefix_lens", prefix_lens, 0, 2**31)
        check_range(op, "prefix_lens + new_lens", prefix_lens + new_lens, 0, page_table.shape[1] * PAGE + 1)


def _fake(
    prefix_lens: torch.Tensor,
    new_lens: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    select_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    static_page_table: torch.Tensor,
    num_rows: torch.Tensor,
    index_topk: int,
) -> None:
    return None


FILL_BATCH_METADATA = define(
    "fill_batch_metadata(Tensor prefix_lens, Tensor new_lens, Tensor page_table, Tensor(a!) positions,"
    " Tensor(b!) slots, Tensor(c!) kv_lens, Tensor(d!) select_lens, Tensor(e!) request_of_row,"
    " Tensor(f!) static_page_table, Tensor(g!) num_rows, int index_topk) -> ()",
    reference=fill_batch_metadata_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)


KERNELS = [
    (
        _fill_kernel,
        {
            "prefix_lens": "*i32",
            "new_lens": "*i32",
            "page_table": "*i32",
            "positions": "*i64",
            "slots": "*i64",
            "kv_lens": "*i32",
            "select_lens": "*i32",
            "request_of_row": "*i32",
            "static_page_table": "*i32",
            "num_rows": "*i32",
            "requests": "i32",
            "pages": "i32",
            "row_blocks": "i32",
            "rows": "i32",
            "static_pages": "i32",
            "index_topk": "i32",
        },
        {"PAGE_SIZE": PAGE, "ROWS": _ROWS, "REQUESTS": _REQUESTS, "COPY": _COPY},
    )
]


def fill_batch_metadata(
    prefix_lens: torch.Tensor,
    new_lens: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    select_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    static_page_table: torch.Tensor,
    num_rows: torch.Tensor,
    index_topk: int,
) -> None:
    """Fill the static buffers of a batch in one launch, without a host sync.

    prefix_lens, new_lens: int32 [B], tokens already in the cache and tokens of this batch, per request; B may
        be 0. The sum of new_lens is at most N; the rows of the batch are the requests' new tokens, in order.
    page_table: int32 [B, P]; page p of request b holds its tokens 64p .. 64p + 63.
    Written: positions, slots (int64 [N]), kv_lens, select_lens = min(kv_len, index_topk), request_of_row
    (int32 [N]), static_page_table[:B, :P] (int32, at least B x P; the rest is left), num_rows (int32 [1]).
    Pad rows, from the sum of
    new_lens on: slot 0, kv_len 0, select_len 1, request 0, position 0.
    Raises ValueError naming the argument for a wrong dtype, shape or device; with ``debug_checks()`` also for
    lengths that do not fit N or the page table.
    """
    return torch.ops.sparse_pcg.fill_batch_metadata(
        prefix_lens,
        new_lens,
        page_table,
        positions,
        slots,
        kv_lens,
        select_lens,
        request_of_row,
        static_page_table,
        num_rows,
        index_topk,
    )
