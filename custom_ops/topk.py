"""Top-k selection of the indexer: the exact set of the k best tokens of each row, in ascending position.

Row t of ``logits`` [T, S] is valid in columns [starts[t], starts[t] + lengths[t]). NaN ranks below everything
(below -inf too), +0 equals -0, and the lowest position wins ties. Whatever lies outside the range never
matters. A row with length <= k selects all it sees: 0 .. length-1, then -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops import vendor
from custom_ops._checks import check_range, check_table, check_tensor, check_used_pages
from custom_ops._register import Provider, debug_checks_on, define, require
from custom_ops.batch_metadata import PAGE

_INT_MIN = -(2**31)
_MAX_PAGES = 2**31 // PAGE  # a slot is an int32


def order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Signed int32 keys in the selection order of float32 ``logits``: equal where the logits rank equal."""
    bits = torch.where(logits == 0, 0.0, logits).contiguous().view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(torch.isnan(logits), _INT_MIN + 1, keys)


# --- kernels ------------------------------------------------------------------------------------------------

_BLOCK = 4096  # at most 2^15 - 1 columns: two counts of a block share an int32


@triton.jit
def _order_key(x: tl.tensor) -> tl.tensor:
    """uint32 keys that order as the selection does: ``order_keys`` with the sign bit flipped."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x != x, -0x7FFFFFFF, key)
    return key.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _slot(
    table: tl.tensor,
    position: tl.tensor,
    mask: tl.tensor,
    PAGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> tl.tensor:
    """A position of the row's request, or with a page table the slot it lies in."""
    if PAGED:
        page = tl.load(table + position // PAGE_SIZE, mask=mask, other=0)
        return page * PAGE_SIZE + position % PAGE_SIZE
    else:
        return position


@triton.jit(do_not_specialize=["valid_rows"])
def _topk_kernel(
    logits: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    request_of_row: tl.tensor,
    page_table: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    valid_rows: tl.tensor,
    k: tl.tensor,
    HAS_STARTS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row: radix select, 8 bits a pass, from the top; then an ordered compaction.

    After each pass the k-th key is known to begin with ``prefix``, and ``need`` of the keys that do are
    selected. It ends early where these are all of them. The last pass writes the greater keys and the first
    ``need`` of the equal ones, each to its rank among the selected.
    """
    row = tl.program_id(0).to(tl.int64)
    length = 0
    table = page_table
    if row < valid_rows:
        length = tl.load(lengths + row)
        if PAGED:
            table += tl.load(request_of_row + row).to(tl.int64) * table_stride
    source = logits + row * row_stride
    if HAS_STARTS:
        source += tl.load(starts + row)
    target = out + row * k
    lane = tl.arange(0, BLOCK)

    for at in range(tl.minimum(length, k), k, BLOCK):
        tl.store(target + at + lane, -1, mask=at + lane < k)
    if length <= k:
        for at in range(0, length, BLOCK):
            inside = at + lane < length
            tl.store(target + at + lane, _slot(table, at + lane, inside, PAGED, PAGE_SIZE), mask=inside)
    else:
        digits = tl.arange(0, 256)
        prefix = tl.full((), 0, tl.uint32)
        shift = tl.full((), 32, tl.int32)
        need = k + tl.full((), 0, tl.int32)
        settled = need == 0
        for low in tl.static_range(24, -8, -8):
            if not settled:
                counts = tl.zeros((256,), tl.int32)
                for at in range(0, length, BLOCK):
                    inside = at + lane < length
                    key = _order_key(tl.load(source + at + lane, mask=inside, other=0.0))
                    if low < 24:
                        inside = inside & ((key >> (low + 8)) == prefix)
                    counts += tl.histogram(((key >> low) & 255).to(tl.int32), 256, mask=inside)
                at_least = tl.sum(counts) - tl.cumsum(counts) + counts
                digit = tl.sum((at_least >= need).to(tl.int32)) - 1
                need -= tl.sum(tl.where(digits > digit, counts, 0))
                prefix = (prefix << 8) | digit.to(tl.uint32)
                shift = tl.full((), low, tl.int32)
                settled = tl.sum(tl.where(digits == digit, counts, 0)) == need
        greater_seen = tl.full((), 0, tl.int32)
        equal_seen = tl.full((), 0, tl.int32)
        for at in range(0, length, BLOCK):
            inside = at + lane < length
            key = _order_key(tl.load(source + at + lane, mask=inside, other=0.0)) >> shift.to(tl.uint32)
            greater = (inside & (key > prefix)).to(tl.int32)
            equal = (inside & (key == prefix)).to(tl.int32)
            both = greater + (equal << 16)
            before = tl.cumsum(both) - both
            equal_rank = equal_seen + (before >> 16)
            rank = greater_seen + (before & 0xFFFF) + tl.minimum(equal_rank, need)
            selected = (greater != 0) | ((equal != 0) & (equal_rank < need))
            tl.store(target + rank, _slot(table, at + lane, selected, PAGED, PAGE_SIZE), mask=selected)
            greater_seen += tl.sum(greater)
            equal_seen += tl.sum(equal)


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
    rows, k = out.shape
    if rows == 0:
        return
    _topk_kernel[(rows,)](
        logits,
        starts if starts is not None else lengths,
        lengths,
        request_of_row if request_of_row is not None else lengths,
        page_table if page_table is not None else lengths,
        out,
        logits.stride(0),
        page_table.stride(0) if page_table is not None else 0,
        valid_rows,
        k,
        HAS_STARTS=starts is not None,
        PAGED=page_table is not None,
        PAGE_SIZE=PAGE,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _triton_indices(
    logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int
) -> torch.Tensor:
    out = _fake_indices(logits, starts, lengths, k)
    launch_topk(out, logits, starts, lengths, None, None, out.shape[0])
    return out


def _triton_slots(
    logits: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    k: int,
) -> torch.Tensor:
    out = _fake_slots(logits, starts, lengths, request_of_row, page_table, k)
    launch_topk(out, logits, starts, lengths, request_of_row, page_table, out.shape[0])
    return out


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
        "triton": Provider(_triton_indices),
        "flashinfer": Provider(vendor.flashinfer_topk, missing=vendor.flashinfer_missing),
    },
    preference=("triton",),
)
TOPK_SLOTS = define(
    "topk_slots(Tensor logits, Tensor starts, Tensor lengths, Tensor request_of_row, Tensor page_table,"
    " int k) -> Tensor",
    reference=topk_slots_reference,
    fake=_fake_slots,
    check=_check_slots,
    providers={
        "triton": Provider(_triton_slots),
        "flashinfer": Provider(_flashinfer_slots, missing=vendor.flashinfer_missing),
    },
    preference=("triton",),
)


KERNELS = [
    (
        _topk_kernel,
        {
            "logits": "*fp32",
            "starts": "*i32",
            "lengths": "*i32",
            "request_of_row": "*i32",
            "page_table": "*i32",
            "out": "*i32",
            "row_stride": "i64",
            "table_stride": "i32",
            "valid_rows": "i32",
            "k": "i32",
        },
        {"HAS_STARTS": not paged, "PAGED": paged, "PAGE_SIZE": PAGE, "BLOCK": _BLOCK, "num_warps": 8},
    )
    for paged in (False, True)
]


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
