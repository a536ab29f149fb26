"""Every per-row buffer of a batch, pad tail included, from (prefix lengths, new lengths, page table)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from custom_ops._checks import check_range, check_tensor
from custom_ops._register import Provider, debug_checks_on, define, forced_provider, require
from custom_ops.batch_metadata import PAGE, BatchMetadata

_ROWS = 128
_REQUESTS = 64
_COPY = 1024

# Compiled kernels by all that they depend on: looking one up takes a tenth of the time of Triton's own lookup.
_compiled: dict[tuple[Any, ...], Any] = {}

_VARYING = ["requests", "pages", "row_blocks", "new_at", "table_at", "table_stride", "ids_at", "tails_at"]


# What varies from batch to batch must not make another kernel: compiling one would stall a request.
@triton.jit(
    do_not_specialize=_VARYING,
    do_not_specialize_on_alignment=["prefix_lens", "new_lens", "page_table", "new_ids", "tail_ids"],
)
def _fill_kernel(
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
    new_at: tl.tensor,
    table_at: tl.tensor,
    table_stride: tl.tensor,
    ids_at: tl.tensor,
    tails_at: tl.tensor,
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
    """The first programs fill ROWS rows each, the others copy COPY entries of the page table each.

    A row finds its request by counting the requests that end at or before it, so no scan crosses programs.
    IDS: 0 leaves input_ids alone, 1 copies new_ids, 2 takes the next row's id and at a request's last row its tail.
    """
    table = page_table + table_at
    if tl.program_id(0) < row_blocks:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        owner = tl.zeros((ROWS,), tl.int32)
        first = tl.zeros((ROWS,), tl.int32)
        total = 0
        for at in range(0, requests, REQUESTS):
            request = at + tl.arange(0, REQUESTS)
            length = tl.load(new_lens + new_at + request, mask=request < requests, other=0)
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
        page = tl.load(table + owner * table_stride + position // PAGE_SIZE, mask=valid, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        stored = row < rows
        tl.store(positions + row, tl.where(valid, position, 0).to(tl.int64), mask=stored)
        tl.store(slots + row, tl.where(valid, slot, 0), mask=stored)
        tl.store(kv_lens + row, tl.where(valid, position + 1, 0), mask=stored)
        tl.store(select_lens + row, tl.where(valid, tl.minimum(position + 1, index_topk), 1), mask=stored)
        tl.store(request_of_row + row, tl.where(valid, owner, 0), mask=stored)
        if IDS == 1:
            ids = tl.load(new_ids + ids_at + row, mask=valid, other=0).to(tl.int64)
            tl.store(input_ids + row, ids, mask=stored)
        if IDS == 2:
            own = tl.load(new_lens + new_at + owner, mask=valid, other=0)
            last = row - first == own - 1
            following = tl.load(new_ids + ids_at + row + 1, mask=valid & ~last, other=0).to(tl.int64)
            tail = tl.load(tail_ids + tails_at + owner, mask=valid & last, other=0).to(tl.int64)
            tl.store(input_ids + row, following + tail, mask=stored)
        if tl.program_id(0) == 0:
            tl.store(num_rows, total)
    else:
        entry = (tl.program_id(0) - row_blocks) * COPY + tl.arange(0, COPY)
        inside = entry < requests * pages
        source = table + (entry // pages) * table_stride + entry % pages
        target = static_page_table + (entry // pages) * static_pages + entry % pages
        tl.store(target, tl.load(source, mask=inside), mask=inside)


def _launch(
    lens: tuple[torch.Tensor, torch.Tensor, int],
    table: tuple[torch.Tensor, int, int],
    shape: tuple[int, int],
    ids: tuple[torch.Tensor, int] | None,
    tails: tuple[torch.Tensor, int] | None,
    buffers: tuple[torch.Tensor, ...],
    input_ids: torch.Tensor | None,
    last_rows: torch.Tensor | None,
    index_topk: int,
) -> None:
    """lens: prefix and new lengths, and where the new ones begin. table: tensor, start, row stride. ids: likewise."""
    requests, pages = shape
    positions, static_page_table = buffers[0], buffers[5]
    rows = positions.shape[0]
    row_blocks = max(1, -(-rows // _ROWS))  # one at least: it writes num_rows
    mode = 0 if ids is None or input_ids is None else (1 if tails is None else 2)
    unused = buffers[6]
    id_source, ids_at = (unused, 0) if ids is None else ids
    tail_source, tails_at = (unused, 0) if tails is None else tails
    pointers = (
        lens[0],
        lens[1],
        table[0],
        id_source,
        tail_source,
        *buffers,
        unused if input_ids is None else input_ids,
        unused if last_rows is None else last_rows,
    )
    varying = (requests, pages, row_blocks, lens[2], table[1], table[2], ids_at, tails_at)
    # What a compiled kernel depends on: constants, the sizes of the static buffers, types, alignment, the device.
    fixed = (rows, static_page_table.shape[1], index_topk)
    constants = (mode, last_rows is not None, PAGE, _ROWS, _REQUESTS, _COPY)
    kinds = tuple([p.dtype for p in pointers[:5]] + [p.data_ptr() % 16 for p in pointers[5:]])
    key = (positions.device, fixed, constants[:2], kinds)
    grid = (row_blocks + -(-requests * pages // _COPY), 1, 1)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*pointers, *varying, *fixed, *constants)
        return
    names = ("IDS", "LAST", "PAGE_SIZE", "ROWS", "REQUESTS", "COPY")
    kernel = _fill_kernel[grid](*pointers, *varying, *fixed, **dict(zip(names, constants, strict=True)))
    if kernel is not None:  # the interpreter compiles nothing
        _compiled[key] = kernel


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
    new_ids: torch.Tensor | None = None,
    tail_ids: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    last_rows: torch.Tensor | None = None,
) -> None:
    _launch(
        (prefix_lens, new_lens, 0),
        (page_table, 0, page_table.stride(0)),
        (page_table.shape[0], page_table.shape[1]),
        None if new_ids is None else (new_ids, 0),
        None if tail_ids is None else (tail_ids, 0),
        (positions, slots, kv_lens, select_lens, request_of_row, static_page_table, num_rows),
        input_ids,
        last_rows,
        index_topk,
    )


def fill_staged(
    metadata: BatchMetadata,
    staged: torch.Tensor,
    requests: int,
    table: tuple[torch.Tensor, int, int],
    pages: int,
    ids: tuple[torch.Tensor, int],
    tails: tuple[torch.Tensor, int] | None,
) -> None:
    """``fill_batch_metadata`` into all of ``metadata``, unchecked, in one launch from parts of larger tensors.

    staged: int32, the prefix lengths, then the new lengths. table: (int32 tensor, start, stride of a request). ids,
    tails: (int32 or int64 tensor, start). Without Triton (on a CPU) the specification runs on views of these.
    """
    m = metadata
    buffers = (m.positions, m.slots, m.kv_lens, m.select_lens, m.request_of_row, m.page_table, m.num_rows_device)
    if (forced_provider("fill_batch_metadata") or ("triton" if staged.is_cuda else "reference")) == "triton":
        _launch(
            (staged, staged, requests), table, (requests, pages), ids, tails, buffers, m.input_ids, m.last_rows,
            m.index_topk,
        )  # fmt: skip
        return
    fill_batch_metadata_reference(
        staged[:requests],
        staged[requests : 2 * requests],
        table[0].as_strided((requests, pages), (table[2], 1), table[0].storage_offset() + table[1]),
        *buffers,
        m.index_topk,
        ids[0][ids[1] :],
        None if tails is None else tails[0][tails[1] :],
        m.input_ids,
        m.last_rows,
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
    new_ids: torch.Tensor | None = None,
    tail_ids: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    last_rows: torch.Tensor | None = None,
) -> None:
    """The specification, any device, no host sync."""
    requests, pages = page_table.shape
    static_page_table[:requests, :pages] = page_table
    if requests == 0 or pages == 0:
        for buffer, pad in ((positions, 0), (slots, 0), (kv_lens, 0), (select_lens, 1), (request_of_row, 0)):
            buffer.fill_(pad)
        num_rows.zero_()
        for ids in (input_ids, None if last_rows is None else last_rows[:requests]):
            if ids is not None:
                ids.zero_()
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
    if last_rows is not None:
        last_rows[:requests] = (ends - 1).clamp(min=0)
    if input_ids is not None and new_ids is not None and new_ids.shape[0]:
        taken = new_ids[(row if tail_ids is None else row + 1).clamp(max=new_ids.shape[0] - 1)].long()
        if tail_ids is not None:
            taken = torch.where(row == (ends - 1)[request], tail_ids[request].long(), taken)
        input_ids.copy_(torch.where(valid, taken, 0))


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
    new_ids: torch.Tensor | None = None,
    tail_ids: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    last_rows: torch.Tensor | None = None,
) -> None:
    op, device, i32, i64 = "fill_batch_metadata", positions.device, torch.int32, torch.int64
    requests = prefix_lens.shape[0] if isinstance(prefix_lens, torch.Tensor) and prefix_lens.dim() else 0
    check_tensor(op, "prefix_lens", prefix_lens, i32, (None,), device, contiguous=True)
    check_tensor(op, "new_lens", new_lens, i32, (requests,), device, contiguous=True)
    check_tensor(op, "page_table", page_table, i32, (requests, None), device, contiguous=True)
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
    require((new_ids is None) == (input_ids is None), op, "input_ids", "given with new_ids", "one of the two")
    require(tail_ids is None or new_ids is not None, op, "tail_ids", "given with new_ids", "alone")
    if new_ids is not None:
        check_tensor(op, "new_ids", new_ids, (i64, i32), (None,), device, contiguous=True)
        check_tensor(op, "input_ids", input_ids, i64, rows, device, contiguous=True)
    if tail_ids is not None:
        check_tensor(op, "tail_ids", tail_ids, (i64, i32), (requests,), device, contiguous=True)
    if last_rows is not None:
        check_tensor(op, "last_rows", last_rows, i64, (None,), device, contiguous=True)
        require(last_rows.shape[0] >= requests, op, "last_rows", f"of {requests} or more", last_rows.shape[0])
    if debug_checks_on() and prefix_lens.numel():
        total = int(new_lens.long().sum())
        require(total <= rows[0], op, "new_lens", f"of sum at most {rows[0]}", total)
        require(new_ids is None or total <= new_ids.shape[0], op, "new_ids", f"of {total} or more", new_ids)
        check_range(op, "new_lens", new_lens, 0, rows[0] + 1)
        check_range(op, "prefix_lens", prefix_lens, 0, 2**31)
        check_range(op, "prefix_lens + new_lens", prefix_lens + new_lens, 0, page_table.shape[1] * PAGE + 1)


def _fake(prefix_lens: torch.Tensor, *args: object, **kwargs: object) -> None:
    return None


FILL_BATCH_METADATA = define(
    "fill_batch_metadata(Tensor prefix_lens, Tensor new_lens, Tensor page_table, Tensor(a!) positions,"
    " Tensor(b!) slots, Tensor(c!) kv_lens, Tensor(d!) select_lens, Tensor(e!) request_of_row,"
    " Tensor(f!) static_page_table, Tensor(g!) num_rows, int index_topk, Tensor? new_ids=None,"
    " Tensor? tail_ids=None, Tensor(h!)? input_ids=None, Tensor(i!)? last_rows=None) -> ()",
    reference=fill_batch_metadata_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)


_SIGNATURE = {
    "prefix_lens": "*i32",
    "new_lens": "*i32",
    "page_table": "*i32",
    "new_ids": "*i64",
    "tail_ids": "*i64",
    "positions": "*i64",
    "slots": "*i64",
    "kv_lens": "*i32",
    "select_lens": "*i32",
    "request_of_row": "*i32",
    "static_page_table": "*i32",
    "num_rows": "*i32",
    "input_ids": "*i64",
    "last_rows": "*i64",
    **dict.fromkeys((*_VARYING, "rows", "static_pages", "index_topk"), "i32"),
}
KERNELS = [
    (
        _fill_kernel,
        _SIGNATURE,
        {"IDS": ids, "LAST": True, "PAGE_SIZE": PAGE, "ROWS": _ROWS, "REQUESTS": _REQUESTS, "COPY": _COPY},
    )
    for ids in (1, 2)
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
    new_ids: torch.Tensor | None = None,
    tail_ids: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    last_rows: torch.Tensor | None = None,
) -> None:
    """Fill the static buffers of a batch in one launch, without a host sync.

    prefix_lens, new_lens: int32 [B], tokens already in the cache and tokens of this batch, per request; B may
        be 0. The sum of new_lens is at most N; the rows of the batch are the requests' new tokens, in order.
    page_table: int32 [B, P]; page p of request b holds its tokens 64p .. 64p + 63.
    Written: positions, slots (int64 [N]), kv_lens, select_lens = min(kv_len, index_topk), request_of_row
    (int32 [N]), static_page_table[:B, :P] (int32, at least B x P; the rest is left), num_rows (int32 [1]);
    last_rows[:B] (int64) if given, the row of each request's last token (0 for one without new tokens before it);
    input_ids (int64 [N]) if given, from new_ids (int64 or int32, at least the sum of new_lens).
    tail_ids: [B], int64 or int32: row t then takes the id after its own, a request's last row the tail's.
    Pad rows, from the sum of new_lens on: slot 0, kv_len 0, select_len 1, request 0, position 0, id 0.
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
        new_ids,
        tail_ids,
        input_ids,
        last_rows,
    )
