"""The indexer's cut and the composites around it.

``indexer_topk`` is where graphs are split: logits over every token a row sees, then the selection of k of
them. Its work depends on the lengths of the batch, which it reads from the current forward context.
``k_cache_and_topk_result`` and ``indexer_prefill`` stand for it together with what can be captured in front
of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from custom_ops._checks import E4M3, check_tensor
from custom_ops._register import define, require
from custom_ops.batch_metadata import ContextBind, ForwardContext, current_context
from custom_ops.mqa_logits import HEAD_DIM, PAGED_MQA_LOGITS
from custom_ops.topk import TOPK_SLOTS, slots_of_positions

SOFTMAX_SCALE = HEAD_DIM**-0.5


def _live_context() -> ForwardContext | None:
    """The current context if it has a batch; None in a dry run."""
    context = current_context()
    return context if context is not None and context.metadata is not None else None


# --- the cut ------------------------------------------------------------------------------------------------


def indexer_topk_reference(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """The cut over ``paged_mqa_logits`` and ``topk_slots``, in row chunks of bounded size."""
    context = _live_context()
    metadata = context.metadata if context is not None else None
    if context is None or metadata is None or metadata.max_kv_len == 0:
        topk_result.fill_(-1)
        return
    rows = min(metadata.num_rows, q_fp8.shape[0])
    k, width = topk_result.shape[1], metadata.max_kv_len
    cache, pages = context.tensor("index_k", layer_id), metadata.page_table
    step = max(1, context.workspace_bytes // (4 * width))
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        lens, requests = metadata.kv_lens[part], metadata.request_of_row[part]
        logits = PAGED_MQA_LOGITS.body(q_fp8[part], cache, weights[part], lens, requests, pages, width)
        topk_result[part] = TOPK_SLOTS.body(logits, torch.zeros_like(lens), lens, requests, pages, k)
    topk_result[rows:].fill_(-1)


def indexer_topk_short(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """The cut's result where no row sees more than k tokens: all it sees. Reads device buffers only."""
    context = _live_context()
    if context is None or context.metadata is None:
        topk_result.fill_(-1)
        return
    rows, k = topk_result.shape
    lens = context.metadata.kv_lens[:rows].unsqueeze(1)
    position = torch.arange(k, dtype=torch.int32, device=topk_result.device)
    positions = torch.where(position < lens, position, -1)
    topk_result.copy_(
        slots_of_positions(positions, context.metadata.request_of_row[:rows], context.metadata.page_table)
    )


def _check_cut(op: str, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor) -> None:
    check_tensor(op, "q_fp8", q_fp8, E4M3, (None, None, HEAD_DIM), contiguous=True)
    rows, heads = q_fp8.shape[:2]
    shape = (rows, heads) if weights.dim() == 2 else (rows, heads, 1)
    check_tensor(op, "weights", weights, torch.float32, shape, q_fp8.device, contiguous=True)
    check_tensor(op, "topk_result", topk_result, torch.int32, (rows, None), q_fp8.device, contiguous=True)
    require(topk_result.shape[1] >= 1, op, "topk_result", "of at least 1 column", list(topk_result.shape))


def _check_indexer_topk(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    _check_cut("indexer_topk", q_fp8, weights, topk_result)


def _fake_indexer_topk(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    return None


INDEXER_TOPK = define(
    "indexer_topk(int layer_id, Tensor q_fp8, Tensor weights, Tensor(a!) topk_result) -> ()",
    reference=indexer_topk_reference,
    fake=_fake_indexer_topk,
    check=_check_indexer_topk,
    cut=True,
    short_body=indexer_topk_short,
)

# --- composites ---------------------------------------------------------------------------------------------


def _decompose_store(bind: Any, layer_id: int, key: Any, q_fp8: Any, weights: Any, topk_result: Any) -> None:
    cache, slots = bind("index_k", layer_id), bind("slots", rows_like=key)
    torch.ops.sparse_pcg.index_k_store(key, cache, slots)
    torch.ops.sparse_pcg.indexer_topk(layer_id, q_fp8, weights, topk_result)


def _store_body(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    context = _live_context()
    if context is None:
        topk_result.fill_(-1)
        return
    _decompose_store(ContextBind(context), layer_id, key, q_fp8, weights, topk_result)


def _check_store(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    op = "k_cache_and_topk_result"
    _check_cut(op, q_fp8, weights, topk_result)
    check_tensor(
        op,
        "key",
        key,
        (torch.bfloat16, torch.float16, torch.float32),
        (q_fp8.shape[0], HEAD_DIM),
        q_fp8.device,
    )


def _fake_store(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    return None


K_CACHE_AND_TOPK_RESULT = define(
    "k_cache_and_topk_result(int layer_id, Tensor key, Tensor q_fp8, Tensor weights, Tensor(a!) topk_result)"
    " -> ()",
    reference=_store_body,
    fake=_fake_store,
    check=_check_store,
    cut=True,
    decompose=_decompose_store,
)


def _decompose_prefill(
    bind: Any,
    layer_id: int,
    x: Any,
    q_lora: Any,
    positions: Any,
    wq_b: Any,
    wk: Any,
    k_norm_weight: Any,
    k_norm_bias: Any,
    weights_proj: Any,
    cos_sin_cache: Any,
    eps: float,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
    topk_result: Any,
) -> None:
    ops = torch.ops.sparse_pcg
    cache, slots = bind("index_k", layer_id), bind("slots", rows_like=x)
    heads = bind.shape(weights_proj)[0]
    q = F.linear(q_lora, wq_b).unflatten(-1, (-1, HEAD_DIM))
    q_fp8, q_scale = ops.index_q_prepare(q, positions, cos_sin_cache, interleaved, hadamard, round_scale)
    ops.index_k_prepare_store(
        F.linear(x, wk),
        k_norm_weight,
        k_norm_bias,
        eps,
        positions,
        cos_sin_cache,
        interleaved,
        hadamard,
        cache,
        slots,
        round_scale,
    )
    weights = ops.logits_head_gate(x, weights_proj, heads**-0.5, SOFTMAX_SCALE, q_scale)
    ops.indexer_topk(layer_id, q_fp8, weights, topk_result)


def _prefill_body(layer_id: int, x: torch.Tensor, *args: Any) -> None:
    context = _live_context()
    if context is None:
        args[-1].fill_(-1)
        return
    _decompose_prefill(ContextBind(context), layer_id, x, *args)


def _check_prefill(
    layer_id: int,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    wq_b: torch.Tensor,
    wk: torch.Tensor,
    k_norm_weight: torch.Tensor,
    k_norm_bias: torch.Tensor | None,
    weights_proj: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
    topk_result: torch.Tensor,
) -> None:
    op, dtype, device = "indexer_prefill", x.dtype, x.device
    check_tensor(op, "x", x, (torch.bfloat16, torch.float16, torch.float32), (None, None))
    rows, hidden = x.shape
    check_tensor(op, "q_lora", q_lora, dtype, (rows, None), device)
    check_tensor(op, "positions", positions, torch.int64, (rows,), device)
    check_tensor(op, "weights_proj", weights_proj, (dtype, torch.float32), (None, hidden), device)
    heads = weights_proj.shape[0]
    check_tensor(op, "wq_b", wq_b, dtype, (heads * HEAD_DIM, q_lora.shape[1]), device)
    check_tensor(op, "wk", wk, dtype, (HEAD_DIM, hidden), device)
    check_tensor(op, "topk_result", topk_result, torch.int32, (rows, None), device, contiguous=True)


def _fake_prefill(layer_id: int, x: torch.Tensor, *args: Any) -> None:
    return None


INDEXER_PREFILL = define(
    "indexer_prefill(int layer_id, Tensor x, Tensor q_lora, Tensor positions, Tensor wq_b, Tensor wk,"
    " Tensor k_norm_weight, Tensor? k_norm_bias, Tensor weights_proj, Tensor cos_sin_cache, float eps,"
    " bool interleaved, bool hadamard, bool round_scale, Tensor(a!) topk_result) -> ()",
    reference=_prefill_body,
    fake=_fake_prefill,
    check=_check_prefill,
    cut=True,
    decompose=_decompose_prefill,
)

# --- public functions ---------------------------------------------------------------------------------------


def indexer_topk(
    layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """Select, for each valid row of the current batch, the slots of the k tokens with the best indexer
    logits.

    q_fp8: float8_e4m3fn [T, H, 128]. weights: float32 [T, H] or [T, H, 1]. topk_result: int32 [T, k],
    written: slots of the KV pools in ascending position, then -1; pad rows all -1. Row t is row t of the
    current forward context's metadata; K comes from its ``index_k[layer_id]``. Rows go in chunks whose logits
    fit the context's ``workspace_bytes`` (one row at least); the result does not depend on the chunking.
    Without a context or a batch every row gets -1.
    Raises ValueError naming the argument for a wrong dtype, shape, stride or device, KeyError for a layer
    that the context does not know.
    """
    return torch.ops.sparse_pcg.indexer_topk(layer_id, q_fp8, weights, topk_result)


def k_cache_and_topk_result(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """``index_k_store`` of ``key`` at the current batch's slots, then ``indexer_topk``.

    key: [T, 128] bfloat16, float16 or float32, with RoPE (and the rotation, where the model has one) applied.
    The rest as in ``indexer_topk``. Without a context or a batch nothing is stored and every row gets -1.
    """
    return torch.ops.sparse_pcg.k_cache_and_topk_result(layer_id, key, q_fp8, weights, topk_result)


def indexer_prefill(
    layer_id: int,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    wq_b: torch.Tensor,
    wk: torch.Tensor,
    k_norm_weight: torch.Tensor,
    k_norm_bias: torch.Tensor | None,
    weights_proj: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
    topk_result: torch.Tensor,
) -> None:
    """The whole indexer of a layer: projections, RoPE, quantisation, K store, head gate, then
    ``indexer_topk``.

    x: [T, hidden]. q_lora: [T, q_lora_rank]. positions: int64 [T]. wq_b: [H * 128, q_lora_rank]. wk: [128,
    hidden].
    k_norm_weight, k_norm_bias: [128], LayerNorm of K with ``eps``. weights_proj: [H, hidden].
    cos_sin_cache: float32 [positions, 64]. interleaved: RoPE pairs are neighbours, else halves. hadamard:
    rotate q and K. round_scale: FP8 scales are rounded up to powers of two. topk_result: int32 [T, k],
    written. Without a context or a batch nothing is stored and every row gets -1.
    """
    return torch.ops.sparse_pcg.indexer_prefill(
        layer_id,
        x,
        q_lora,
        positions,
        wq_b,
        wk,
        k_norm_weight,
        k_norm_bias,
        weights_proj,
        cos_sin_cache,
        eps,
        interleaved,
        hadamard,
        round_scale,
        topk_result,
    )
