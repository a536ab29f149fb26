"""Piecewise CUDA graphs for DeepSeek-Sparse-Attention prefill, as a torch.compile backend.

Importing the package registers the operators (``torch.ops.sparse_pcg``) and nothing else.
"""

import custom_ops as _ops  # noqa: F401  (registers torch.ops.sparse_pcg)

from .backend import compile, freeze, reset
from .counters import Stats, stats
from .errors import CaptureError, FrozenError, OptionError, SparsePCGError
from .options import Options

__all__ = [
    "CaptureError",
    "FrozenError",
    "OptionError",
    "Options",
    "SparsePCGError",
    "Stats",
    "compile",
    "freeze",
    "reset",
    "stats",
]
__version__ = "0.1.0"
