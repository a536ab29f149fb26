"""Configurations read from ``config.json``: the published models, and their parameter counts."""

from __future__ import annotations

import json

import pytest

from sparse_pcg.models import DSAModel, NextN, Yarn, config_from_hf, preset
from tests.sparse_pcg.hf_models import FAMILIES, SIZES, hf_config

# The fields of the published files that shape the model.
_DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "attention_bias": False, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "attention_bias": False,
    "first_k_dense_replace": 3, "hidden_act": "silu", "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "intermediate_size": 12288,
    "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
_FULL = {0, 1, *range(2, 78, 4)}
_GLM52 = {
    **_GLM5,
    "head_dim": 192,  # as published, and not what RoPE rotates
    "max_position_embeddings": 1048576,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "indexer_types": ["full" if layer in _FULL else "shared" for layer in range(78)],
}
PUBLISHED = {"deepseek_v32": _DEEPSEEK_V32, "glm5": _GLM5, "glm5_2": _GLM52}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_the_presets(name, tmp_path):
    config = config_from_hf(PUBLISHED[name])
    expected = preset(name)
    assert config.index_layers == expected.index_layers
    sharing = {"indexer_types": None, "index_topk_freq": 1, "index_topk_offset": 2}
    assert vars(config) | sharing == vars(expected) | sharing
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert config_from_hf(tmp_path) == config_from_hf(str(tmp_path / "config.json")) == config


# Billions, published: DeepSeek-V3 (of which V3.2 differs by its indexers, 0.85) 671 and a NextN layer of 11.5 beside
# copies of embedding and head, 0.9 each (its README_WEIGHTS.md); 685 with all of these (Hugging Face, V3.2). GLM-5
# 744 (its report, arXiv:2602.15763), 754 with the NextN layer; GLM-5.2 743 (the vLLM recipe), 753 with it.
@pytest.mark.parametrize(
    ("name", "alone", "with_nextn", "copies"),
    [("deepseek_v32", 671 + 0.85, 685, 2 * 0.927), ("glm5", 744, 754, 0.0), ("glm5_2", 743.4, 753, 0.0)],
)
def test_parameter_counts_of_the_published_files(name, alone, with_nextn, copies):
    config = config_from_hf({**PUBLISHED[name], "max_position_embeddings": 16})
    model = DSAModel(config, device="meta")
    draft = NextN(model)
    own = sum(parameter.numel() for parameter in draft.own_parameters().values()) / 1e9
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert count == pytest.approx(alone, abs=0.15)
    assert count + own + copies == pytest.approx(with_nextn, abs=0.5)
    if name == "deepseek_v32":
        assert own == pytest.approx(11.5, abs=0.15)


@pytest.mark.parametrize(("family", "size"), [(f, s) for f in FAMILIES for s in SIZES])
def test_what_transformers_writes_is_read(family, size, tmp_path):
    pytest.importorskip("transformers", minversion="5.20")
    theirs = hf_config(family, size)
    theirs.save_pretrained(tmp_path)
    config = config_from_hf(tmp_path)
    assert config == config_from_hf(theirs)
    assert (config.hidden_size, config.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert config.first_k_dense == theirs.mlp_layer_types.count("dense") == 1
    if family == "glm_moe_dsa":
        full = [layer for layer, kind in enumerate(theirs.indexer_types) if kind == "full"]
        assert config.index_layers == tuple(full)
    if (family, size) == ("deepseek_v32", "large"):
        assert config.yarn == Yarn(40.0, 64, mscale=1.0, mscale_all_dim=0.7)


def test_fewer_layers():
    config = config_from_hf(_GLM52, num_layers=5)
    assert (config.num_layers, config.first_k_dense, config.index_layers) == (5, 3, (0, 1, 2))
    assert config_from_hf(_GLM52, num_layers=2).first_k_dense == 2
    with pytest.raises(ValueError, match="num_layers must be 1 to 78, got 79"):
        config_from_hf(_GLM52, num_layers=79)


def test_sharing_in_each_way():
    given = {**_GLM5, "num_hidden_layers": 7}
    assert config_from_hf(given).index_layers == tuple(range(7))
    by_frequency = {**given, "index_topk_freq": 4}
    assert config_from_hf(by_frequency).index_layers == (0, 1, 5)
    assert config_from_hf({**by_frequency, "index_skip_topk_offset": 3}).index_layers == (0, 1, 2, 6)
    assert config_from_hf({**by_frequency, "index_topk_pattern": "FSFSFSS"}).index_layers == (0, 2, 4)
    assert config_from_hf({**by_frequency, "index_topk_pattern": list("FSFSFSS")}).index_layers == (0, 2, 4)
    types = ["full", *["shared"] * 6]
    assert config_from_hf({**by_frequency, "index_topk_pattern": types}).index_layers == (0,)


def test_yarn_without_its_factors():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    config = config_from_hf({**_GLM5, "rope_parameters": rope})
    assert config.yarn == Yarn(4.0, 64, mscale=1.0, mscale_all_dim=0.0)
    assert config.softmax_scale == 256**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type must be one of \['deepseek_v32', 'glm_moe_dsa'\], got 'llama'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ({"q_lora_rank": None}, "q_lora_rank must be given, got None"),
        ({"kv_lora_rank": 256}, "kv_lora_rank must be 512"),
        ({"first_k_dense_replace": 1, "mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types must be 'dense' of"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be 'default' or 'yarn', got 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings must be given"),
        (
            {"rope_parameters": {**_DEEPSEEK_V32["rope_scaling"], "truncate": False}},
            "truncate must be True or absent, got False",
        ),
        (
            {"rope_parameters": {**_DEEPSEEK_V32["rope_scaling"], "mscale": None}},
            "mscale must be given where mscale_all_dim is, got None",
        ),
    ],
)
def test_files_of_other_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**_GLM5, **changes})
