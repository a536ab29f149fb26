"""Streams and events in a Dynamo graph, which reads them by number from a table of the process.

Dynamo fills the table just before it calls what it compiled, and each function it compiles has numbers of its own. A
run past Dynamo (recording a plan, an uncaptured run) would find nothing there, or what is another function's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo import graph_bytecode_inputs as table
from torch.utils import _pytree as pytree


def drop_unread(graph: fx.Graph) -> None:
    """Take out objects that nothing reads: a model that only asks whether it has a stream leaves one in its graph."""
    for node in list(graph.nodes):
        if node.target is table.get_external_object_by_index and not node.users:
            graph.erase_node(node)


_lock = threading.Lock()  # around each change of the table, which all threads share


class HandedObjects:
    """What one graph reads from the table, as the last call through Dynamo left it there."""

    def __init__(self, graph: fx.Graph | None = None) -> None:
        reading = [node for node in graph.nodes if _reads(node)] if graph is not None else []
        self._read = bool(reading)
        # A leaf function's modules are numbered where no argument of its node shows it.
        hidden = any(str(node.target).startswith("invoke_leaf") for node in reading)
        self._numbers = None if hidden else {n for node in reading for n in _integers(node)}
        self._kept: dict[int, Any] = {}
        self.keep()

    def keep(self) -> None:
        """Called where Dynamo has just filled the table: when the graph is compiled, and at each call."""
        if self._read:
            with _lock:
                found = {number: reference() for number, reference in table.index_to_external_object_weakref.items()}
            wanted = found if self._numbers is None else self._numbers & set(found)
            self._kept = {number: value for number in wanted if (value := found[number]) is not None}

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
        ours = {number: weakref.ref(value) for number, value in self._kept.items()}
        # Not held for the block: a step may wait for a thread that is about to swap.
        with _lock:
            before = {number: objects[number] for number in ours if number in objects}
            objects.update(ours)
        try:
            yield
        finally:
            with _lock:
                for number in ours:
                    objects.pop(number, None)
                objects.update(before)


def _integers(node: fx.Node) -> list[int]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if type(leaf) is int]


def _reads(node: fx.Node) -> bool:
    return node.target is table.get_external_object_by_index or str(node.target).startswith(("streams.", "invoke_leaf"))
