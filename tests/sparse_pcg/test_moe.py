"""Routing and experts of the reference model."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_pcg.models import Rank, preset
from sparse_pcg.models.dsa import draw_weights
from sparse_pcg.models.moe import MoE, local_ids, route


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
def test_choices_of_experts_elsewhere_and_of_pad_rows(here):
    first, count = here
    ids, valid = torch.randint(8, (40, 2)), torch.rand(40) < 0.7
    for row, given in enumerate(local_ids(ids, valid, first, count).tolist()):
        chosen = ids[row].tolist() if valid[row] else []
        want = [i - first if first <= i < first + count else count for i in chosen]
        assert given == (want or [count, count])


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
