"""Operators of DeepSeek Sparse Attention prefill, in ``torch.ops.sparse_pcg`` and as functions of the same
names.

``use_context`` gives the operators with a ``layer_id`` their batch (``BatchMetadata``) and caches (``ForwardContext``);
``use_provider`` forces an implementation, ``debug_checks`` has values checked too.

The family modules are all imported before the functions are bound: a family and its function may share a
name, and a later import of the submodule would put the module in the function's place.
"""

from custom_ops import composites as _composites
from custom_ops import fp8_quant as _fp8_quant
from custom_ops import hadamard as _hadamard
from custom_ops import head_gate as _head_gate
from custom_ops import index_cache as _index_cache
from custom_ops import index_prepare as _index_prepare
from custom_ops import index_queries as _index_queries
from custom_ops import indexer as _indexer
from custom_ops import layernorm as _layernorm
from custom_ops import metadata_fill as _metadata_fill
from custom_ops import mla_cache as _mla_cache
from custom_ops import moe_experts as _moe_experts
from custom_ops import mqa_logits as _mqa_logits
from custom_ops import rope as _rope
from custom_ops import sparse_mla as _sparse_mla
from custom_ops import topk as _topk
from custom_ops._register import debug_checks, providers_of, use_provider
from custom_ops.batch_metadata import BatchMetadata, ForwardContext, current_context, use_context

apply_rope = _rope.apply_rope
fill_batch_metadata = _metadata_fill.fill_batch_metadata
hadamard = _hadamard.hadamard
index_k_gather = _index_cache.index_k_gather
index_k_prepare_store = _index_prepare.index_k_prepare_store
index_k_store = _index_cache.index_k_store
index_q_prepare = _index_queries.index_q_prepare
indexer_prefill = _composites.indexer_prefill
indexer_topk = _indexer.indexer_topk
k_cache_and_topk_result = _composites.k_cache_and_topk_result
layernorm = _layernorm.layernorm
logits_head_gate = _head_gate.logits_head_gate
mla_attention = _composites.mla_attention
mla_kv_store = _mla_cache.mla_kv_store
mla_rope_kv_store = _mla_cache.mla_rope_kv_store
moe_experts = _moe_experts.moe_experts
mqa_logits = _mqa_logits.mqa_logits
paged_mqa_logits = _mqa_logits.paged_mqa_logits
quant_fp8 = _fp8_quant.quant_fp8
scale_head_gate = _head_gate.scale_head_gate
sparse_mla = _sparse_mla.sparse_mla
topk_indices = _topk.topk_indices
topk_slots = _topk.topk_slots

__all__ = [
    "BatchMetadata",
    "ForwardContext",
    "apply_rope",
    "current_context",
    "debug_checks",
    "fill_batch_metadata",
    "hadamard",
    "index_k_gather",
    "index_k_prepare_store",
    "index_k_store",
    "index_q_prepare",
    "indexer_prefill",
    "indexer_topk",
    "k_cache_and_topk_result",
    "layernorm",
    "logits_head_gate",
    "mla_attention",
    "mla_kv_store",
    "mla_rope_kv_store",
    "moe_experts",
    "mqa_logits",
    "paged_mqa_logits",
    "providers_of",
    "quant_fp8",
    "scale_head_gate",
    "sparse_mla",
    "topk_indices",
    "topk_slots",
    "use_context",
    "use_provider",
]
