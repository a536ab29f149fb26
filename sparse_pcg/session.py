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
