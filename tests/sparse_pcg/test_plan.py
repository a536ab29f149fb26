"""Recording: a capture that fails half-way, what names it; what a replay costs, step by step; traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparse_pcg
from sparse_pcg import graphs, profiling, session
from sparse_pcg.memory import Pool
from sparse_pcg.plan import Plan
from tests.sparse_pcg.agreement import graph_of, mixed
from tests.sparse_pcg.toys import same


class Model(nn.Module):
    """Counts its calls between its cuts, so that an effect that is lost or doubled shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            self.seen[i].add_(1)
            x = mixed(torch.relu(x) - i)
        return x + 1


class Failing(graphs.EmulatedDevice):
    """Refuses the capture number ``at``, before any effect as a CUDA graph does. ``op``: which op of it is at fault."""

    at, op, made = -1, "", 0

    def capture(
        self, fn: Callable[..., Sequence[Any]], args: Sequence[Any], pool: Pool
    ) -> tuple[Callable[[], Any], list[Any]]:
        Failing.made += 1
        if Failing.made - 1 == Failing.at:
            raise sparse_pcg.CaptureError("capture failed: the device refused")
        return super().capture(fn, args, pool)

    def refused(self, fn: Callable[..., Any], args: Sequence[Any], pool: Pool) -> bool:
        interpreter = fn.__self__  # type: ignore[attr-defined]
        for node in interpreter.module.graph.nodes:
            if Failing.op and Failing.op in str(node.target):
                node.target = _refuse  # what a device does that cannot capture this op
        try:
            fn(*[a.clone() for a in args])
        except sparse_pcg.CaptureError:
            return True
        return False


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise sparse_pcg.CaptureError("refused")


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> Iterator[None]:
    yield
    Failing.at, Failing.op = -1, ""


def data(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randint(-4, 4, (rows, 4), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_capture_that_fails_half_way_has_every_effect_once(at: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "EmulatedDevice", Failing)
    ours, theirs = Model(), Model()
    fn = sparse_pcg.compile(ours, capture_sizes=[4, 8], compiler="eager")
    calls = 0

    def call(rows: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        x = data(calls, rows)
        with torch.no_grad():
            got, want = fn(x), theirs(x)
        assert same(got, want) and same(ours.seen, theirs.seen)
        return got

    call(8)
    Failing.made, Failing.at = 0, at
    first = call(8)
    kept = first.clone()
    assert sparse_pcg.stats().captures == 0 and sparse_pcg.stats().fallbacks == {"capture_failed": 1}
    assert Failing.made == at + 1  # what comes after is not captured in vain
    call(8)
    assert sparse_pcg.stats().fallbacks == {"capture_failed": 2}  # it is not tried again
    with sparse_pcg.stats().expect(captures=4, replays=1, fallbacks={}):
        for _ in range(3):
            call(4)
    assert same(first, kept)
    sparse_pcg.reset()
    with sparse_pcg.stats().expect(captures=4, replays=1, fallbacks={}):
        for _ in range(3):
            call(8)


@pytest.mark.parametrize(("op", "named"), [("relu", True), ("", False)])
def test_the_error_names_piece_op_line_and_size(op: str, named: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "EmulatedDevice", Failing)
    fn = sparse_pcg.compile(Model(), capture_sizes=[8], compiler="eager")
    seen: list[Any] = []
    with session.watching(lambda graph, inputs, outputs: seen.extend((graph, inputs))):
        fn(data(0))
    graph, inputs = seen
    Failing.made, Failing.at, Failing.op = 0, 2, op
    with pytest.raises(sparse_pcg.CaptureError) as caught:
        graph.plan(inputs, label=", bucket 8")
    text = str(caught.value)
    assert "the device refused" in text and "in piece" in text and "bucket 8" in text
    assert "test_plan.py" in text and "self.seen[i].add_(1)" in text
    assert ("relu" in text and "torch.relu(x) - i" in text) is named


def test_the_steps_run_without_autograd_whatever_the_caller_is_in() -> None:
    plan, seen = Plan("cut"), []
    weight = torch.ones(2, requires_grad=True)
    plan.add(lambda: seen.append((torch.is_grad_enabled(), (weight * 2).requires_grad)), "a cut")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            plan.replay()
    assert seen == [(False, False)] * 3


def test_an_error_in_a_step_names_it() -> None:
    plan = Plan("cut")
    plan.add(lambda: None, "the first")
    plan.add(lambda: 1 // 0, "the second")
    before = sparse_pcg.stats().replays
    with pytest.raises(ZeroDivisionError) as caught:
        plan.replay()
    assert sparse_pcg.stats().replays == before
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["while replaying the second"]


def test_the_cost_of_each_step() -> None:
    model = Model()
    plan = sparse_pcg.record(model, data(0))
    before = model.seen.clone()
    costs = profiling.step_costs(plan, repeats=3)
    assert [c.kind for c in costs] == ["piece", "cut"] * 3 + ["piece"] == plan.kinds
    assert [c.label for c in costs] == plan.labels
    assert all(c.host_us > 0 and c.gpu_us is None for c in costs)
    assert same(model.seen, before + 3)  # each repeat is a replay
    with pytest.raises(ValueError, match="repeats"):
        profiling.step_costs(plan, repeats=0)


def test_a_trace_names_plan_and_steps(tmp_path: Path) -> None:
    plan = sparse_pcg.record(Model(), data(0))
    path = tmp_path / "trace.json"
    with profiling.profile(path):
        plan.replay()
    assert Plan.observer is None
    names = [e.get("name", "") for e in json.loads(path.read_text())["traceEvents"]]
    assert sum(n == "sparse_pcg cut" for n in names) >= 1
    assert all(label in names for label in plan.labels)
    plan.replay()
    with pytest.raises(ValueError, match="path"), profiling.profile(tmp_path / "no" / "trace.json"):
        pass


def test_an_observer_goes_also_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), profiling.profile(tmp_path / "trace.json"):
        raise KeyError
    assert Plan.observer is None


def test_memory_of_dead_values_is_used_again() -> None:
    """What no later step reads gives its memory to a later piece: a deep model's pool is no deeper than two layers'."""

    class Deep(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.layers):
                x = mixed(torch.relu(x) + 1)
            return x

    held = {}
    for layers in (4, 16):
        torch._dynamo.reset()
        fn = sparse_pcg.compile(Deep(layers), capture_sizes=[4096], compiler="eager")
        x = torch.ones(4096, 64)
        for _ in range(3):
            fn(x)
        held[layers] = graph_of(fn, x)._pool.nbytes  # type: ignore[union-attr]
        sparse_pcg.reset()
    assert held[16] == held[4]
