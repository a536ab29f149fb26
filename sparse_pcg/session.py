"""State of the process: whether captures are allowed, and who watches a call. Each is set and restored in one place."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Watcher = Callable[[Any, list[Any], list[Any]], None]


class _State:
    frozen = False


class _Local(threading.local):
    watcher: Watcher | None = None
    tokens: tuple[Any, int] | None = None


_state, _local = _State(), _Local()
RESETTABLE: weakref.WeakSet[Any] = weakref.WeakSet()  # what ``reset`` calls ``drop()`` on


def frozen() -> bool:
    """Whether ``freeze()`` was called since the last ``reset()``."""
    return _state.frozen


def set_frozen(value: bool) -> None:
    """Used by ``freeze`` and ``reset``."""
    _state.frozen = value


def watcher() -> Watcher | None:
    """Called, in this thread, with (graph, flat inputs, outputs) of each compiled graph that runs."""
    return _local.watcher


@contextmanager
def watching(callback: Watcher) -> Iterator[None]:
    """Inside the block, compiled graphs called in this thread run their general path and report to ``callback``."""
    before = _local.watcher
    _local.watcher = callback
    try:
        yield
    finally:
        _local.watcher = before


def tokens() -> tuple[Any, int] | None:
    """The argument, and the dim of it, that counts token rows in the call that this thread makes; None: not known."""
    return _local.tokens


@contextmanager
def counting_tokens(tensor: Any, dim: int) -> Iterator[None]:
    """Inside the block, what is compiled in this thread takes dim ``dim`` of ``tensor`` for the token dim."""
    before = _local.tokens
    _local.tokens = (tensor, dim)
    try:
        yield
    finally:
        _local.tokens = before
