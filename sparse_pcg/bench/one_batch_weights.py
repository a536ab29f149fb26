"""Invented weights by which every token of the context reaches the last token's logits.

SGLang's own dummy weights lie within 1e-3: what attention adds is rounded away, and logits would agree whatever a
prefill does to its context.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn

# What a layer adds to the stream: more, and 20 layers would turn each rounding into another choice of experts.
_ADDED = {"o_proj": 0.25, "down_proj": 0.25, "w2_weight": 0.25}
# Standard deviation of attention's scores: a few keys get most of the weight, as in a trained model.
_SHARP = {"q_b_proj": 3.0}


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Fill the floating-point parameters in place: the same in every process, whatever was drawn before.

    Matrices keep the scale of what they multiply (uniform, variance 1 / fan-in), queries are larger and what a layer
    adds smaller, embeddings have variance 1, gains are 1 and biases small. Raises ValueError for a quantised parameter:
    its scales would not fit.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.element_size() < 2:
            raise ValueError(f"weights: only models that are not quantised get invented ones, got {name}")
        if parameter.dim() < 2 and "bias" not in name:
            parameter.fill_(1.0)
            continue
        if parameter.dim() < 2:
            bound = 0.02
        elif "embed" in name:
            bound = math.sqrt(3)
        else:
            scale = next((v for part, v in (_ADDED | _SHARP).items() if part in name), 1.0)
            bound = scale * math.sqrt(3 / parameter.shape[-1])
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.uniform_(-bound, bound, generator=generator)
