"""The MLPs: dense SwiGLU, and a mixture of experts with a sigmoid router.

Every shape is a function of the number of rows and nothing is read by the host, so both ways of running the
experts can be captured: ``experts_dense`` multiplies every row with every expert (few experts, any device
and dtype); ``experts_grouped`` sorts the rows by expert and runs one grouped GEMM. Rows that are not valid
go to no expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

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


def experts_dense(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each row's experts, every expert evaluated on every row.

    x: [T, hidden]. gate_up: [experts, 2 * inter, hidden]. down: [experts, hidden, inter]. weights: of ``route``.
    ids: of ``local_ids``. Returns [T, hidden] in x's dtype, zero where a row has no expert here.
    """
    count = gate_up.shape[0]
    # The last column takes what goes to no expert here, several times over: it is dropped.
    gates = weights.new_zeros((x.shape[0], count + 1)).scatter(1, ids, weights)[:, :count].unsqueeze(2)
    # One GEMM over all experts each way; the second one sums over them.
    hidden = swiglu(F.linear(x, gate_up.flatten(0, 1)).unflatten(1, gate_up.shape[:2])).float()
    # where, not a product alone: an expert that a row does not use may overflow on it
    weighted = torch.where(gates > 0, hidden * gates, 0.0).to(x.dtype)
    return F.linear(weighted.flatten(1), down.transpose(0, 1).flatten(1))


def experts_grouped(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """What ``experts_dense`` computes, by a grouped GEMM over the rows sorted by expert."""
    count, top = gate_up.shape[0], ids.shape[1]
    # What goes to no expert here sorts behind the last one, where no group reaches: the GEMM skips it.
    ordered, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(count, device=x.device)
    ends = torch.searchsorted(ordered, bounds, right=True, out_int32=True)
    rows = x.shape[0] * min(top, count)  # no row chooses an expert twice: the groups end before this
    hidden = swiglu(F.grouped_mm(x[order[:rows] // top], gate_up.transpose(1, 2), offs=ends))
    outputs = F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
    here = (ids < count).unsqueeze(2)
    per_choice = outputs[torch.where(here.flatten(), place, 0)].unflatten(0, (-1, top)).float()
    return torch.where(here, per_choice * weights.unsqueeze(2), 0.0).sum(dim=1).to(x.dtype)


def grouped_gemm_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the grouped GEMM runs here as one kernel: bfloat16 on compute capability 9.0 or later.

    Elsewhere PyTorch loops over the groups on the host, which cannot be captured.
    """
    return (
        device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] >= 9
    )


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
        grouped = grouped_gemm_serves(self.router.device, dtype)
        self.experts = experts_grouped if grouped else experts_dense

    def forward(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. valid: bool [T]; the other rows are routed to no expert. Returns [T, hidden]."""
        weights, ids = route(F.linear(x.float(), self.router), self.correction_bias, self.config)
        here = local_ids(ids, valid, self.first, self.count)
        routed = self.experts(x, self.gate_up_proj, self.down_proj, weights, here)
        return routed if self.shared is None else routed + self.shared(x, valid)
