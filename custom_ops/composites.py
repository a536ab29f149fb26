"""Composites: ops that stand for a captured part and a cut, or for a part that is captured or cut as a whole.

``k_cache_and_topk_result`` stores index K and makes the cut, ``indexer_prefill`` is a layer's whole indexer,
``mla_attention`` its whole attention. Body and decomposition are one function each, over the caches and slots
of the current forward context.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from custom_ops._checks import FLOATS, check_range, check_tensor
from custom_ops._register import define, require
from custom_ops.batch_metadata import PAGE, ContextBind, current_context
from custom_ops.index_cache import HEAD_DIM
from custom_ops.indexer import check_cut, check_index_context, check_selection, live_context
from custom_ops.layernorm import check_affine
from custom_ops.mla_cache import LATENT, ROPE, check_latent_cache, check_layout
from custom_ops.rope import check_positions

SOFTMAX_SCALE = HEAD_DIM**-0.5


# A composite checks all that its parts will: what a part refused after the store would leave the store done.
def _check_stored_rows(op: str, name: str, rows: int, slots: torch.Tensor, pool: int) -> None:
    """The batch has a slot for each row of the argument ``name``, under ``debug_checks`` one inside the pool."""
    require(rows <= slots.shape[0], op, name, f"of at most {slots.shape[0]} rows, as the batch's buffers are", rows)
    check_range(op, "slots", slots[:rows], 0, pool)


def _check_index_store(op: str, name: str, layer_id: int, argument: torch.Tensor) -> None:
    rows = argument.shape[0]
    check_index_context(op, layer_id, rows, argument.device)
    context = live_context()
    if context is not None:
        pool = context.tensor("index_k", layer_id).shape[0] * PAGE
        _check_stored_rows(op, name, rows, context.tensor("slots"), pool)


def _decompose_store(bind: Any, layer_id: int, key: Any, q_fp8: Any, weights: Any, topk_result: Any) -> None:
    cache, slots = bind("index_k", layer_id), bind("slots", rows_like=key)
    torch.ops.sparse_pcg.index_k_store(key, cache, slots)
    torch.ops.sparse_pcg.indexer_topk(layer_id, q_fp8, weights, topk_result)


def _store_body(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    context = live_context()
    if context is None:
        topk_result.fill_(-1)
        return
    _decompose_store(ContextBind(context), layer_id, key, q_fp8, weights, topk_result)


def _check_store(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    op = "k_cache_and_topk_result"
    check_cut(op, q_fp8, weights, topk_result)
    check_tensor(
        op,
        "key",
        key,
        FLOATS,
        (q_fp8.shape[0], HEAD_DIM),
        q_fp8.device,
    )
    _check_index_store(op, "key", layer_id, key)


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
    context = live_context()
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
    op = "indexer_prefill"
    check_tensor(op, "x", x, FLOATS, (None, None))
    (rows, hidden), dtype, device = x.shape, x.dtype, x.device
    check_tensor(op, "q_lora", q_lora, dtype, (rows, None), device)
    check_positions(op, x, positions, cos_sin_cache, ROPE)
    check_tensor(op, "weights_proj", weights_proj, dtype, (None, hidden), device)
    heads = weights_proj.shape[0]
    require(1 <= heads <= 128, op, "weights_proj", "of 1 to 128 heads", heads)
    check_tensor(op, "wq_b", wq_b, dtype, (heads * HEAD_DIM, q_lora.shape[1]), device)
    check_tensor(op, "wk", wk, dtype, (HEAD_DIM, hidden), device)
    check_affine(op, x, k_norm_weight, k_norm_bias, HEAD_DIM, prefix="k_norm_")
    check_selection(op, "topk_result", topk_result, rows, device)
    _check_index_store(op, "x", layer_id, x)


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


def _decompose_attention(
    bind: Any,
    layer_id: int,
    q_nope: Any,
    q_rope: Any,
    k_nope: Any,
    k_rope: Any,
    w_kc: Any,
    w_vc: Any,
    positions: Any,
    cos_sin_cache: Any,
    interleaved: bool,
    topk: Any,
    sm_scale: float,
    out: Any,
) -> None:
    ops = torch.ops.sparse_pcg
    context = current_context()
    layout = "bf16" if context is None else context.kv_layout
    cache = bind("latent_kv", layer_id)
    slots, select_lens = bind("slots", rows_like=q_nope), bind("select_lens", rows_like=q_nope)
    q_latent = torch.bmm(q_nope.transpose(0, 1), w_kc).transpose(0, 1)
    q_rotated = ops.apply_rope(q_rope, positions, cos_sin_cache, ROPE, interleaved)
    ops.mla_rope_kv_store(k_nope, k_rope, positions, cos_sin_cache, interleaved, cache, slots, layout)
    attended = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    ops.sparse_mla(
        torch.cat([q_latent, q_rotated], dim=-1), cache, topk, select_lens, attended, sm_scale, layout
    )
    out.copy_(torch.bmm(attended.transpose(0, 1), w_vc).transpose(0, 1))


def _attention_body(layer_id: int, q_nope: torch.Tensor, *args: Any) -> None:
    context = live_context()
    if context is None:
        args[-1].zero_()
        return
    _decompose_attention(ContextBind(context), layer_id, q_nope, *args)


def _check_attention(
    layer_id: int,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    w_kc: torch.Tensor,
    w_vc: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    topk: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    op = "mla_attention"
    check_tensor(op, "q_nope", q_nope, FLOATS, (None, None, None))
    (rows, heads, nope), dtype, device = q_nope.shape, q_nope.dtype, q_nope.device
    require(1 <= heads <= 128, op, "q_nope", "of 1 to 128 heads", heads)
    check_tensor(op, "q_rope", q_rope, dtype, (rows, heads, ROPE), device)
    check_tensor(op, "k_nope", k_nope, dtype, (rows, LATENT), device)
    check_tensor(op, "k_rope", k_rope, dtype, (rows, ROPE), device)
    check_tensor(op, "w_kc", w_kc, dtype, (heads, nope, LATENT), device)
    check_tensor(op, "w_vc", w_vc, dtype, (heads, LATENT, None), device)
    check_positions(op, q_rope, positions, cos_sin_cache, ROPE)
    check_selection(op, "topk", topk, rows, device)
    check_tensor(op, "out", out, dtype, (rows, heads, w_vc.shape[2]), device)
    context = live_context()
    if context is not None:
        check_layout(op, context.kv_layout, "kv_layout")
        cache = context.tensor("latent_kv", layer_id)
        check_latent_cache(op, cache, context.kv_layout, device, f"latent_kv[{layer_id}]")
        _check_stored_rows(op, "q_nope", rows, context.tensor("slots"), cache.shape[0])
        check_range(op, "topk", topk, -1, cache.shape[0])
        check_range(op, "select_lens", context.tensor("select_lens")[:rows], 0, topk.shape[1] + 1)


def _fake_attention(layer_id: int, q_nope: torch.Tensor, *args: Any) -> None:
    return None


MLA_ATTENTION = define(
    "mla_attention(int layer_id, Tensor q_nope, Tensor q_rope, Tensor k_nope, Tensor k_rope, Tensor w_kc,"
    " Tensor w_vc, Tensor positions, Tensor cos_sin_cache, bool interleaved, Tensor topk, float sm_scale,"
    " Tensor(a!) out) -> ()",
    reference=_attention_body,
    fake=_fake_attention,
    check=_check_attention,
    cut=True,
    decompose=_decompose_attention,
)


def k_cache_and_topk_result(
    layer_id: int, key: torch.Tensor, q_fp8: torch.Tensor, weights: torch.Tensor, topk_result: torch.Tensor
) -> None:
    """``index_k_store`` of ``key`` at the current batch's slots, then ``indexer_topk``.

    key: [T, 128] bfloat16, float16 or float32, with RoPE (and the rotation, where the model has one) applied.
    The rest as in ``indexer_topk``. Without a context or a batch nothing is stored and every row gets -1.
    Errors are those of ``indexer_topk``, for the caches of the context too, before anything is written.
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
    x, q_lora, wq_b, wk and weights_proj have one dtype, H is at most 128. Errors are those of
    ``indexer_topk`` and name this operator's arguments or the context's; nothing is written before.
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


def mla_attention(
    layer_id: int,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    w_kc: torch.Tensor,
    w_vc: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    topk: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Sparse MLA of a layer, with its KV store, over the current batch.

    q_nope: [T, H, nope]. q_rope: [T, H, 64], before RoPE. k_nope: [T, 512], the normed latent. k_rope: [T,
    64], before RoPE. w_kc: [H, nope, 512] and w_vc: [H, 512, v], the halves of the KV up-projection.
    positions: int64 [T].
    cos_sin_cache: float32 [positions, 64]. interleaved: RoPE pairs are neighbours, else halves. topk: int32
    [T, k] slots. sm_scale: factor on the scores. out: [T, H, v], written. All floating tensors but the
    cos/sin cache have one dtype. Cache, slots and lengths come from the current forward context
    (``latent_kv[layer_id]``, its layout from ``kv_layout``). Without a context or a batch nothing is
    stored and ``out`` is zeroed.
    H is at most 128. Raises ValueError naming the argument, or the cache or layout of the context, for a wrong
    dtype, shape, layout or device, with ``debug_checks()`` also for slots outside the cache; KeyError for a
    layer that the context does not know. Nothing is written before.
    """
    return torch.ops.sparse_pcg.mla_attention(
        layer_id,
        q_nope,
        q_rope,
        k_nope,
        k_rope,
        w_kc,
        w_vc,
        positions,
        cos_sin_cache,
        interleaved,
        topk,
        sm_scale,
        out,
    )
