"""Graphs launched by address, on a driver that only writes down what it is told."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from custom_ops import _driver
from sparse_pcg import graph_launch
from sparse_pcg.graph_launch import GraphLaunch
from sparse_pcg.plan import Plan
from sparse_pcg.split import CUT, PIECE


class Graph:
    """``torch.cuda.CUDAGraph`` as far as a launch knows it. random: what its replay does besides."""

    def __init__(self, machine: Machine, address: int, random: Callable[[], Any] | None = None) -> None:
        self.machine, self.address, self.random = machine, address, random

    def raw_cuda_graph_exec(self) -> int:
        return self.address

    def replay(self) -> None:
        if self.machine.capturing:
            raise RuntimeError("Cannot prepare for replay during capturing stage")
        if self.random is not None:
            self.random()
        self.machine.log.append(("torch", self.address))


class Older:
    """A graph of a PyTorch that does not give its executable away."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def replay(self) -> None:
        self.machine.log.append(("torch", 0))


class Machine:
    """device, stream: the current ones. codes: what launches answer, by address; each once."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.device, self.stream, self.offset, self.capturing = 0, 70, 0, False
        self.codes: dict[int, int] = {}

    def launch(self, address: int, stream: int) -> int:
        self.log.append((address, stream))
        return self.codes.pop(address, 0)

    def text(self, code: int, said: Any) -> int:
        said._obj.value = b"an illegal memory access was encountered"
        return 0

    def set_device(self, device: int) -> None:
        self.log.append(("set_device", device))

    @contextmanager
    def use(self, device: int) -> Any:
        before, self.device = self.device, device
        yield
        self.device = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    library = SimpleNamespace(cuGraphLaunch=made.launch, cuGetErrorString=made.text)
    monkeypatch.setattr(graph_launch, "driver", lambda: library)
    monkeypatch.setattr(_driver, "driver", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: made.stream + device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", made.use)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    generator = SimpleNamespace(get_offset=lambda: made.offset)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator, generator))
    return made


def plan_of(machine: Machine, *steps: Any) -> Plan:
    """Numbers are graphs at that address, text is a call that is written down; the first replay is done."""
    plan = Plan("cut")
    for step in steps:
        if isinstance(step, str):
            plan.add(lambda step=step: machine.log.append(step), f"cut {step}", CUT)
        elif isinstance(step, int):
            plan.add(GraphLaunch(Graph(machine, step), machine.device), f"piece {step}", PIECE)
        else:
            plan.add(step, "other", PIECE)
    plan.replay()
    return plan


def replayed(machine: Machine, plan: Plan) -> list[Any]:
    machine.log.clear()
    plan.replay()
    return machine.log


def test_graphs_are_launched_by_address_after_the_first_replay(machine: Machine) -> None:
    plan = plan_of(machine, "a", "b", 1, 2, "c", 3, 4, 5)
    assert machine.log == ["a", "b", ("torch", 1), ("torch", 2), "c", ("torch", 3), ("torch", 4), ("torch", 5)]
    assert replayed(machine, plan) == ["a", "b", (1, 70), (2, 70), "c", (3, 70), (4, 70), (5, 70)]
    machine.stream = 90
    assert replayed(machine, plan) == ["a", "b", (1, 90), (2, 90), "c", (3, 90), (4, 90), (5, 90)]


def test_a_step_that_is_added_runs(machine: Machine) -> None:
    plan = plan_of(machine, 1)
    plan.replay()
    plan.add(lambda: machine.log.append("late"), "late")
    assert replayed(machine, plan) == [(1, 70), "late"]
    plan.steps = plan.steps[1:]
    assert replayed(machine, plan) == ["late"]


def test_random_numbers_in_a_graph_leave_its_launch_to_torch(machine: Machine) -> None:
    def moves() -> None:
        machine.offset += 4

    state = torch.zeros(1)
    for random in (moves, lambda: state.fill_(machine.offset)):
        plan = plan_of(machine, 1, GraphLaunch(Graph(machine, 2, random), 0), "a")
        assert replayed(machine, plan) == [(1, 70), ("torch", 2), "a"]
        assert replayed(machine, plan) == [(1, 70), ("torch", 2), "a"]


def test_a_torch_that_keeps_its_executables(machine: Machine) -> None:
    plan = plan_of(machine, GraphLaunch(Older(machine), 0), "a")
    assert replayed(machine, plan) == [("torch", 0), "a"]


@pytest.mark.parametrize("address, label", [(1, "piece 1"), (2, "piece 2"), (3, "piece 3")])
def test_an_error_of_the_driver_names_the_graph(machine: Machine, address: int, label: str) -> None:
    plan = plan_of(machine, 1, "a", 2, 3, "b")
    machine.codes = {address: 700}
    with pytest.raises(_driver.CudaError, match="CUDA error 700: an illegal memory access") as caught:
        plan.replay()
    assert getattr(caught.value, "__notes__", [f"while replaying {label}"]) == [f"while replaying {label}"]
    assert replayed(machine, plan) == [(1, 70), "a", (2, 70), (3, 70), "b"]


def test_an_error_of_a_call_names_the_call(machine: Machine) -> None:
    plan = plan_of(machine, 1, "a", 2)

    def fails() -> None:
        raise ValueError("no")

    plan.add(fails, "cut fails", CUT)
    with pytest.raises(ValueError, match="no") as caught:
        plan.replay()
    assert getattr(caught.value, "__notes__", ["while replaying cut fails"]) == ["while replaying cut fails"]


def test_a_thread_that_has_not_used_cuda(machine: Machine) -> None:
    plan = plan_of(machine, 1, "a", 2)
    machine.codes = {1: _driver.INVALID_CONTEXT}
    assert replayed(machine, plan) == [(1, 70), ("set_device", 0), (1, 70), "a", (2, 70)]


def test_on_another_device_than_the_current_one(machine: Machine) -> None:
    machine.device = 1
    plan = plan_of(machine, 1, lambda: machine.log.append(machine.device))
    machine.device = 0
    assert replayed(machine, plan) == [(1, 71), 1]
    assert machine.device == 0


def test_inside_a_capture_torch_is_asked_and_refuses(machine: Machine) -> None:
    plan = plan_of(machine, "a", 1)
    machine.capturing = True
    machine.log.clear()
    with pytest.raises(RuntimeError, match="during capturing stage"):
        plan.replay()
    assert machine.log == ["a"]
    machine.capturing = False
    assert replayed(machine, plan) == ["a", (1, 70)]


def test_a_profiler_sees_the_launches(machine: Machine) -> None:
    plan = plan_of(machine, 1, "a")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        assert replayed(machine, plan) == [("torch", 1), "a"]
    assert [e.name for e in profiled.events()] == ["piece 1", "cut a"]
    assert replayed(machine, plan) == [(1, 70), "a"]


def test_a_dropped_plan_launches_nothing_and_holds_no_graph(machine: Machine) -> None:
    plan = plan_of(machine, 1, "a")
    plan.replay()
    launch = plan.steps[0]
    graph = weakref.ref(launch._graph)  # type: ignore[attr-defined]
    del launch
    plan.clear()
    assert replayed(machine, plan) == []
    gc.collect()
    assert graph() is None


def test_a_replay_under_way_keeps_the_graphs_that_it_launches(machine: Machine) -> None:
    plan = Plan("cut")
    graph = Graph(machine, 1)
    alive = weakref.ref(graph)
    plan.add(plan.clear, "drops the plan")
    plan.add(GraphLaunch(graph, 0), "piece", PIECE)
    plan.add(lambda: machine.log.append(alive() is not None), "asks")
    del graph
    plan.steps[1]()
    assert replayed(machine, plan) == [(1, 70), True]
    gc.collect()
    assert alive() is None
