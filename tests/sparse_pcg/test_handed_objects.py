"""Streams and events that a model holds: Dynamo hands them to its graph by number, in a table of the process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo import graph_bytecode_inputs as table

import sparse_pcg
from sparse_pcg import session
from sparse_pcg.compiled_graph import CompiledGraph
from sparse_pcg.handed_objects import HandedObjects

from . import toys

OPTIONS: Any = {"capture_sizes": [4], "compiler": "eager", "graphs": "emulate"}


class Asks(nn.Module):
    """Asks whether it has a stream, as models with a side stream do."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if self.held is None else x + 1
        out = torch.empty_like(y)
        torch.ops.toy.mix_into(y, out)
        return out + 1


@torch._dynamo.allow_in_graph
def marked(x: torch.Tensor, event: torch.Event) -> torch.Tensor:
    """Reads an event."""
    seen.append(event)
    return x + 1


seen: list[torch.Event] = []


class Reads(Asks):
    """Gives its event to an op of the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.mix_into(x, out)
        return marked(out, self.held) + 1


def compiled(model: nn.Module, x: torch.Tensor) -> tuple[Any, CompiledGraph, list[Any]]:
    """The model's compiled form, its graph and the flat inputs of a call."""
    run = torch.compile(model, backend=sparse_pcg.backend.OwnBackend(), fullgraph=True, dynamic=False, options=OPTIONS)
    found: list[tuple[CompiledGraph, list[Any]]] = []
    with session.watching(lambda graph, inputs, outputs: found.append((graph, inputs))):
        run(x)
    return run, *found[0]


def past_dynamo(graph: CompiledGraph, inputs: list[Any]) -> list[torch.Tensor]:
    """The results of an uncaptured run, of a plan's recording and of its replay."""
    plan = graph.plan(inputs)
    assert plan is not None
    results = [graph.program.run(inputs)[0].clone(), plan.outputs[0].clone()]
    plan.replay()
    return [*results, plan.outputs[0].clone()]


def test_a_stream_that_is_only_asked_for_is_no_part_of_the_graph() -> None:
    model, x = Asks(torch.Event()), torch.randn(4, 8)
    _, graph, inputs = compiled(model, x)
    table.reset_user_object_tracking()  # as Dynamo does where it compiles something else
    assert all(toys.same(got, model(x)) for got in past_dynamo(graph, inputs))
    assert not any("external_object" in name for s in graph.segments for name in s.ops)


def test_a_run_past_dynamo_finds_the_objects_of_its_own_graph() -> None:
    ours, others, x = torch.Event(), torch.Event(), torch.randn(4, 8)
    model = Reads(ours)
    _, graph, inputs = compiled(model, x)
    for between in (lambda: torch.compile(Reads(others), backend="eager")(x), table.reset_user_object_tracking):
        between()
        before = dict(table.index_to_external_object_weakref)
        seen.clear()
        results = past_dynamo(graph, inputs)
        assert seen and all(event is ours for event in seen)
        assert table.index_to_external_object_weakref == before  # the other function's, again
        assert all(toys.same(got, model(x)) for got in results)


def test_a_call_through_dynamo_brings_its_own_objects() -> None:
    first, second, x = torch.Event(), torch.Event(), torch.randn(4, 8)
    model = Reads(first)
    run, graph, inputs = compiled(model, x)
    model.held = second  # guarded by its type alone
    seen.clear()
    with session.watching(lambda *_: None):
        run(x)
    assert seen and all(event is second for event in seen)
    table.reset_user_object_tracking()
    seen.clear()
    graph.program.run(inputs)
    assert seen and all(event is second for event in seen)


def test_objects_that_the_graph_does_not_read_are_not_kept() -> None:
    ours, others = torch.Event(), torch.Event()
    for number, event in enumerate((others, ours, others)):
        table.index_to_external_object_weakref[number] = weakref.ref(event)
    graph = fx.Graph()
    value = graph.call_function(table.get_external_object_by_index, (1,))
    graph.output((graph.call_function(marked, (graph.placeholder("x"), value)),))
    handed = HandedObjects(graph)
    assert handed._kept == {1: ours}
    gone = weakref.ref(others)
    del event, others
    gc.collect()
    assert gone() is None
    table.reset_user_object_tracking()
    with handed.in_table():
        assert table.get_external_object_by_index(1) is ours
        table.index_to_external_object_weakref[7] = weakref.ref(ours)  # another thread's call, meanwhile
    assert list(table.index_to_external_object_weakref) == [7]


def test_of_a_leaf_function_all_objects_are_kept() -> None:
    leaf = pytest.importorskip("torch._higher_order_ops.invoke_leaf_function").invoke_leaf_function
    first, second = torch.Event(), torch.Event()
    for number, event in enumerate((first, second)):
        table.index_to_external_object_weakref[number] = weakref.ref(event)
    graph = fx.Graph()
    graph.output((graph.call_function(leaf, (graph.placeholder("x"),)),))
    assert HandedObjects(graph)._kept == {0: first, 1: second}


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
