"""CUDA graphs on a CPU, for SGLang's capture code: a tape of the ops that ran, run again on the same tensors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CAPTURES: list[FakeGraph] = []
BODIES: dict[str, Callable[..., Any]] = {}  # the Python bodies of SGLang's ops, by name


class _Tape(TorchDispatchMode):
    """Writes the ops that run to the graph being captured. One for all graphs: a graph may end inside an op's body."""

    graph: FakeGraph | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "sglang":
            with self:
                return BODIES[func._opname](*args, **kwargs)
        result = func(*args, **kwargs)
        inputs = {_pointer(a) for a in pytree.tree_leaves((args, kwargs)) if _holds(a)}
        kept = pytree.tree_leaves(result)
        fresh = [i for i, r in enumerate(kept) if _holds(r) and _pointer(r) not in inputs]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if (fresh and not _empty(func)) or writes:

            def again() -> None:
                new = pytree.tree_leaves(func(*args, **kwargs))
                for i in fresh:
                    kept[i].copy_(new[i])

            assert self.graph is not None
            self.graph.tape.append(again)
        return result


_tape = _Tape()


def capturing() -> bool:
    """Whether what runs goes to a graph."""
    return _tape.graph is not None


class FakeGraph:
    """``torch.cuda.CUDAGraph`` as SGLang uses it. pool: what the capture was given."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: list[Callable[[], None]] = []
        self.replays = 0
        self.pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.pool = pool
        _tape.graph = self
        _tape.__enter__()

    def capture_end(self) -> None:
        _tape.__exit__(None, None, None)
        _tape.graph = None
        CAPTURES.append(self)
        if not self.tape:
            warnings.warn("The CUDA Graph is empty.", stacklevel=1)

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        self.replays += 1
        for call in self.tape:
            call()


def _holds(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _pointer(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _empty(func: Any) -> bool:
    return func in (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default,
                    torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default)  # fmt: skip


@contextmanager
def capture(graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """``torch.cuda.graph``."""
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()


_handles = itertools.count(8)


class _Stream:
    stream_id = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def device_module() -> Any:
    """What SGLang asks ``get_device_module()`` for while it captures and replays."""
    stream = _Stream()
    return SimpleNamespace(
        CUDAGraph=FakeGraph,
        Stream=_Stream,
        current_stream=lambda device=None: stream,
        stream=lambda given: given,
        synchronize=lambda: None,
        graph_pool_handle=lambda: (0, next(_handles)),
    )


class TorchOf:
    """``torch`` as a runner of SGLang sees it; Dynamo needs the real one."""

    def __init__(self, device_module: Any) -> None:
        self.get_device_module = lambda device: device_module

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
