"""Operators of DeepSeek Sparse Attention prefill, in ``torch.ops.sparse_pcg`` and as functions of the same
names.

The family modules are all imported before the functions are bound: a family and its function may share a
name, and a later import of the submodule would put the module in the function's place.
"""

from custom_ops import hadamard as _hadamard
from custom_ops import indexer as _indexer
from custom_ops import metadata_fill as _metadata_fill
from custom_ops import mla_attention as _mla_attention
from custom_ops import mqa_logits as _mqa_logits
from custom_ops import sparse_mla as _sparse_mla
from custom_ops import topk as _topk

fill_batch_metadata = _metadata_fill.fill_batch_metadata
hadamard = _hadamard.hadamard
indexer_prefill = _indexer.indexer_prefill
indexer_topk = _indexer.indexer_topk
k_cache_and_topk_result = _indexer.k_cache_and_topk_result
mla_attention = _mla_attention.mla_attention
mqa_logits = _mqa_logits.mqa_logits
paged_mqa_logits = _mqa_logits.paged_mqa_logits
sparse_mla = _sparse_mla.sparse_mla
topk_indices = _topk.topk_indices
topk_slots = _topk.topk_slots

__all__ = [
    "fill_batch_metadata",
    "hadamard",
    "indexer_prefill",
    "indexer_topk",
    "k_cache_and_topk_result",
    "mla_attention",
    "mqa_logits",
    "paged_mqa_logits",
    "sparse_mla",
    "topk_indices",
    "topk_slots",
]
