"""Where the time of a replay goes: host and GPU time per step, a Chrome trace, NVTX ranges. No cost when off.

NVTX ranges are switched on by ``nvtx(True)``, or by SPARSE_PCG_NVTX=1 where the process is not one's own code.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function

from .plan import Plan

if TYPE_CHECKING:
    from .runner import PrefillRunner


@dataclass(frozen=True)
class StepCost:
    """One step of a plan.

    label: what it is, with the model's line. kind: "piece", "cut" or "live". host_us: time until the call returns.
    gpu_us: time on the GPU until the step after it could start; None without one. Medians.
    """

    label: str
    kind: str
    host_us: float
    gpu_us: float | None


def step_costs(plan: Plan, repeats: int = 20) -> list[StepCost]:
    """Time each step of ``plan`` over ``repeats`` replays: what a replay writes is written that often again.

    Call it under the context that a replay needs. Raises ValueError for repeats below 1, and the plan's own error if it
    could not be captured.
    """
    if repeats < 1:
        raise ValueError(f"step_costs: repeats must be at least 1, got {repeats}")
    on_gpu = any(isinstance(v, torch.Tensor) and v.is_cuda for v in plan.values)
    host: list[list[float]] = [[] for _ in plan.steps]
    gpu: list[list[float]] = [[] for _ in plan.steps]

    def timed(observed: Plan) -> None:
        for i, step in enumerate(observed.steps):
            start = time.perf_counter()
            step()
            host[i].append((time.perf_counter() - start) * 1e6)

    def timed_on_gpu(observed: Plan) -> None:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(observed.steps) + 1)]
        events[0].record()
        for step, event in zip(observed.steps, events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        for i, (before, after) in enumerate(itertools.pairwise(events)):
            gpu[i].append(before.elapsed_time(after) * 1000)

    if plan.failure is not None:
        raise plan.failure
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for _ in range(repeats):
            timed(plan)
            if on_gpu:
                torch.cuda.synchronize()
                timed_on_gpu(plan)
    return [
        StepCost(label, kind, statistics.median(h), statistics.median(g) if g else None)
        for label, kind, h, g in zip(plan.labels, plan.kinds, host, gpu, strict=True)
    ]


def runner_costs(
    runner: PrefillRunner, bucket: int | None = None, variant: str = "cut", repeats: int = 20
) -> list[StepCost]:
    """``step_costs`` of a captured bucket (default: the largest), on a dummy batch: only the dummy page is written.

    Raises ValueError for a bucket or variant that was not captured.
    """
    from .batch import dummy, fill
    from .graph_runner import no_grad, use_context

    sizes = runner.bucket_sizes()
    size = sizes[-1] if bucket is None and sizes else bucket
    if size not in sizes or variant not in runner.variants(size):
        raise ValueError(f"runner_costs: bucket, variant must be captured ones of {sizes}, got {bucket}, {variant!r}")
    with runner._lock, no_grad():
        batch, host = dummy(size, runner.device)
        fill(runner.metadata, batch, host, runner._staging)
        context = runner._context(runner.metadata)
        context.chosen = {}  # as in a replay
        with use_context(context):
            return step_costs(runner._buckets[size].plans[variant], repeats)


@contextmanager
def profile(path: Path | str) -> Iterator[torch.profiler.profile]:
    """Inside the block every replay names its plan and steps; at its end a Chrome trace is written to ``path``.

    Raises ValueError where the folder of ``path`` does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"profile: path must lie in a folder that exists, got {path}")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as prof, _observed(_named(record_function)):
        yield prof
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    prof.export_chrome_trace(str(path))


def nvtx(on: bool) -> None:
    """NVTX ranges around plans and their steps from now on, or none. Raises RuntimeError where torch has no CUDA."""
    if on:
        torch.cuda.nvtx.mark("sparse_pcg")
    Plan.observer = _named(torch.cuda.nvtx.range) if on else None


def _named(span: Callable[[str], AbstractContextManager[Any]]) -> Callable[[Plan], None]:
    def run(plan: Plan) -> None:
        with span(f"sparse_pcg {plan.name}"):
            for step, label in zip(plan.steps, plan.labels, strict=True):
                with span(label):
                    step()

    return run


@contextmanager
def _observed(observer: Callable[[Plan], None]) -> Iterator[None]:
    before = Plan.observer
    Plan.observer = observer
    try:
        yield
    finally:
        Plan.observer = before


def _from_environment() -> None:
    if os.environ.get("SPARSE_PCG_NVTX", "0") not in ("", "0"):
        nvtx(True)


_from_environment()
