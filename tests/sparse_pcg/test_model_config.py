"""Configurations, presets, parameters and the RoPE table of the reference model."""

from __future__ import annotations

import math
import re

import pytest
import torch

from sparse_pcg.models import DSAModel, ModelConfig, Rank, Yarn, preset
from sparse_pcg.models.rope import cos_sin_cache
from tests.sparse_pcg.serving import TINY, serve, tokens


def test_published_sharing_patterns():
    assert preset("glm5_2").index_layers == (0, 1, *range(2, 78, 4))
    assert len(preset("glm5_2").index_layers) == 21
    assert preset("deepseek_v32").index_layers == tuple(range(61))
    assert preset("glm5").index_layers == tuple(range(78))


def test_sharing_given_in_each_way():
    def layers(**overrides):
        return preset("tiny", num_layers=9, **overrides).index_layers

    assert layers(index_topk_freq=4) == (0, 1, 5)  # first layer, then every fourth from the second
    assert layers(index_topk_freq=4, index_topk_offset=3) == (0, 1, 2, 6)
    assert layers(index_topk_pattern="FSSFSSFSS", index_topk_freq=4) == (0, 3, 6)
    types = ("full", "shared", "full", *["shared"] * 6)
    assert layers(indexer_types=types, index_topk_pattern="FSSFSSFSS") == (0, 2)


# Weights of the published models without their NextN layer: 671.0e9 and the indexers' 0.85e9; 744e9.
@pytest.mark.parametrize(("name", "billions"), [("deepseek_v32", 671.88), ("glm5", 743.9), ("glm5_2", 743.4)])
def test_published_parameter_counts(name, billions):
    model = DSAModel(preset(name, max_positions=16), device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.06)
    assert not any(p.requires_grad for p in model.parameters())


def test_parameter_shapes():
    model = DSAModel(TINY, device="meta")
    shapes = {re.sub(r"^layers\.1\.", "", name): tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["embed_tokens"] == shapes["lm_head"] == (256, 128)
    assert shapes["attention.qkv_a_proj"] == (64 + 512 + 64, 128)
    assert shapes["attention.q_b_proj"] == (4 * (32 + 64), 64)
    assert shapes["attention.w_kc"] == (4, 32, 512)
    assert shapes["attention.w_vc"] == (4, 512, 32)
    assert shapes["attention.o_proj"] == (128, 4 * 32)
    assert shapes["attention.indexer.wq_b"] == (4 * 128, 64)
    assert shapes["attention.indexer.wk"] == (128, 128)
    assert shapes["attention.indexer.weights_proj"] == (4, 128)
    assert shapes["mlp.router"] == (8, 128)
    assert shapes["mlp.gate_up_proj"] == (8, 128, 128)
    assert shapes["mlp.down_proj"] == (8, 128, 64)
    assert shapes["mlp.shared.gate_up_proj"] == (128, 128)
    assert shapes["layers.0.mlp.gate_up_proj"] == (512, 128)
    assert [layer.attention.indexer is not None for layer in model.layers] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


def test_weights_follow_the_seed():
    first, again, other = (
        DSAModel(preset("tiny", num_layers=2), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_activations_keep_their_size_over_depth():
    sizes = []
    for num_layers in (2, 24):
        model = DSAModel(preset("tiny", num_layers=num_layers), dtype=torch.float32)
        hook = model.layers[-1].register_forward_hook(lambda m, a, out: sizes.append(out[0].std().item()))
        serve(model, tokens(60))
        hook.remove()
    assert all(0.8 < size < 3 for size in sizes)


def test_head():
    model = DSAModel(TINY, dtype=torch.float32)
    hidden = torch.randn(2, 128)
    assert torch.equal(model.head(hidden), hidden @ model.lm_head.T)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank must be 512"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most"),
        ({"n_group": 3, "topk_group": 3}, "n_group must be a divisor"),
        ({"n_group": 4, "topk_group": 5}, "topk_group must be at most n_group"),
        ({"indexer_types": ("full",) * 5}, "indexer_types must be 6 of"),
        ({"index_topk_pattern": "FFFFFX"}, "index_topk_pattern must be 6 of"),
        ({"index_topk_pattern": "SFFFFF"}, "indexer_types must be 'full' for layer 0"),
        ({"local_experts": (6, 3)}, r"local_experts must be \(first, count\) within 8 experts, got \(6, 3\)"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size must be at least 1, or None"),
        ({"layers": 3}, r"overrides must be fields of ModelConfig .* got \['layers'\]"),
    ],
)
def test_bad_configurations(overrides, message):
    with pytest.raises(ValueError, match=message):
        preset("tiny", **overrides)


def test_a_rank_of_a_published_model():
    whole = preset("glm5_2", max_positions=16)
    columns, experts = (Rank(3, 8, expert_parallel).part_of(whole) for expert_parallel in (False, True))
    shapes = (columns.num_heads, columns.intermediate_size, columns.moe_intermediate_size, columns.shared_width)
    assert shapes == (8, 1536, 256, 256) and columns.experts_here == (0, 256)
    shapes = (experts.num_heads, experts.intermediate_size, experts.moe_intermediate_size, experts.shared_width)
    assert shapes == (8, 1536, 2048, 256) and experts.experts_here == (96, 32)
    counts = [sum(p.numel() for p in DSAModel(c, device="meta").parameters()) for c in (columns, experts)]
    assert counts[0] == counts[1]
    few = preset("tiny", local_experts=(2, 6))  # a model that has six of its eight experts
    assert Rank(1, 2, True).part_of(few).experts_here == (5, 3) and Rank(1, 2).part_of(few).experts_here == (2, 6)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"name must be one of .*'tiny'.*, got 'large'"):
        preset("large")


# --- RoPE table -------------------------------------------------------------------------------------------


def test_cos_sin_table_worked_by_hand():
    table = cos_sin_cache(preset("tiny", max_positions=3, rope_theta=1e4), "cpu")
    assert table.shape == (3, 64) and table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    torch.testing.assert_close(table[2, 0], torch.tensor(math.cos(2.0)))
    torch.testing.assert_close(table[2, 32 + 16], torch.tensor(math.sin(2.0 / 100)))


def test_yarn_worked_by_hand():
    config = preset("deepseek_v32", max_positions=2)
    assert isinstance(config, ModelConfig) and config.yarn == Yarn(40.0, 4096)
    sharpening = 0.1 * math.log(40.0) + 1.0  # 1.3689
    assert config.softmax_scale == pytest.approx(192**-0.5 * sharpening**2)
    assert config.yarn.cos_sin_scale == 1.0
    assert Yarn(40.0, 4096, mscale=0.0).cos_sin_scale == pytest.approx(1 / sharpening)
    # Pair i turns 4096 / (2 pi 10000^(i/32)) times over 4096 positions: 32 turns at i = 10.47, 1 turn at i
    # = 22.51. So pairs up to 10 keep their frequency, pairs from 23 on turn 40 times slower, in between it
    # is a ramp.
    frequencies = cos_sin_cache(config, "cpu")[1, 32:].double().asin()
    plain = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    plain[0] = math.pi - 1.0 if frequencies[0] > 1.0 else 1.0
    torch.testing.assert_close(frequencies[:11], plain[:11], rtol=1e-5, atol=0)
    torch.testing.assert_close(frequencies[23:], plain[23:] / 40, rtol=1e-4, atol=0)
    share = (16 - 10) / (23 - 10)
    torch.testing.assert_close(frequencies[16], plain[16] * (1 - share + share / 40), rtol=1e-4, atol=0)
