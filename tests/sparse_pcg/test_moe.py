"""Routing and experts of the reference model."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_pcg.models import Rank, preset
from sparse_pcg.models.dsa import draw_weights
from sparse_pcg.models.moe import MoE, experts_dense, experts_grouped, local_ids, route


def _router_config(**overrides):
    return preset("tiny", **{"n_routed_experts": 4, "num_experts_per_tok": 2, **overrides})


def test_routing_worked_by_hand():
    logit = {0.8: math.log(4.0), 0.5: 0.0, 0.2: -math.log(4.0)}
    logits = torch.tensor([[logit[0.8], logit[0.5], logit[0.2], logit[0.5]]])
    bias = torch.tensor([-0.7, 0.0, 0.4, 0.05])  # corrected: 0.1, 0.5, 0.6, 0.55
    weights, ids = route(logits, bias, _router_config())
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[2.5 * 0.2 / 0.7, 2.5 * 0.5 / 0.7]]))
    weights, ids = route(logits, bias, _router_config(norm_topk_prob=False))
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.25]]))


def test_routing_within_groups_worked_by_hand():
    # corrected scores per group: {0.9, 0.1}, {0.6, 0.5}, {0.55, 0.54}, {0.2, 0.3}; the best two of a group
    # sum to 1.0, 1.1, 1.09, 0.5: groups 1 and 2 are kept, though the best expert is in group 0
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.55, 0.54, 0.2, 0.3]])
    config = _router_config(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2)
    weights, ids = route(scores.logit(), torch.zeros(8), config)
    assert ids.tolist() == [[2, 4, 5]]
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))


@pytest.mark.parametrize("here", [(0, 8), (2, 3), (7, 1)])
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_grouped_experts_equal_dense_ones(rows, here, monkeypatch):
    real, reached = torch.nn.functional.grouped_mm, []

    def grouped_mm(a, b, offs):
        """The rows past the last group are left as they are in memory: NaN at worst."""
        out = real(a, b, offs=offs)
        reached.append(int(offs[-1]))
        out[reached[-1] :] = math.nan
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    generator = torch.Generator().manual_seed(rows)
    first, count = here
    x = torch.randn(rows, 32, generator=generator).bfloat16()
    gate_up = (torch.randn(8, 48, 32, generator=generator) / 32**0.5).bfloat16()
    down = (torch.randn(8, 32, 24, generator=generator) / 24**0.5).bfloat16()
    weights, ids = torch.rand(rows, 8, generator=generator).topk(2)
    valid = torch.rand(rows, generator=generator) < 0.7
    x[~valid], weights[~valid] = math.nan, math.nan
    local = local_ids(ids, valid, first, count)
    part = slice(first, first + count)
    dense = experts_dense(x, gate_up[part], down[part], weights, local)
    grouped = experts_grouped(x, gate_up[part], down[part], weights, local)
    torch.testing.assert_close(grouped, dense, atol=2e-2, rtol=2e-2)
    chosen = (local < count).sum(1)
    assert not dense[chosen == 0].any() and not grouped[chosen == 0].any()
    assert reached == [int(chosen.sum())] * 2
    assert (dense[chosen > 0].abs().sum(1) > 0).all() and (rows < 40 or 0 < (chosen > 0).sum() < rows)


def test_experts_of_other_ranks_add_nothing():
    """The parts that ranks compute of the routed experts sum to the whole; each ranks all experts."""
    config = _router_config(n_routed_experts=8, n_shared_experts=0, hidden_size=32, moe_intermediate_size=16)
    whole = MoE(config, torch.float32, "cpu")
    draw_weights(whole, 1, seed=3)
    x, valid = torch.randn(20, 32), torch.arange(20) < 17
    total = torch.zeros(20, 32)
    for index in range(4):
        part = Rank(index, 4, expert_parallel=True).part_of(config)
        assert part.local_experts == (2 * index, 2)
        rank = MoE(part, torch.float32, "cpu")
        rank.router, rank.correction_bias = whole.router, whole.correction_bias
        held = slice(2 * index, 2 * index + 2)
        rank.gate_up_proj.data, rank.down_proj.data = whole.gate_up_proj.data[held], whole.down_proj.data[held]
        given = rank(x, valid)
        assert given.any() and not given[~valid].any()
        total += given
    torch.testing.assert_close(total, whole(x, valid), atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
def test_grouped_experts_replay_from_a_graph():
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    gate_up, down = (normal(32, 256, 512) / 512**0.5).bfloat16(), (normal(32, 512, 128) / 128**0.5).bfloat16()
    x, scores = normal(96, 512).bfloat16(), normal(96, 32).sigmoid()
    weights, ids = scores.topk(4)
    valid = torch.arange(96, device="cuda") < 90

    def experts():
        return experts_grouped(x, gate_up, down, weights, local_ids(ids, valid, 0, 32))

    experts()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts()
    for rows in (96, 1, 50):
        x.copy_(normal(96, 512))
        new_weights, new_ids = normal(96, 32).sigmoid().topk(4)
        weights.copy_(new_weights)
        ids.copy_(new_ids)
        valid.copy_(torch.arange(96, device="cuda") < rows)
        x[rows:] = math.nan
        graph.replay()
        assert torch.equal(captured, experts())
        dense = experts_dense(x, gate_up, down, weights, local_ids(ids, valid, 0, 32))
        torch.testing.assert_close(captured, dense, atol=3e-2, rtol=3e-2)
        assert not captured[rows:].any()


def test_an_expert_that_overflows_on_a_row_it_does_not_serve_is_harmless():
    x = torch.ones(1, 4)
    gate_up, down = torch.ones(2, 4, 4), torch.ones(2, 4, 2)
    gate_up[1] = 1e30
    weights, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    assert experts_dense(x, gate_up, down, weights, ids).isfinite().all()
