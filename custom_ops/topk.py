"""Top-k selection of the indexer: the exact set of the k best tokens of each row, in ascending position.

Row t of ``logits`` [T, S] is valid in columns [starts[t], starts[t] + lengths[t]). NaN ranks below everything
(below -inf too), +0 equals -0, and the lowest position wins ties. Whatever lies outside the range never
matters. A row with length <= k selects all it sees: 0 .. length-1, then -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from custom_ops import topk_cuda, vendor
from custom_ops._checks import check_range, check_table, check_tensor, check_used_pages
from custom_ops._register import Provider, debug_checks_on, define, forced_provider, require
from custom_ops.batch_metadata import PAGE
from custom_ops.topk_triton import launch_triton

_INT_MIN = -(2**31)
_MAX_PAGES = 2**31 // PAGE  # a slot is an int32


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Signed int32 keys in the selection order of float32 ``logits``: equal where the logits rank equal."""
    bits = torch.where(logits == 0, 0.0, logits).contiguous().view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(torch.isnan(logits), _INT_MIN + 1, keys)


# --- kernels ------------------------------------------------------------------------------------------------


def launch_topk(
    out: torch.Tensor,
    logits: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor | None,
    page_table: torch.Tensor | None,
    valid_rows: int,
) -> None:
    """Write the selection of each row into ``out`` int32 [T, k], contiguous; rows from ``valid_rows`` on get
    -1.

    starts None: every row starts at column 0. page_table None: positions, else slots. ``logits``, ``lengths``
    and the rest need only ``valid_rows`` rows.
    """
    if out.shape[0] == 0:
        return
    forced = forced_provider("topk_indices" if page_table is None else "topk_slots")
    cuda = forced != "triton" and topk_cuda.refuses(logits, *out.shape) is None
    run = topk_cuda.launch if cuda else launch_triton
    run(out, logits, starts, lengths, request_of_row, page_table, valid_rows)


def _indices(launch: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def run(logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        out = _fake_indices(logits, starts, lengths, k)
        launch(out, logits, starts, lengths, None, None, out.shape[0])
        return out

    return run


def _slots(launch: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def run(
        logits: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        request_of_row: torch.Tensor,
        page_table: torch.Tensor,
        k: int,
    ) -> torch.Tensor:
        out = _fake_slots(logits, starts, lengths, request_of_row, page_table, k)
        launch(out, logits, starts, lengths, request_of_row, page_table, out.shape[0])
        return out

    return run


def _cuda_supports(logits: torch.Tensor, *rest: Any) -> str | None:
    """``rest`` ends with k."""
    return topk_cuda.refuses(logits, len(logits), rest[-1])


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
    check_table(op, page_table, logits.device)
    check_range(op, "request_of_row", request_of_row, 0, page_table.shape[0])
    check_range(op, "lengths", lengths, 0, page_table.shape[1] * PAGE + 1)
    check_used_pages(op, page_table, request_of_row, lengths, _MAX_PAGES)


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


def _flashinfer_slots(
    logits: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
) -> torch.Tensor:
    positions = vendor.flashinfer_topk(logits, starts, lengths, k)
    return slots_of_positions(positions, request_of_row, page_table)


TOPK_INDICES = define(
    "topk_indices(Tensor logits, Tensor starts, Tensor lengths, int k) -> Tensor",
    reference=topk_indices_reference,
    fake=_fake_indices,
    check=_check_indices,
    providers={
        "cuda": Provider(_indices(topk_cuda.launch), _cuda_supports, topk_cuda.missing),
        "triton": Provider(_indices(launch_triton)),
        "flashinfer": Provider(vendor.flashinfer_topk, missing=vendor.flashinfer_missing),
    },
    preference=("cuda", "triton"),
)
TOPK_SLOTS = define(
    "topk_slots(Tensor logits, Tensor starts, Tensor lengths, Tensor request_of_row, Tensor page_table,"
    " int k) -> Tensor",
    reference=topk_slots_reference,
    fake=_fake_slots,
    check=_check_slots,
    providers={
        "cuda": Provider(_slots(topk_cuda.launch), _cuda_supports, topk_cuda.missing),
        "triton": Provider(_slots(launch_triton)),
        "flashinfer": Provider(_flashinfer_slots, missing=vendor.flashinfer_missing),
    },
    preference=("cuda", "triton"),
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
    table and for pages whose slots no int32 holds.
    """
    return torch.ops.sparse_pcg.topk_slots(logits, starts, lengths, request_of_row, page_table, k)
