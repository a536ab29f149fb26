"""Every per-row buffer of a batch, pad tail included, from (prefix lengths, new lengths, page table)."""

from __future__ import annotations

import torch

from custom_ops._checks import check_range, check_tensor
from custom_ops._register import Provider, debug_checks_on, define, require
from custom_ops.batch_metadata import PAGE
from custom_ops.metadata_kernels import CONSTANTS, COPY, ROWS, fill_kernel


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
    requests, pages = page_table.shape
    rows, unused = positions.shape[0], num_rows
    row_blocks = max(1, -(-rows // ROWS))  # one at least: it writes num_rows
    fill_kernel[(row_blocks + -(-requests * pages // COPY),)](
        prefix_lens,
        new_lens,
        page_table,
        unused if new_ids is None else new_ids,
        unused if tail_ids is None else tail_ids,
        positions,
        slots,
        kv_lens,
        select_lens,
        request_of_row,
        static_page_table,
        num_rows,
        unused if input_ids is None else input_ids,
        unused if last_rows is None else last_rows,
        requests,
        pages,
        row_blocks,
        0 if tail_ids is None else 1,
        rows,
        static_page_table.shape[1],
        index_topk,
        IDS=input_ids is not None,
        LAST=last_rows is not None,
        **CONSTANTS,
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
    if input_ids is not None and new_ids is not None:
        if new_ids.shape[0] == 0:
            input_ids.zero_()
            return
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
