"""The table of cosines and sines that the RoPE operators read."""

from __future__ import annotations

import math

import torch

from .config import ModelConfig, Yarn


def _yarn_frequencies(frequencies: torch.Tensor, yarn: Yarn, dim: int, theta: float) -> torch.Tensor:
    def pair_turning(rotations: float) -> float:
        """The pair of dims that makes ``rotations`` turns over the original context."""
        return dim * math.log(yarn.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    slow = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - slow) + frequencies / yarn.factor * slow


def cos_sin_cache(config: ModelConfig, device: torch.device | str) -> torch.Tensor:
    """float32 [max_positions, 64]: row p holds the cosines of position p's 32 angles, then the sines."""
    dim = config.qk_rope_head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies, scale = config.rope_theta**-exponents, 1.0
    if config.yarn is not None:
        frequencies = _yarn_frequencies(frequencies, config.yarn, dim, config.rope_theta)
        scale = config.yarn.cos_sin_scale
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32, device=device), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * scale
