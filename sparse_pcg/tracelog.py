"""The split graph as an artifact of PyTorch's structured trace (``TORCH_TRACE=folder``, read with tlparse)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch._logging import trace_structured

from .counters import logger

if TYPE_CHECKING:
    from .pieces import Distinct
    from .split import Segment


def trace_split(segments: list[Segment], distinct: list[Distinct | None], seconds: float) -> None:
    """Log one split graph: a line under ``sparse_pcg``, and the artifact "sparse_pcg_split" where a trace is on."""
    kinds = [s.kind for s in segments]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    logger.info("split a graph into %s in %.1f s", counts, seconds)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "sparse_pcg_split", "encoding": "json"},
        payload_fn=lambda: json.dumps([_entry(s, d) for s, d in zip(segments, distinct, strict=True)], indent=1),
    )


def _entry(segment: Segment, compiled: Distinct | None) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "distinct": compiled.number if compiled is not None else None,
        "why": segment.why,
        "source": segment.source,
        "ops": segment.ops,
        "inputs": [n.name for n in segment.inputs],
        "outputs": [n.name for n in segment.outputs],
    }
