"""The configurations of the published models, and one in small."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from .config import ModelConfig, Yarn

_GLM5 = ModelConfig(
    vocab_size=154880,
    hidden_size=6144,
    num_layers=78,
    num_heads=64,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    index_n_heads=32,
    index_topk=2048,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    first_k_dense=3,
    max_positions=202752,
)

_PRESETS = {
    # GLM-5.2 in small: shared indexers, one dense layer, then MoE; 256 byte tokens.
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=128,
        num_layers=6,
        num_heads=4,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_n_heads=4,
        index_topk=64,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense=1,
        index_topk_freq=2,
        rope_theta=1e4,
    ),
    "deepseek_v32": ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=64,
        index_topk=2048,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        first_k_dense=3,
        n_group=8,
        topk_group=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        yarn=Yarn(factor=40.0, original_max_positions=4096),
        max_positions=163840,
        indexer_interleaved=False,
        indexer_hadamard=True,
        indexer_round_scale=True,
    ),
    "glm5": _GLM5,
    "glm5_2": replace(_GLM5, rope_theta=8e6, max_positions=1048576, index_topk_freq=4, index_topk_offset=3),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The configuration called ``name`` (tiny, deepseek_v32, glm5, glm5_2), with some fields replaced.

    Raises ValueError for an unknown name or field, or values that fit no model.
    """
    if name not in _PRESETS:
        raise ValueError(f"preset: name must be one of {sorted(_PRESETS)}, got {name!r}")
    known = {field.name for field in fields(ModelConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"preset: overrides must be fields of ModelConfig ({sorted(known)}), got {unknown}")
    return replace(_PRESETS[name], **overrides)
