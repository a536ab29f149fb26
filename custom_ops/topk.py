"""Top-k selection of the indexer: the exact set of the k best tokens of each row, in ascending position.

Row t of ``logits`` [T, S] is valid in columns [starts[t], starts[t] + lengths[t]). NaN ranks below everything
(below -inf too), +0 equals -0, and the lowest position wins ties. Whatever lies outside the range never
matters. A row with length <= k selects all it sees: 0 .. length-1, then -1.
"""

from __future__ import annotations

import torch

from custom_ops._checks import check_range, check_tensor
from custom_ops._register import debug_checks_on, define, require
from custom_ops.batch_metadata import PAGE

_INT_MIN = -(2**31)


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Signed int32 keys in the selection order of float32 ``logits``: equal where the logits rank equal."""
    bits = torch.where(logits == 0, 0.0, logits).contiguous().view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(torch.isnan(logits), _INT_MIN + 1, keys)


# --- references ---------------------------------------------------------------------------------------------


def topk_indices_reference(
    logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int
) -> torch.Tensor:
    """The specification, any device. Two int64 copies of ``logits``."""
    width = logits.shape[1]
    column = torch.arange(width, device=logits.device)
    first = starts.long().unsqueeze(1)
    inside = (column >= first) & (column < first + lengths.long().unsqueeze(1))
    # One integer orders value and position: no two columns are equal, so the set is unique.
    ranked = (order_keys(logits).long() << 32) + (width - 1 - column)
    ranked = torch.where(inside, ranked, torch.iinfo(torch.int64).min)
    best = ranked.topk(min(k, width), dim=1).indices
    chosen = torch.where(inside.gather(1, best), best - first, width)
    chosen = chosen.sort(dim=1).values
    result = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    result[:, : chosen.shape[1]] = torch.where(chosen == width, -1, chosen).int()
    return result


def topk_slots_reference(
    logits: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """The specification, any device."""
    return slots_of_positions(topk_indices_reference(logits, starts, lengths, k), request_of_row, page_table)


def slots_of_positions(
    positions: torch.Tensor, request_of_row: torch.Tensor, page_table: torch.Tensor
) -> torch.Tensor:
    """int32 positions [T, k] in each row's request, -1 for none -> physical slots, -1 for none."""
    if page_table.shape[1] == 0:
        return torch.full_like(positions, -1)
    at = positions.clamp(min=0).long()
    page = (at // PAGE).clamp(max=page_table.shape[1] - 1)
    slots = page_table[request_of_row.long().unsqueeze(1), page] * PAGE + at % PAGE
    return torch.where(positions < 0, -1, slots).int()


# --- checks, fakes ------------------------------------------------------------------------------------------


def _check_rows(op: str, logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int) -> None:
    check_tensor(op, "logits", logits, torch.float32, (None, None))
    require(
        logits.stride(1) == 1 or logits.shape[1] <= 1,
        op,
        "logits",
        "contiguous along columns",
        logits.stride(),
    )
    rows = logits.shape[0]
    check_tensor(op, "starts", starts, torch.int32, (rows,), logits.device, contiguous=True)
    check_tensor(op, "lengths", lengths, torch.int32, (rows,), logits.device, contiguous=True)
    require(k >= 1, op, "k", "at least 1", k)
    if debug_checks_on() and rows:
        check_range(op, "starts", starts, 0, logits.shape[1] + 1)
        check_range(op, "lengths", lengths, 0, logits.shape[1] + 1)
        check_range(op, "starts + lengths", starts + lengths, 0, logits.shape[1] + 1)


def _check_indices(logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int) -> None:
    _check_rows("topk_indices", logits, starts, lengths, k)


def _check_slots(
    logits: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
) -> None:
    op = "topk_slots"
    _check_rows(op, logits, starts, lengths, k)
    check_tensor(
        op, "request_of_row", request_of_row, torch.int32, (logits.shape[0],), logits.device, contiguous=True
    )
    check_tensor(op, "page_table", page_table, torch.int32, (None, None), logits.device)
    require(
        page_table.stride(1) == 1 or page_table.shape[1] <= 1,
        op,
        "page_table",
        "contiguous along pages",
        page_table.stride(),
    )
    check_range(op, "request_of_row", request_of_row, 0, page_table.shape[0])
    check_range(op, "lengths", lengths, 0, page_table.shape[1] * PAGE + 1)


def _fake_indices(logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


def _fake_slots(
    logits: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
) -> torch.Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


TOPK_INDICES = define(
    "topk_indices(Tensor logits, Tensor starts, Tensor lengths, int k) -> Tensor",
    reference=topk_indices_reference,
    fake=_fake_indices,
    check=_check_indices,
)
TOPK_SLOTS = define(
    "topk_slots(Tensor logits, Tensor starts, Tensor lengths, Tensor request_of_row, Tensor page_table,"
    " int k) -> Tensor",
    reference=topk_slots_reference,
    fake=_fake_slots,
    check=_check_slots,
)


def topk_indices(logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the k largest logits of each row.

    logits: float32 [T, S], columns contiguous, any row stride. starts, lengths: int32 [T]; row t is valid in
        columns [starts[t], starts[t] + lengths[t]), the rest may hold anything.
    k: at least 1.
    Returns int32 [T, k], contiguous: positions relative to ``starts``, ascending, then -1. NaN ranks below
    -inf, +0 equals -0, the lowest position wins ties.
    Raises ValueError naming the argument for a wrong dtype, shape, stride or device; with ``debug_checks()``
    also for a range that leaves the row.
    """
    return torch.ops.sparse_pcg.topk_indices(logits, starts, lengths, k)


def topk_slots(
    logits: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """``topk_indices`` mapped to the slots of the paged KV pools.

    request_of_row: int32 [T]. page_table: int32 [requests, pages]; the token at position p of request b lies
        in slot page_table[b, p // 64] * 64 + p % 64.
    Returns int32 [T, k], contiguous: slots in ascending order of position, then -1.
    Raises ValueError as ``topk_indices`` does; with ``debug_checks()`` also for a request outside the page
    table.
    """
    return torch.ops.sparse_pcg.topk_slots(logits, starts, lengths, request_of_row, page_table, k)
