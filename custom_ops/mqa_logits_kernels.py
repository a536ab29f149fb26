"""Triton kernels of ``mqa_logits`` and ``paged_mqa_logits``.

A tile is KV tokens of K against ROWS x HEADS query vectors, one FP8 product with float32 sums; ReLU, gate
and the sum over the heads follow in registers. Each logit is computed from its own row and token alone, in an
order that depends on the number of heads only.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from custom_ops._checks import E4M3
from custom_ops._launch import Launcher
from custom_ops.batch_metadata import PAGE
from custom_ops.index_cache import HEAD_DIM, PAGE_BYTES

_SCALE_ROW = PAGE_BYTES // 4  # a page in float32 elements
_SCALES_AT = PAGE * HEAD_DIM // 4  # where its scales begin


@triton.jit
def _load_queries(
    q: tl.tensor,
    weights: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """q of ROWS rows as [ROWS * HEADS_P2, DIM] and their gates; zero beyond the rows and the heads."""
    pair = tl.arange(0, ROWS * HEADS_P2)
    pair_row = row + pair // HEADS_P2
    live = (pair_row < num_rows) & (pair % HEADS_P2 < HEADS)
    at = pair_row.to(tl.int64) * HEADS + pair % HEADS_P2
    tile = tl.load(q + at[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0.0)
    return tile, tl.load(weights + at, mask=live, other=0.0)


@triton.jit
def _logits_tile(
    k: tl.tensor,
    k_scale: tl.tensor,
    q: tl.tensor,
    gates: tl.tensor,
    ROWS: tl.constexpr,
    HEADS_P2: tl.constexpr,
) -> tl.tensor:
    """[KV, ROWS] logits of a K tile [KV, DIM]."""
    scores = tl.maximum(tl.dot(k, tl.trans(q)), 0.0, propagate_nan=tl.PropagateNan.ALL) * gates[None, :]
    return tl.sum(tl.reshape(scores, (k.shape[0], ROWS, HEADS_P2)), axis=2) * k_scale[:, None]


@triton.jit(do_not_specialize=["num_rows", "width", "out_stride"])
def _mqa_logits_kernel(
    q: tl.tensor,
    k: tl.tensor,
    k_scale: tl.tensor,
    weights: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    out_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    ROWS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A program takes ROWS rows and every num_programs(1)-th K tile that any of them sees."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    start = tl.load(starts + row, mask=row < num_rows, other=0x7FFFFFFF)
    end = tl.minimum(tl.load(ends + row, mask=row < num_rows, other=0), width)
    start = tl.where(start < end, start, 0x7FFFFFFF)  # a row without columns asks for no tile
    q_tile, gates = _load_queries(q, weights, first, num_rows, HEADS, HEADS_P2, ROWS, DIM)
    out_row = out + row.to(tl.int64) * out_stride
    last = tl.cdiv(tl.max(end), KV)
    for tile in tl.range(tl.min(start) // KV + tl.program_id(1), last, tl.num_programs(1), num_stages=STAGES):
        column = tile * KV + tl.arange(0, KV)
        inside = column < width
        offset = column.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :]
        k_tile = tl.load(k + offset, mask=inside[:, None], other=0.0)
        scale = tl.load(k_scale + column, mask=inside, other=0.0)
        logits = _logits_tile(k_tile, scale, q_tile, gates, ROWS, HEADS_P2)
        wanted = (column[:, None] >= start[None, :]) & (column[:, None] < end[None, :])
        tl.store(out_row[None, :] + column[:, None], logits, mask=wanted)


@triton.jit(do_not_specialize=["num_rows", "width", "out_stride"])
def _paged_mqa_logits_kernel(
    q: tl.tensor,
    cache: tl.tensor,
    cache_scales: tl.tensor,
    weights: tl.tensor,
    kv_lens: tl.tensor,
    request_of_row: tl.tensor,
    page_table: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    ROWS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALES_AT: tl.constexpr,
) -> None:
    """As the ragged kernel, for each request that has rows here (in a sorted batch one, seldom two).

    A tile is whole pages, one or two; their numbers are read one tile ahead, so that no tile waits for them. A token's
    page is an element of a tensor even where all are the same: with a scalar in its place the loop takes half as long
    again (H200). What lies in a page beyond the request's tokens is read and not stored.
    """
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    length = tl.minimum(tl.load(kv_lens + row, mask=row < num_rows, other=0), width)
    owner = tl.load(request_of_row + row, mask=row < num_rows, other=0x7FFFFFFF)
    owner = tl.where(length > 0, owner, 0x7FFFFFFF)
    q_tile, gates = _load_queries(q, weights, first, num_rows, HEADS, HEADS_P2, ROWS, DIM)
    out_row = out + row.to(tl.int64) * out_stride
    at = tl.arange(0, KV)
    token = at % PAGE_SIZE
    PAGES: tl.constexpr = KV // PAGE_SIZE
    step = tl.num_programs(1)
    request = tl.min(owner)
    while request < 0x7FFFFFFF:
        seen = tl.where(owner == request, length, 0)
        longest = tl.max(seen)
        table = page_table + request.to(tl.int64) * table_stride
        final = tl.cdiv(longest, PAGE_SIZE) - 1
        lower = tl.load(table + tl.minimum(tl.program_id(1) * PAGES, final))
        upper = tl.load(table + tl.minimum(tl.program_id(1) * PAGES + PAGES - 1, final))
        for tile in tl.range(tl.program_id(1), tl.cdiv(longest, KV), step, num_stages=STAGES):
            page = tl.where(at < PAGE_SIZE, lower, upper).to(tl.int64)
            lower = tl.load(table + tl.minimum((tile + step) * PAGES, final))
            upper = tl.load(table + tl.minimum((tile + step) * PAGES + PAGES - 1, final))
            k_tile = tl.load(cache + (page * PAGE_ROW + token * DIM)[:, None] + tl.arange(0, DIM)[None, :])
            scale = tl.load(cache_scales + page * SCALE_ROW + SCALES_AT + token)
            logits = _logits_tile(k_tile, scale, q_tile, gates, ROWS, HEADS_P2)
            column = tile * KV + at
            tl.store(out_row[None, :] + column[:, None], logits, mask=column[:, None] < seen[None, :])
        request = tl.min(tl.where(owner > request, owner, 0x7FFFFFFF))


def tiling(heads: int, pairs: int = 256, kv: int = 64, num_warps: int = 4, stages: int = 3) -> dict[str, int]:
    """pairs: (row, head) pairs of a tile, kv: tokens of a tile."""
    padded = triton.next_power_of_2(heads)
    rows = max(1, min(16, pairs // padded))
    return {
        "HEADS": heads, "HEADS_P2": padded, "ROWS": rows, "KV": kv, "DIM": HEAD_DIM, "STAGES": stages,
        "num_warps": num_warps,
    }  # fmt: skip


def _grid(rows: int, width: int, tiles: dict[str, int]) -> tuple[int, int]:
    """Row blocks, and K splits enough to fill a GPU: who computes a logit, never its value."""
    blocks = triton.cdiv(rows, tiles["ROWS"])
    steps = triton.cdiv(width, tiles["KV"])
    return blocks, max(1, min(triton.cdiv(steps, 4), triton.cdiv(1024, blocks)))


@functools.cache
def paged_tiling(heads: int) -> dict[str, int]:
    """The tiles of the paged kernel, which has less room for a state of 64 heads."""
    return tiling(heads, pairs=128 if heads > 32 else 256)


_PAGED_CONSTANTS = {
    "PAGE_SIZE": PAGE,
    "PAGE_ROW": PAGE_BYTES,
    "SCALE_ROW": _SCALE_ROW,
    "SCALES_AT": _SCALES_AT,
}


def launch_paged_mqa_logits(
    out: torch.Tensor,
    q_fp8: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    kv_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    tiles: dict[str, int] | None = None,
) -> None:
    """Write the logits of each row into ``out`` float32 [T, max_kv_len], of any row stride; the others may have more
    rows.
    """
    rows, width = out.shape
    if rows == 0 or width == 0:
        return
    heads = q_fp8.shape[1]
    launcher = _paged_launcher(heads) if tiles is None else _launcher_of(tiles)
    at = cache.data_ptr()
    launcher(
        _grid(rows, width, tiles or paged_tiling(heads)),
        (q_fp8.data_ptr(), at, at, weights.data_ptr(), kv_lens.data_ptr(), request_of_row.data_ptr(),
         page_table.data_ptr(), out.data_ptr()),
        (rows, width, page_table.stride(0), out.stride(0)),
        lambda: (
            q_fp8, cache.view(E4M3), cache.view(torch.float32), weights, kv_lens, request_of_row, page_table, out
        ),
    )  # fmt: skip


def _launcher_of(tiles: dict[str, int]) -> Launcher:
    return Launcher(_paged_mqa_logits_kernel, 8, {**tiles, **_PAGED_CONSTANTS})


@functools.cache
def _paged_launcher(heads: int) -> Launcher:
    return _launcher_of(paged_tiling(heads))


def launch_mqa_logits(
    out: torch.Tensor,
    q_fp8: torch.Tensor,
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    tiles: dict[str, int] | None = None,
) -> None:
    """Write the logits of each row into ``out`` float32 [T, S], of any row stride."""
    rows, width = out.shape
    if rows == 0 or width == 0:
        return
    tiles = tiles or tiling(q_fp8.shape[1])
    _mqa_logits_kernel[_grid(rows, width, tiles)](
        q_fp8, k_fp8, k_scale, weights, starts, ends, out, rows, width, out.stride(0), **tiles
    )


_QUERIES = {"q": "*fp8e4nv", "weights": "*fp32", "out": "*fp32", "num_rows": "i32", "width": "i32"}
KERNELS = [
    entry
    for heads in (4, 32, 64)
    for entry in (
        (
            _mqa_logits_kernel,
            {
                **_QUERIES,
                "k": "*fp8e4nv",
                "k_scale": "*fp32",
                "starts": "*i32",
                "ends": "*i32",
                "out_stride": "i64",
            },
            tiling(heads),
        ),
        (
            _paged_mqa_logits_kernel,
            {
                **_QUERIES,
                "cache": "*fp8e4nv",
                "cache_scales": "*fp32",
                "kv_lens": "*i32",
                "request_of_row": "*i32",
                "page_table": "*i32",
                "table_stride": "i32",
                "out_stride": "i64",
            },
            {**paged_tiling(heads), **_PAGED_CONSTANTS},
        ),
    )
]
