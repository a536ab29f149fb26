"""The paged index-K cache: store quantised keys, gather them back in request order.

A page is 64 tokens in 8448 bytes: byte 128 t + d is element d (e4m3) of token t, then 64 float32 scales,
token t's at byte 8192 + 4 t. Slot s is token s % 64 of page s // 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._checks import FLOATS, check_range, check_tensor
from custom_ops._launch import Launcher
from custom_ops._register import Provider, debug_checks_on, define, require
from custom_ops._rows import next_power_of_two, unit_stride
from custom_ops.batch_metadata import PAGE
from custom_ops.fp8_quant import e4m3_scale, quant_fp8_reference, to_e4m3

HEAD_DIM = 128
PAGE_BYTES = PAGE * (HEAD_DIM + 4)
_MAX_REQUESTS = 4096


@triton.jit
def store_keys(
    key: tl.tensor,
    q_pages: tl.tensor,
    scale_pages: tl.tensor,
    slots: tl.tensor,
    row: tl.tensor,
    row_mask: tl.tensor,
    ROUND_SCALE: tl.constexpr,
) -> None:
    """Quantise a float32 tile [ROWS, 128] and write it to the pages; row: [ROWS], row_mask: [ROWS].

    q_pages and scale_pages point at the same bytes, as e4m3 and as float32.
    """
    slot = tl.load(slots + row, mask=row_mask, other=0)[:, None]
    page, token = slot // 64, slot % 64
    scale = e4m3_scale(key, 1, ROUND_SCALE)
    dim = tl.arange(0, 128)[None, :]
    tl.store(q_pages + page * 8448 + token * 128 + dim, to_e4m3(key, scale, ROUND_SCALE), mask=row_mask[:, None])
    tl.store(scale_pages + page * 2112 + 2048 + token, scale, mask=row_mask[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _store_kernel(
    key: tl.tensor,
    q_pages: tl.tensor,
    scale_pages: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    ROUND_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = row < num_rows
    source = key + row[:, None] * row_stride + tl.arange(0, 128)[None, :]
    tile = tl.load(source, mask=mask[:, None], other=0.0).to(tl.float32)
    store_keys(tile, q_pages, scale_pages, slots, row, mask, ROUND_SCALE)


@triton.jit(do_not_specialize=["requests", "total"])
def _gather_kernel(
    q_pages: tl.tensor,
    scale_pages: tl.tensor,
    page_table: tl.tensor,
    kv_lens: tl.tensor,
    k: tl.tensor,
    k_scale: tl.tensor,
    table_stride: tl.tensor,
    requests: tl.tensor,
    total: tl.tensor,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.arange(0, REQUESTS)
    ends = tl.cumsum(tl.load(kv_lens + request, mask=request < requests, other=0), 0)
    # A row belongs to the first request that ends beyond it; padding requests end where the last one does.
    ended = ends[None, :] <= row[:, None]
    owner = tl.sum(ended.to(tl.int32), 1)
    start = tl.max(tl.where(ended, ends[None, :], 0), 1)
    inside = row < total
    owned = inside & (owner < requests)
    position = row - start
    entry = page_table + owner.to(tl.int64) * table_stride + position // 64
    page = tl.load(entry, mask=owned, other=0).to(tl.int64)
    token = position % 64
    dim = tl.arange(0, 128)[None, :]
    source = q_pages + (page * 8448 + token * 128)[:, None] + dim
    tile = tl.load(source, mask=owned[:, None], other=0)
    tl.store(k + row.to(tl.int64)[:, None] * 128 + dim, tile, mask=inside[:, None])
    scale = tl.load(scale_pages + page * 2112 + 2048 + token, mask=owned, other=0.0)
    tl.store(k_scale + row, scale, mask=inside)


@triton.jit(do_not_specialize=["pages", "num_rows", "max_kv_len"])
def _gather_pages_kernel(
    cache: tl.tensor,
    scale_pages: tl.tensor,
    page_table: tl.tensor,
    k: tl.tensor,
    k_scale: tl.tensor,
    kv_lens: tl.tensor,
    request_of_row: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    table_stride: tl.tensor,
    num_pages: tl.tensor,
    pages: tl.tensor,
    num_rows: tl.tensor,
    max_kv_len: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A program copies a page of a request and places some of the rows, BLOCK at a time.

    A table holds anything beyond the request's pages: such an entry is read as the nearest page that there is.
    """
    request, place = tl.program_id(0), tl.program_id(1)
    page = tl.load(page_table + request.to(tl.int64) * table_stride + place)
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
    target = (request * pages + place).to(tl.int64)
    byte = tl.arange(0, 8192)
    tl.store(k + target * 8192 + byte, tl.load(cache + page * 8448 + byte))
    token = tl.arange(0, 64)
    tl.store(k_scale + target * 64 + token, tl.load(scale_pages + page * 2112 + 2048 + token))
    step = tl.num_programs(0) * tl.num_programs(1) * BLOCK
    for at in range(target.to(tl.int32) * BLOCK, num_rows, step):
        row = at + tl.arange(0, BLOCK)
        inside = row < num_rows
        start = tl.load(request_of_row + row, mask=inside, other=0) * pages * 64
        tl.store(starts + row, start, mask=inside)
        length = tl.minimum(tl.load(kv_lens + row, mask=inside, other=0), max_kv_len)
        tl.store(ends + row, start + length, mask=inside)


Gathered = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def room_to_gather(cache: torch.Tensor, num_requests: int, max_kv_len: int, rows: int) -> Gathered:
    """What ``gather_for_rows`` writes, undefined: k float8_e4m3fn [num_requests * D, 128], its scales float32, and
    int32 [rows] starts and ends; D is max_kv_len rounded up to whole pages."""
    tokens = num_requests * -(-max_kv_len // PAGE) * PAGE
    k = cache.new_empty((tokens, HEAD_DIM), dtype=torch.float8_e4m3fn)
    k_scale = cache.new_empty((tokens,), dtype=torch.float32)
    return k, k_scale, cache.new_empty((rows,), dtype=torch.int32), cache.new_empty((rows,), dtype=torch.int32)


_gather_pages = Launcher(_gather_pages_kernel, 9, {"BLOCK": 128, "num_warps": 4})


def gather_for_rows(
    cache: torch.Tensor,
    page_table: torch.Tensor,
    num_requests: int,
    max_kv_len: int,
    kv_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    into: Gathered | None = None,
) -> Gathered:
    """K of the requests at equal distances, and where each row's lies, by one launch.

    max_kv_len: at least 1, no row sees more. kv_lens, request_of_row: int32 [rows]; longer where ``into``, the
    ``room_to_gather`` for some rows, is given. Returns ``into``. What lies beyond a request's tokens is undefined (and
    finite or not).
    """
    pages = -(-max_kv_len // PAGE)
    into = into or room_to_gather(cache, num_requests, max_kv_len, kv_lens.shape[0])
    k, k_scale, starts, ends = into
    at, table = cache.data_ptr(), page_table.data_ptr()
    _gather_pages(
        (num_requests, pages),
        (at, at, table, k.data_ptr(), k_scale.data_ptr(), kv_lens.data_ptr(), request_of_row.data_ptr(),
         starts.data_ptr(), ends.data_ptr()),
        (page_table.stride(0), cache.shape[0], pages, starts.shape[0], max_kv_len),
        lambda: (
            cache, cache.view(torch.float32), page_table, k.view(torch.uint8), k_scale, kv_lens, request_of_row,
            starts, ends,
        ),
    )  # fmt: skip
    return into


def check_pages(op: str, cache: torch.Tensor, device: torch.device, name: str = "cache") -> None:
    """cache, called ``name``: uint8 [pages, 8448], contiguous, 16-byte aligned, on ``device``."""
    check_tensor(op, name, cache, torch.uint8, (None, PAGE_BYTES), device, contiguous=True)
    aligned = cache.data_ptr() % 16 == 0
    require(aligned, op, name, "16-byte aligned", f"an address {cache.data_ptr() % 16} bytes off")


def check_slots(op: str, slots: torch.Tensor, rows: int, pool: int, device: torch.device) -> None:
    """slots: int64 [rows], contiguous, on ``device``; within the pool under ``debug_checks``."""
    check_tensor(op, "slots", slots, torch.int64, (rows,), device, contiguous=True)
    check_range(op, "slots", slots, 0, pool)


def page_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes as e4m3 [pages, 8448] and as float32 [pages, 2112]."""
    return cache.view(torch.float8_e4m3fn), cache.view(torch.float32)


def _check_store(
    key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, round_scale: bool = False
) -> None:
    check_tensor("index_k_store", "key", key, FLOATS, (None, HEAD_DIM))
    check_pages("index_k_store", cache, key.device)
    check_slots("index_k_store", slots, key.shape[0], cache.shape[0] * PAGE, key.device)


def index_k_store_reference(
    key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, round_scale: bool = False
) -> None:
    """Plain PyTorch: the specification of ``index_k_store``."""
    q, scale = quant_fp8_reference(key, HEAD_DIM, round_scale)
    page, token = slots // PAGE, slots % PAGE
    keys, scales = cache.split((PAGE * HEAD_DIM, PAGE * 4), dim=1)
    keys.unflatten(1, (PAGE, HEAD_DIM))[page, token] = q.view(torch.uint8)
    scales.unflatten(1, (PAGE, 4))[page, token] = scale.view(torch.uint8)


def _fake_store(
    key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, round_scale: bool = False
) -> None:
    return None


def _triton_store(
    key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, round_scale: bool = False
) -> None:
    rows = key.shape[0]
    if rows:
        key = unit_stride(key)
        _store_kernel[(triton.cdiv(rows, 8),)](
            key, *page_views(cache), slots, key.stride(0), rows,
            ROUND_SCALE=round_scale, ROWS=8, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _check_gather(
    cache: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, total: int
) -> None:
    op = "index_k_gather"
    check_pages(op, cache, cache.device)
    check_tensor(op, "page_table", page_table, torch.int32, (None, None), cache.device)
    requests = page_table.shape[0]
    check_tensor(op, "kv_lens", kv_lens, torch.int32, (requests,), cache.device, contiguous=True)
    require(0 <= total < 2**31, op, "total", "in [0, 2**31)", total)
    if debug_checks_on() and requests:
        check_range(op, "kv_lens", kv_lens, 0, page_table.shape[1] * PAGE + 1)
        require(int(kv_lens.sum()) == total, op, "total", f"the sum of kv_lens, {int(kv_lens.sum())}", total)
        used = torch.arange(page_table.shape[1], device=cache.device)[None, :] * PAGE < kv_lens[:, None]
        check_range(op, "page_table", page_table[used], 0, cache.shape[0])


def index_k_gather_reference(
    cache: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: the specification of ``index_k_gather``."""
    k, k_scale = _fake_gather(cache, page_table, kv_lens, total)
    k.view(torch.uint8).zero_()
    k_scale.zero_()
    if not total or not page_table.numel():
        return k, k_scale
    ends = torch.cumsum(kv_lens, 0)
    row = torch.arange(total, device=cache.device)
    owner = torch.searchsorted(ends, row, right=True)
    owned = owner < kv_lens.shape[0]
    owner = owner.clamp(max=kv_lens.shape[0] - 1)
    position = torch.where(owned, row - (ends - kv_lens)[owner], 0)
    page, token = page_table[owner, position // PAGE].long(), position % PAGE
    keys, scales = cache.split((PAGE * HEAD_DIM, PAGE * 4), dim=1)
    found = keys.unflatten(1, (PAGE, HEAD_DIM))[page, token]
    found_scale = scales.unflatten(1, (PAGE, 4))[page, token].view(torch.float32).squeeze(1)
    k.view(torch.uint8).copy_(torch.where(owned[:, None], found, 0))
    k_scale.copy_(torch.where(owned, found_scale, 0.0))
    return k, k_scale


def _fake_gather(
    cache: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    k = cache.new_empty((total, HEAD_DIM), dtype=torch.float8_e4m3fn)
    return k, cache.new_empty((total,), dtype=torch.float32)


def _triton_gather(
    cache: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    k, k_scale = _fake_gather(cache, page_table, kv_lens, total)
    if total:
        page_table = unit_stride(page_table)
        requests = page_table.shape[0]
        width = next_power_of_two(max(requests, 1))
        block = 32 if width <= 128 else 8
        _gather_kernel[(triton.cdiv(total, block),)](
            cache, cache.view(torch.float32), page_table, kv_lens, k.view(torch.uint8), k_scale,
            page_table.stride(0), requests, total, REQUESTS=width, ROWS=block, num_warps=4,
        )  # fmt: skip
    return k, k_scale


def _gather_supports(
    cache: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, total: int
) -> str | None:
    return None if page_table.shape[0] <= _MAX_REQUESTS else f"more than {_MAX_REQUESTS} requests"


define(
    "index_k_store(Tensor key, Tensor(a!) cache, Tensor slots, bool round_scale=False) -> ()",
    reference=index_k_store_reference,
    fake=_fake_store,
    check=_check_store,
    providers={"triton": Provider(_triton_store)},
    preference=("triton",),
)
define(
    "index_k_gather(Tensor cache, Tensor page_table, Tensor kv_lens, SymInt total) -> (Tensor, Tensor)",
    reference=index_k_gather_reference,
    fake=_fake_gather,
    check=_check_gather,
    providers={"triton": Provider(_triton_gather, supports=_gather_supports)},
    preference=("triton",),
)

KERNELS = [
    *(
        (
            _store_kernel,
            {
                "key": "*bf16", "q_pages": "*fp8e4nv", "scale_pages": "*fp32", "slots": "*i64",
                "row_stride": "i32", "num_rows": "i32",
            },
            {"ROUND_SCALE": round_scale, "ROWS": 8},
        )
        for round_scale in (False, True)
    ),
    (
        _gather_kernel,
        {
            "q_pages": "*u8", "scale_pages": "*fp32", "page_table": "*i32", "kv_lens": "*i32", "k": "*u8",
            "k_scale": "*fp32", "table_stride": "i32", "requests": "i32", "total": "i32",
        },
        {"REQUESTS": 16, "ROWS": 32},
    ),
    (
        _gather_pages_kernel,
        {
            "cache": "*u8", "scale_pages": "*fp32", "page_table": "*i32", "k": "*u8", "k_scale": "*fp32",
            "kv_lens": "*i32", "request_of_row": "*i32", "starts": "*i32", "ends": "*i32", "table_stride": "i32",
            "num_pages": "i32", "pages": "i32", "num_rows": "i32", "max_kv_len": "i32",
        },
        {"BLOCK": 128},
    ),
]  # fmt: skip


def index_k_store(
    key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, round_scale: bool = False
) -> None:
    """Quantise index keys to e4m3, one float32 scale a token, and write them to the paged cache.

    key: [T, 128], bfloat16, float16 or float32, any strides; rotated already (and Hadamard-transformed).
    cache: uint8 [pages, 8448], contiguous: 64 tokens of 128 bytes, then 64 float32 scales. Written in place.
    slots: int64 [T]; slot s is token s % 64 of page s // 64. Of rows with the same slot, any one wins.
    round_scale: round scales up to powers of two.
    Raises ValueError for another dtype, shape, page size or device, before anything is written; slots are
    checked under ``debug_checks``.
    """
    return torch.ops.sparse_pcg.index_k_store(key, cache, slots, round_scale)


def index_k_gather(
    cache: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the cached index keys of whole requests out of their pages, one request after the other.

    cache: uint8 [pages, 8448]. page_table: int32 [B, P], entry p the page of tokens 64 p .. 64 p + 63.
    kv_lens: int32 [B], tokens of each request. total: their sum, known on the host.
    Returns (k, scale): float8_e4m3fn [total, 128] and float32 [total], contiguous; rows beyond the sum of
    kv_lens are 0.
    Raises ValueError for another dtype, shape, page size or device; values are checked under
    ``debug_checks``.
    """
    return torch.ops.sparse_pcg.index_k_gather(cache, page_table, kv_lens, total)
