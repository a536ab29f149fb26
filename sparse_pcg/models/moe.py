"""The MLPs: dense SwiGLU, and a mixture of experts with a sigmoid router.

Every shape is a function of the number of rows and nothing is read by the host, so all of it can be captured. The
routed experts are one operator, ``custom_ops.moe_experts``. Rows that are not valid go to no expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import custom_ops

from .config import ModelConfig


def weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter that takes no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dim."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def route(
    logits: torch.Tensor, correction_bias: torch.Tensor, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's experts.

    logits: float32 [T, experts]. correction_bias: float32 [experts], added to the sigmoid scores for the
    choice alone. Returns the weights, float32 [T, k], and expert ids, int64 [T, k]. With n_group > 1 only
    experts of the ``topk_group`` groups whose two best corrected scores sum highest are chosen from.
    """
    scores = logits.sigmoid()
    choice = scores + correction_bias
    if config.n_group > 1:
        grouped = choice.unflatten(1, (config.n_group, -1))
        group_scores = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        kept = group_scores.topk(config.topk_group, dim=1).indices
        keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
        choice = grouped.masked_fill(~keep.unsqueeze(2), float("-inf")).flatten(1)
    ids = choice.topk(config.num_experts_per_tok, dim=1).indices
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor, ids


def local_ids(ids: torch.Tensor, valid: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """ids of ``route`` counted from expert ``first``; ``count`` where the row is not valid or the expert is not
    one of the ``count`` from there.
    """
    here = valid.unsqueeze(1) & (ids >= first) & (ids < first + count)
    return torch.where(here, ids - first, count)


class DenseMLP(nn.Module):
    """down(swiglu(gate_up(x))), row by row."""

    def __init__(
        self, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_proj = weight(2 * intermediate, hidden, dtype=dtype, device=device)
        self.down_proj = weight(hidden, intermediate, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]; ``valid`` is not looked at."""
        return F.linear(swiglu(F.linear(x, self.gate_up_proj)), self.down_proj)


class MoE(nn.Module):
    """Routed experts plus shared ones (one dense MLP of their summed width).

    The router ranks all experts of the model; a choice whose expert is not one of ``config.experts_here`` adds
    nothing. Its weights are float32: it tells experts apart that score alike.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        self.config = config
        self.first, self.count = config.experts_here
        self.router = weight(config.n_routed_experts, hidden, dtype=torch.float32, device=device)
        self.correction_bias = weight(config.n_routed_experts, dtype=torch.float32, device=device)
        self.gate_up_proj = weight(self.count, 2 * inter, hidden, dtype=dtype, device=device)
        self.down_proj = weight(self.count, hidden, inter, dtype=dtype, device=device)
        self.shared = DenseMLP(hidden, config.shared_width, dtype, device) if config.shared_width else None

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. valid: bool [T]; the other rows are routed to no expert. Returns [T, hidden]."""
        weights, ids = route(F.linear(x.float(), self.router), self.correction_bias, self.config)
        here = local_ids(ids, valid, self.first, self.count)
        total = self.config.n_routed_experts
        routed = custom_ops.moe_experts(x, self.gate_up_proj, self.down_proj, weights, here, total)
        return routed if self.shared is None else routed + self.shared(x, valid)
