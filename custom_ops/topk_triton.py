"""The Triton kernel of the top-k selection: any k, any GPU that Triton serves, and the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.batch_metadata import PAGE

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


def launch_triton(
    out: torch.Tensor,
    logits: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor | None,
    page_table: torch.Tensor | None,
    valid_rows: int,
) -> None:
    """``custom_ops.topk.launch_topk`` by the Triton kernel."""
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
