"""A GLM-5.2-shaped model folder for SGLang: a config and a tokenizer, for weights that the loader invents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config(layers: int, heads: int) -> dict[str, Any]:
    """GLM-5.2's widths and indexer schedule; depth, heads, experts and vocabulary as small as a prefill allows."""
    attention: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 2048}
    attention |= {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    attention |= {"rope_interleave": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    attention |= {"attention_bias": False, "max_position_embeddings": 202752}
    indexer: dict[str, Any] = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32}
    indexer |= {"index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_rope_interleave": True}
    indexer |= {"index_share_for_mtp_iteration": True}
    experts: dict[str, Any] = {"n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1}
    experts |= {"moe_intermediate_size": 256, "intermediate_size": 1536, "first_k_dense_replace": 3}
    experts |= {"moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "ep_size": 1}
    experts |= {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "torch_dtype": "bfloat16",
        "hidden_size": 6144,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pretraining_tp": 1,
        **attention,
        **indexer,
        **experts,
    }


def write_model(folder: Path, layers: int, heads: int) -> Path:
    """Write the folder, and give it back. 64 heads: the whole model on one GPU; 8: one of eight ranks."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(layers, heads), indent=1))
    letters = {chr(33 + i): i for i in range(94)}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "!", "eos_token": '"'}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder
