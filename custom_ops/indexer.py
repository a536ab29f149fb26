"""The indexer's cut: ``indexer_topk``, and its short body.

Graphs are split at ``indexer_topk``: logits over every token a row sees, then the selection of k of them. Its
work depends on the lengths of the batch, which it reads from the current forward context. Where every row
selects all it sees, the short body gives the same result and can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from custom_ops import vendor
from custom_ops._checks import check_range, check_tensor, check_used_pages
from custom_ops._register import Provider, define, require
from custom_ops.batch_metadata import PAGE, BatchMetadata, ForwardContext, current_context
from custom_ops.index_cache import HEAD_DIM, check_pages, gather_for_rows, room_to_gather
from custom_ops.mqa_logits import PAGED_MQA_LOGITS, check_queries
from custom_ops.mqa_logits_kernels import launch_paged_mqa_logits
from custom_ops.topk import TOPK_SLOTS, launch_topk, slots_of_positions


def live_context() -> ForwardContext | None:
    """The current context if it has a batch; None in a dry run."""
    context = current_context()
    return context if context is not None and context.metadata is not None else None


# --- the cut ------------------------------------------------------------------------------------------------

_WIDTH_MULTIPLE = 64  # of a logits row in memory: aligned rows, whatever the lengths
_SHORT_BLOCK = 512
# Rows, and rows of each request, from which gathering K and DeepGEMM are faster than reading the pages (H200).
_DEEP_GEMM_ROWS, _DEEP_GEMM_ROWS_EACH = 384, 128


@triton.jit
def _short_kernel(
    kv_lens: tl.tensor,
    request_of_row: tl.tensor,
    page_table: tl.tensor,
    out: tl.tensor,
    table_stride: tl.tensor,
    k: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Slots of positions 0 .. kv_len-1 of each row, then -1."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.minimum(tl.load(kv_lens + row), k)
    table = page_table + tl.load(request_of_row + row).to(tl.int64) * table_stride
    page = tl.load(table + position // PAGE_SIZE, mask=inside, other=0)
    slot = tl.where(inside, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(out + row * k + position, slot, mask=position < k)


KERNELS = [
    (
        _short_kernel,
        {
            "kv_lens": "*i32",
            "request_of_row": "*i32",
            "page_table": "*i32",
            "out": "*i32",
            "table_stride": "i32",
            "k": "i32",
        },
        {"PAGE_SIZE": PAGE, "BLOCK": _SHORT_BLOCK},
    )
]


def _chunks(context: ForwardContext, metadata: BatchMetadata, topk_result: torch.Tensor) -> Iterator[slice]:
    """Row ranges of the valid rows whose logits fit the workspace, one row at least."""
    rows = min(metadata.num_rows, topk_result.shape[0])
    step = max(1, context.workspace_bytes // (4 * _logits_stride(metadata)))
    for at in range(0, rows, step):
        yield slice(at, min(at + step, rows))


def _shared(what: str, like: torch.Tensor, shape: tuple[int, ...], make: Callable[[], Any]) -> Any:
    """Memory that the cuts of one forward use one after the other. Not in a capture: a graph outlives the forward."""
    context = current_context()
    if context is None or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    key = (what, like.device, shape)
    found = context.scratch.get(key)
    if found is None:
        for other in [k for k in context.scratch if k[0] == what]:  # one at a time: they count as one workspace
            del context.scratch[other]
        found = context.scratch[key] = make()
    return found


def _logits_stride(metadata: BatchMetadata) -> int:
    return -(-metadata.max_kv_len // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def _cut(chunk: Callable[..., None]) -> Callable[..., None]:
    """A body of ``indexer_topk`` from ``chunk(q_fp8, weights, cache, metadata, part, out)``.

    ``chunk`` writes the selection of the rows ``part`` into ``out``; where ``out`` has more rows they are pad
    rows and get -1. q_fp8 and weights begin with these rows and may have more.
    """

    def body(layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor) -> None:
        context = live_context()
        metadata = context.metadata if context is not None else None
        if context is None or metadata is None or metadata.num_rows == 0 or metadata.max_kv_len == 0:
            topk_result.fill_(-1)
            return
        cache = context.tensor("index_k", layer_id)
        valid = min(metadata.num_rows, topk_result.shape[0])
        for part in _chunks(context, metadata, topk_result):
            out = topk_result[part.start :] if part.stop == valid else topk_result[part]
            q, gates = (q_fp8[part.start :], weights[part.start :]) if part.start else (q_fp8, weights)
            chunk(q, gates, cache, metadata, part, out)
        if context.selection_group is not None:
            torch.distributed.broadcast(topk_result, group=context.selection_group, group_src=0)

    return body


def _chunk_reference(
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: BatchMetadata,
    part: slice,
    out: torch.Tensor,
) -> None:
    lens, requests, pages = metadata.kv_lens[part], metadata.request_of_row[part], metadata.page_table
    q_fp8, weights = q_fp8[: lens.shape[0]], weights[: lens.shape[0]]
    logits = PAGED_MQA_LOGITS.body(q_fp8, cache, weights, lens, requests, pages, metadata.max_kv_len)
    chosen = TOPK_SLOTS.body(logits, torch.zeros_like(lens), lens, requests, pages, out.shape[1])
    out[: chosen.shape[0]] = chosen
    out[chosen.shape[0] :] = -1


def _chunk_triton(
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: BatchMetadata,
    part: slice,
    out: torch.Tensor,
) -> None:
    lens, requests, pages = _rows_from(metadata, part.start)
    rows, width, stride = part.stop - part.start, metadata.max_kv_len, _logits_stride(metadata)
    logits = _shared("logits", weights, (rows, width), lambda: weights.new_empty(rows, stride)[:, :width])
    launch_paged_mqa_logits(logits, q_fp8, cache, weights, lens, requests, pages)
    launch_topk(out, logits, None, lens, requests, pages, rows)


def _chunk_deep_gemm(
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: BatchMetadata,
    part: slice,
    out: torch.Tensor,
) -> None:
    """K of every request gathered in one piece; the logits of a row begin at its request's first token."""
    lens, requests, pages = _rows_from(metadata, part.start)
    rows, width, count = part.stop - part.start, metadata.max_kv_len, metadata.num_requests
    room = _shared("gathered", cache, (rows, width, count), lambda: room_to_gather(cache, count, width, rows))
    k_fp8, k_scale, starts, ends = gather_for_rows(cache, pages, count, width, lens, requests, room)
    if rows < q_fp8.shape[0]:
        q_fp8, weights = q_fp8[:rows], weights[:rows]
    logits = vendor.deep_gemm_logits(q_fp8, k_fp8, k_scale, weights, starts, ends, width)
    launch_topk(out, logits, None, lens, requests, pages, rows)


def _rows_from(metadata: BatchMetadata, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths and requests from row ``start`` on, and the page table."""
    lens, requests = metadata.kv_lens, metadata.request_of_row
    return (lens[start:], requests[start:], metadata.page_table) if start else (lens, requests, metadata.page_table)


def _gathered(metadata: BatchMetadata) -> int:
    """Tokens of all requests, from above: the host does not know the sum."""
    return metadata.num_requests * -(-metadata.max_kv_len // PAGE) * PAGE


def _deep_gemm_slower(*args: Any) -> str | None:
    """By the valid rows of the batch, which a padded replay and a run without padding have in common."""
    context = live_context()
    if context is None or context.metadata is None:
        return None
    rows, requests = context.metadata.num_rows, context.metadata.num_requests
    if rows < max(_DEEP_GEMM_ROWS, _DEEP_GEMM_ROWS_EACH * requests):
        return f"{rows} rows of {requests} requests do not repay gathering K"
    return None


def _deep_gemm_supports(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> str | None:
    context = live_context()
    if context is not None and context.metadata is not None:
        needed = _gathered(context.metadata) * (HEAD_DIM + 4)
        if needed > context.workspace_bytes:
            return f"the gathered K takes up to {needed} bytes, the workspace is {context.workspace_bytes}"
    return vendor.deep_gemm_supports(q_fp8)


def indexer_topk_short(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """The cut's result where no row sees more than k tokens: all it sees. Reads device buffers only."""
    context = live_context()
    if context is None or context.metadata is None:
        topk_result.fill_(-1)
        return
    metadata, (rows, k) = context.metadata, topk_result.shape
    if INDEXER_TOPK.choose(layer_id, q_fp8, weights, topk_result) != "reference":
        if rows:
            table = metadata.page_table
            _short_kernel[(rows, triton.cdiv(k, _SHORT_BLOCK))](
                metadata.kv_lens,
                metadata.request_of_row,
                table,
                topk_result,
                table.stride(0),
                k,
                PAGE_SIZE=PAGE,
                BLOCK=_SHORT_BLOCK,
            )
        return
    lens = metadata.kv_lens[:rows].unsqueeze(1)
    position = torch.arange(k, dtype=torch.int32, device=topk_result.device)
    positions = torch.where(position < lens, position, -1)
    topk_result.copy_(slots_of_positions(positions, metadata.request_of_row[:rows], metadata.page_table))


def check_cut(op: str, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor) -> None:
    """The arguments of the cut: queries, their weights, the selection."""
    check_queries(op, q_fp8, weights)
    check_selection(op, "topk_result", topk_result, q_fp8.shape[0], q_fp8.device)


def check_selection(op: str, name: str, selection: torch.Tensor, rows: int, device: torch.device) -> None:
    """int32 [rows, at least 1], contiguous, on ``device``."""
    check_tensor(op, name, selection, torch.int32, (rows, None), device, contiguous=True)
    require(selection.shape[1] >= 1, op, name, "of at least 1 column", list(selection.shape))


def check_index_context(op: str, layer_id: int, rows: int, device: torch.device) -> None:
    """Where there is a batch: the layer's index-K cache, and under ``debug_checks`` what the rows read of it.

    Raises KeyError for a layer that the context does not know.
    """
    context = live_context()
    if context is None or context.metadata is None:
        return
    cache, metadata = context.tensor("index_k", layer_id), context.metadata
    check_pages(op, cache, device, f"index_k[{layer_id}]")
    valid = min(rows, metadata.num_rows)
    requests, lens, table = metadata.request_of_row[:valid], metadata.kv_lens[:valid], metadata.page_table
    check_range(op, "request_of_row", requests, 0, table.shape[0])
    check_range(op, "kv_lens", lens, 0, min(table.shape[1] * PAGE, metadata.max_kv_len) + 1)
    check_used_pages(op, table, requests, lens, cache.shape[0])


def _check_indexer_topk(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    check_cut("indexer_topk", q_fp8, weights, topk_result)
    check_index_context("indexer_topk", layer_id, q_fp8.shape[0], q_fp8.device)


def _fake_indexer_topk(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    return None


INDEXER_TOPK = define(
    "indexer_topk(int layer_id, Tensor q_fp8, Tensor weights, Tensor(a!) topk_result) -> ()",
    reference=_cut(_chunk_reference),
    fake=_fake_indexer_topk,
    check=_check_indexer_topk,
    providers={
        "triton": Provider(_cut(_chunk_triton)),
        "deep_gemm": Provider(
            _cut(_chunk_deep_gemm), _deep_gemm_supports, vendor.deep_gemm_missing, _deep_gemm_slower
        ),
    },
    preference=("deep_gemm", "triton"),
    cut=True,
    short_body=indexer_topk_short,
)


def indexer_topk(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """Select, for each valid row of the current batch, the slots of the k tokens with the best indexer
    logits.

    q_fp8: float8_e4m3fn [T, H, 128]. weights: float32 [T, H] or [T, H, 1]. topk_result: int32 [T, k],
    written: slots of the KV pools in ascending position, then -1; pad rows all -1. Row t is row t of the
    current forward context's metadata; K comes from its ``index_k[layer_id]``. Rows go in chunks whose logits
    fit the context's ``workspace_bytes`` (one row at least); the result does not depend on the chunking.
    Without a context or a batch every row gets -1. With a ``selection_group`` in the context all its ranks get
    the result of its first.
    Raises ValueError naming the argument for a wrong dtype, shape, stride or device, with ``debug_checks()``
    also for pages outside the cache; KeyError for a layer that the context does not know.
    """
    return torch.ops.sparse_pcg.indexer_topk(layer_id, q_fp8, weights, topk_result)
