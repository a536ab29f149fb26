"""Names of SGLang that moved between releases, each under one name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_EXECUTOR = "sglang.srt.model_executor"
_BEFORE_BACKENDS = "sglang.srt.compilation.piecewise_context_manager"  # up to 0.5.13.post1


def _first(*names: str) -> Any:
    """The first of the modules that this release has."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise  # the module is there, and lacks something itself
    raise ModuleNotFoundError(f"SGLang has none of {', '.join(names)}")


# Graphs of segments with live calls between them, and the decorator that makes a call live.
segmented = _first(
    f"{_EXECUTOR}.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
    f"{_EXECUTOR}.breakable_cuda_graph.breakable_cuda_graph",
)
eager_on_graph: Callable[..., Any] = segmented.eager_on_graph

_phase = _first("sglang.srt.compilation.compile_phase", _BEFORE_BACKENDS)
_context = _first(f"{_EXECUTOR}.runner_backend_utils.tc_piecewise_cuda_graph", _BEFORE_BACKENDS)


# The stream that SGLang captures on, inside its capture session; else None.
capture_stream: Callable[[], Any] = _phase.get_pcg_capture_stream
# Whether SGLang runs its model only to compile it.
warms_up: Callable[[], bool] = getattr(_phase, "is_in_torch_compile_warmup", None) or _phase.is_in_pcg_torch_compile
_context_of: Callable[[], Any] = (
    getattr(_context, "get_tc_piecewise_forward_context", None) or _context.get_forward_context
)


def running_batch() -> Any:
    """The batch of the prefill under way, as SGLang's breaks read it."""
    return _context_of().forward_batch


def most_padding() -> int | None:
    """How many times a batch's rows a bucket may have; None where this release takes the next bucket, however large."""
    try:
        runner = import_module(f"{_EXECUTOR}.runner.prefill_cuda_graph_runner")
    except ModuleNotFoundError:
        return None
    factor: int | None = getattr(runner, "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR", None)
    return factor
