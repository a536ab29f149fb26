"""Random weights: the same for a whole model and, part by part, for the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .sharding import Cut, Rank

_STEP = 1 << 28  # elements of a whole tensor that exist at one time


@torch.no_grad()
def draw_weights(
    module: nn.Module,
    num_layers: int,
    seed: int,
    rank: Rank | None = None,
    whole: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Draw all parameters of ``module`` so that activations keep their size over ``num_layers`` layers.

    rank, whole: the parameters are that rank's part of ones with the shapes in ``whole``, by name: they become that
    part of what a model with these would be given.
    """
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    # two residual branches a layer: their sum over the depth has about the size of one embedding
    branch_scale = (2 * num_layers) ** -0.5
    for name, parameter in module.named_parameters():
        kind = name.rsplit(".", 1)[-1]
        shape = tuple((parameter if whole is None else whole[name]).shape)
        mean, std = 0.0, 1.0
        if kind.endswith("bias"):
            std = 0.1
        elif kind.endswith("norm"):
            mean, std = 1.0, 0.1
        elif kind != "embed_tokens":
            fan_in = shape[1 if kind == "w_vc" else -1]
            std = fan_in**-0.5 * (branch_scale if kind in ("o_proj", "down_proj") else 1.0)
        _draw(parameter, shape, mean, std, generator, (rank or Rank()).cut(kind, shape, parameter.shape))


def _draw(
    parameter: torch.Tensor, shape: Sequence[int], mean: float, std: float, generator: torch.Generator, cut: Cut
) -> None:
    """Fill ``parameter`` with its part of a normal tensor of ``shape``, some rows of which are drawn at a time."""
    row = max(1, torch.Size(shape[1:]).numel())
    for start in range(0, shape[0], max(1, _STEP // row)):
        stop = min(start + max(1, _STEP // row), shape[0])
        drawn = parameter.new_empty((stop - start, *shape[1:])).normal_(mean, std, generator=generator)
        for first, at in cut.places:
            if cut.dim:
                held = parameter[start:stop].narrow(cut.dim, at, cut.size)
                held.copy_(drawn.narrow(cut.dim, first, cut.size))
                continue
            low, high = max(first, start), min(first + cut.size, stop)
            if low < high:
                parameter[at + low - first : at + high - first] = drawn[low - start : high - start]
