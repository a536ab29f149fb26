"""A recorded prefill: SGLang's own segment capture, kept as one flat plan of graph launches and live calls.

The capture is SGLang's (its streams, its pool, its joining of side streams, of the installed release); what is recorded
is a ``Plan``: a segment that launched nothing is dropped, and a replay is a loop over bound calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from sparse_pcg.counters import COUNTS, LIVE
from sparse_pcg.errors import CaptureError
from sparse_pcg.graph_launch import GraphLaunch
from sparse_pcg.plan import Plan
from sparse_pcg.split import CUT, PIECE

from .layout import segmented
from .recording import replaced

_EMPTY = "The CUDA Graph is empty"


class _Breaks(list):  # type: ignore[type-arg]
    """Where SGLang's break decorator appends its live calls."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def append(self, call: Callable[[], Any]) -> None:
        self._plan.add(call, f"cut {self._plan.cuts}", CUT)
        self._plan.cuts += 1


class RecordedPrefill(segmented.BreakableCUDAGraph):
    """One bucket and variant; ``replay()`` as SGLang calls it. Counted among the live graphs."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.plan = Plan(variant)
        self._break_fns = _Breaks(self.plan)
        self._idle: list[Any] = []  # segments that launch nothing: a pool ends with its last graph, which one may be
        self._launches = True  # whether the segment that ended last does

    def _append_segment(self, graph: Any, needs_instantiate: bool = False) -> None:
        if not self._launches:
            self._idle.append(graph)
        else:
            if needs_instantiate:
                graph.instantiate()
            self.plan.add(GraphLaunch(graph, _device()), f"piece {self.plan.captures}", PIECE)
            self.plan.captures += 1

    def replay(self) -> None:
        token = segmented._current_stream_var.set(_device_module().current_stream())
        try:
            self.plan.replay()
        finally:
            segmented._current_stream_var.reset(token)

    # What the registry of live graphs asks for.

    @property
    def piece_count(self) -> int:
        """Graphs in it."""
        return self.plan.captures

    @property
    def cut_count(self) -> int:
        """Live calls in it."""
        return self.plan.cuts

    def pool_bytes(self) -> int:
        """The pool is SGLang's, and counted there."""
        return 0

    def drop(self) -> None:
        """Give the graphs back; it cannot be replayed any more."""
        self.plan.clear()
        self.plan.add(_dropped, "a dropped plan")
        self._idle.clear()
        LIVE.discard(self)


class _Capture(segmented.BreakableCUDAGraphCapture):  # type: ignore[misc]
    """SGLang's capture; of each segment it says whether it launches anything, of which PyTorch warns where it ends."""

    def _end_current_segment(self) -> None:
        segments = self.cuda_graph._segments  # where older releases put each as it begins
        graph = segments[-1] if segments else self._current_graph
        end = graph.capture_end

        def capture_end() -> None:
            with warnings.catch_warnings(record=True) as said:  # inside SGLang's own, which may ignore it
                warnings.simplefilter("always")
                end()
            self.cuda_graph._launches = not any(_EMPTY in str(w.message) for w in said)

        with replaced(graph, "capture_end", capture_end):
            super()._end_current_segment()
        if segments:
            self.cuda_graph._append_segment(segments.pop())


def _capture(recorded: RecordedPrefill, pool: Any, stream: Any, barrier: Callable[[], None] | None) -> Any:
    given = {"cuda_graph": recorded, "pool": pool, "stream": stream}
    if hasattr(segmented.BreakableCUDAGraph, "_append_segment"):
        given["barrier_fn"] = barrier
    return _Capture(**given)


def _device_module() -> Any:
    get = getattr(segmented, "get_device_module", None)
    return torch.cuda if get is None else get()


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _dropped() -> None:
    raise CaptureError("this prefill graph was dropped; restart the server or let SGLang capture again")


@contextmanager
def record_prefill(
    variant: str, *, pool: Any, stream: Any, barrier: Callable[[], None] | None
) -> Iterator[RecordedPrefill]:
    """Record what runs inside the block, cut at SGLang's breaks, into ``pool`` on ``stream``."""
    recorded = RecordedPrefill(variant)
    scope = pool_scope("capture")
    with scope(), _capture(recorded, pool, stream, barrier):
        yield recorded
    COUNTS.graphs += 1
    COUNTS.captures += recorded.plan.captures
    LIVE.add(recorded)


def pool_scope(use: str) -> Callable[[], Any]:
    """SGLang's context of a ``capture`` into its graph pool or a ``replay`` from it: what is free there is lent."""
    try:
        from sglang.srt.model_executor.runner_utils import pool
    except ImportError:  # before SGLang had one graph pool
        return nullcontext
    scope: Callable[[], Any] = getattr(pool, f"graph_pool_{use}_scope", nullcontext)
    return scope
