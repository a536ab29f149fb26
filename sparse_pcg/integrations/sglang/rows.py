"""What captured attention and captured selections read per row, at fixed addresses, refreshed for each batch.

One kernel fills the rows from the batch's own device tensors; a second writes the selection of a batch in which no row
sees more than ``index_topk`` tokens. Pad rows attend slot 0, which belongs to no request.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS = 128
_REQUESTS = 64
_COLUMNS = 1024


@triton.jit(do_not_specialize=["requests", "rows"])
def _fill_kernel(
    new_lens: tl.tensor,
    seq_lens: tl.tensor,
    pool_indices: tl.tensor,
    row_pool_index: tl.tensor,
    select_lens: tl.tensor,
    valid_rows: tl.tensor,
    requests: tl.tensor,
    rows: tl.tensor,
    index_topk: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    """ROWS rows a program; a row finds its request by counting the requests that end at or before it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owner = tl.zeros((ROWS,), tl.int32)
    first = tl.zeros((ROWS,), tl.int32)
    total = 0
    for at in range(0, requests, REQUESTS):
        request = at + tl.arange(0, REQUESTS)
        length = tl.load(new_lens + request, mask=request < requests, other=0).to(tl.int32)
        end = total + tl.cumsum(length)
        passed = (end[None, :] <= row[:, None]) & (request < requests)[None, :]
        owner += tl.sum(passed.to(tl.int32), axis=1)
        first += tl.sum(tl.where(passed, length[None, :], 0), axis=1)
        total += tl.sum(length)
    valid = row < total
    new = tl.load(new_lens + owner, mask=valid, other=0).to(tl.int32)
    seen = tl.load(seq_lens + owner, mask=valid, other=0).to(tl.int32) - new + row - first + 1
    pool = tl.load(pool_indices + owner, mask=valid, other=0).to(tl.int64)
    stored = row < rows
    tl.store(row_pool_index + row, tl.where(valid, pool, 0), mask=stored)
    tl.store(select_lens + row, tl.where(valid, tl.minimum(seen, index_topk), 1), mask=stored)
    tl.store(valid_rows + row, valid.to(tl.int32), mask=stored)


@triton.jit
def _select_kernel(
    req_to_token: tl.tensor,
    row_pool_index: tl.tensor,
    select_lens: tl.tensor,
    valid_rows: tl.tensor,
    selection: tl.tensor,
    table_stride: tl.tensor,
    selection_stride: tl.tensor,
    columns: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """COLUMNS entries of a row: the slots of its first tokens in ascending order, then -1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(select_lens + row)
    table = req_to_token + tl.load(row_pool_index + row) * table_stride
    inside = column < length
    slot = tl.load(table + column, mask=inside, other=0).to(tl.int32) * tl.load(valid_rows + row)
    tl.store(selection + row * selection_stride + column, tl.where(inside, slot, -1), mask=column < columns)


class Rows:
    """Static per-row buffers of length N, the largest bucket.

    row_pool_index: int64 [N], row of ``req_to_token`` of the row's request; 0 on pad rows.
    select_lens: int32 [N], min(tokens the row sees, index_topk); 1 on pad rows, which attend slot 0.
    valid_rows: int32 [N], 1 on real rows, 0 on pad rows.
    """

    def __init__(self, max_rows: int, index_topk: int, req_to_token: torch.Tensor) -> None:
        device = req_to_token.device
        self.index_topk = index_topk
        self.req_to_token = req_to_token
        self.row_pool_index = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.select_lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self.valid_rows = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def fill(self, batch: Any, bucket: int) -> None:
        """Refresh rows [0, bucket) from ``batch``'s extend_seq_lens, seq_lens and req_pool_indices [requests]."""
        new, seen, pool = batch.extend_seq_lens, batch.seq_lens, batch.req_pool_indices
        if not self.select_lens.is_cuda:
            return self._fill_reference(new, seen, pool, bucket)
        _fill_kernel[(triton.cdiv(bucket, _ROWS),)](
            new,
            seen,
            pool,
            self.row_pool_index,
            self.select_lens,
            self.valid_rows,
            batch.batch_size,
            bucket,
            self.index_topk,
            ROWS=_ROWS,
            REQUESTS=_REQUESTS,
        )

    def _fill_reference(self, new: torch.Tensor, seq: torch.Tensor, pool: torch.Tensor, bucket: int) -> None:
        new, seq = new.long(), seq.long()
        ends = new.cumsum(0)
        row = torch.arange(bucket, device=new.device)
        valid = row < ends[-1]
        owner = torch.searchsorted(ends, row, right=True).clamp(max=len(new) - 1)
        seen = (seq - new)[owner] + row - (ends - new)[owner] + 1
        self.row_pool_index[:bucket] = torch.where(valid, pool.long()[owner], 0)
        self.select_lens[:bucket] = torch.where(valid, seen.clamp(max=self.index_topk), 1).int()
        self.valid_rows[:bucket] = valid.int()

    def select_all(self, selection: torch.Tensor) -> None:
        """Write every visible token of each row: int32 [rows, columns], physical slots, ascending position, then -1."""
        rows, columns = selection.shape
        if not selection.is_cuda:
            column = torch.arange(columns, device=selection.device)
            slots = self.req_to_token[self.row_pool_index[:rows], :columns].to(torch.int32)
            slots = torch.nn.functional.pad(slots, (0, columns - slots.shape[1]))
            slots = torch.where(self.valid_rows[:rows, None] != 0, slots, 0)
            selection.copy_(torch.where(column < self.select_lens[:rows, None], slots, -1))
            return
        _select_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
            self.req_to_token,
            self.row_pool_index,
            self.select_lens,
            self.valid_rows,
            selection,
            self.req_to_token.stride(0),
            selection.stride(0),
            columns,
            COLUMNS=_COLUMNS,
        )
