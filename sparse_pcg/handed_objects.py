"""Streams and events in a Dynamo graph, which reads them by number from a table of the process.

Dynamo fills the table just before it calls what it compiled, and each function it compiles has numbers of its own. A
run past Dynamo (recording a plan, an uncaptured run) would find nothing there, or what is another function's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo import graph_bytecode_inputs as table


def drop_unread(graph: fx.Graph) -> None:
    """Take out objects that nothing reads: a model that only asks whether it has a stream leaves one in its graph."""
    for node in list(graph.nodes):
        if node.target is table.get_external_object_by_index and not node.users:
            graph.erase_node(node)


class HandedObjects:
    """What one graph reads from the table, as the last call through Dynamo left it there."""

    def __init__(self, graph: fx.Graph | None = None) -> None:
        self._read = graph is not None and any(_reads(node) for node in graph.nodes)
        self._kept: dict[int, Any] = {}
        self.keep()

    def keep(self) -> None:
        """Called where Dynamo has just filled the table: when the graph is compiled, and at each call."""
        if self._read:
            found = {number: reference() for number, reference in table.index_to_external_object_weakref.items()}
            self._kept = {number: value for number, value in found.items() if value is not None}

    def in_table(self) -> AbstractContextManager[None]:
        """Inside the block the table holds them."""
        return self._put() if self._kept else nullcontext()

    def around(self, steps: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """The same steps, each with the objects in the table; steps of a graph that reads none as they are."""
        return [partial(self._run, step) for step in steps] if self._kept else steps

    def _run(self, step: Callable[[], Any]) -> None:
        with self._put():
            step()

    @contextmanager
    def _put(self) -> Iterator[None]:
        objects = table.index_to_external_object_weakref
        before = dict(objects)
        objects.update({number: weakref.ref(value) for number, value in self._kept.items()})
        try:
            yield
        finally:
            objects.clear()
            objects.update(before)


def _reads(node: fx.Node) -> bool:
    return node.target is table.get_external_object_by_index or str(node.target).startswith(("streams.", "invoke_leaf"))
