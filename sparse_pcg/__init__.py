"""Piecewise CUDA graphs for DeepSeek-Sparse-Attention prefill, as a torch.compile backend.

Importing the package registers the operators (``torch.ops.sparse_pcg``).
"""

import custom_ops as _ops  # noqa: F401  (registers the operators)

from .backend import compile, freeze, reset
from .batch import Batch
from .counters import Stats, stats
from .drafting import DraftRunner
from .errors import CaptureError, FrozenError, OptionError, RankError, SparsePCGError
from .gates import Deployment, Gate
from .generation import generate
from .hazards import Finding, check
from .options import Options
from .plan import Plan
from .recording import record
from .report import Report, explain
from .runner import PrefillOutput, PrefillRunner

__all__ = [
    "Batch",
    "CaptureError",
    "Deployment",
    "DraftRunner",
    "Finding",
    "FrozenError",
    "Gate",
    "OptionError",
    "Options",
    "Plan",
    "PrefillOutput",
    "PrefillRunner",
    "RankError",
    "Report",
    "SparsePCGError",
    "Stats",
    "check",
    "compile",
    "explain",
    "freeze",
    "generate",
    "record",
    "reset",
    "stats",
]
__version__ = "0.1.0"
