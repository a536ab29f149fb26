"""Every per-row buffer of a batch, pad tail included, from (prefix lengths, new lengths, page table)."""

from __future__ import annotations

import torch

from custom_ops._checks import check_range, check_tensor
from custom_ops._register import debug_checks_on, define, require
from custom_ops.batch_metadata import PAGE


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
