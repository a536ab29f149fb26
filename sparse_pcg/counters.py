"""Counts of what the backend did, exact enough for tests to assert on, and the registry of live graphs."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger("sparse_pcg")


class LiveGraph(Protocol):
    """What a split graph tells the registry."""

    @property
    def piece_count(self) -> int: ...

    @property
    def cut_count(self) -> int: ...

    def pool_bytes(self) -> int: ...

    def drop(self) -> None: ...


@dataclass(frozen=True)
class Stats:
    """A snapshot.

    graphs: FX graphs received from Dynamo, or recorded. pieces, cuts: over all live graphs. unique_pieces: compiled.
    captures: pieces x buckets x variants captured. replays: plan runs. fallbacks: calls that left the captured graphs,
    by reason. pool_bytes: bytes held by graph pools.
    """

    graphs: int = 0
    pieces: int = 0
    cuts: int = 0
    unique_pieces: int = 0
    captures: int = 0
    replays: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    pool_bytes: int = 0

    @contextmanager
    def expect(self, **deltas: Any) -> Iterator[None]:
        """Raise AssertionError unless, over the block, each named counter grew by exactly the given amount.

        ``fallbacks`` takes a dict; reasons it does not name must not grow.
        """
        unknown = set(deltas) - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise ValueError(
                f"expect: no counter {sorted(unknown)}, there are {[f.name for f in dataclasses.fields(self)]}"
            )
        before = stats()
        yield
        after = stats()
        wrong = {}
        for name, want in deltas.items():
            old, new = getattr(before, name), getattr(after, name)
            if name == "fallbacks":
                grown: Any = dict(Counter(new) - Counter(old))
            else:
                grown = new - old
            if grown != want:
                wrong[name] = f"expected {want}, got {grown}"
        if wrong:
            raise AssertionError(f"counters: {wrong}")


@dataclass
class _Counts:
    graphs: int = 0
    unique_pieces: int = 0
    captures: int = 0
    replays: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)


COUNTS = _Counts()
LIVE: weakref.WeakSet[LiveGraph] = weakref.WeakSet()
_said: set[str] = set()


def stats() -> Stats:
    """The counters now."""
    live = list(LIVE)
    return Stats(
        graphs=COUNTS.graphs,
        pieces=sum(g.piece_count for g in live),
        cuts=sum(g.cut_count for g in live),
        unique_pieces=COUNTS.unique_pieces,
        captures=COUNTS.captures,
        replays=COUNTS.replays,
        fallbacks=dict(COUNTS.fallbacks),
        pool_bytes=sum(g.pool_bytes() for g in live),
    )


def count_fallback(reason: str, detail: str) -> None:
    """Count a call that left the captured graphs; the first of each reason is logged."""
    COUNTS.fallbacks[reason] += 1
    say_once(f"fallback:{reason}", "not replayed (%s): %s", reason, detail)


def say_once(key: str, message: str, *args: Any) -> None:
    """Log a warning the first time ``key`` is seen since the last ``reset``."""
    if key not in _said:
        _said.add(key)
        logger.warning(message, *args)


def clear() -> None:
    """Zero all counters (part of ``reset``)."""
    global COUNTS
    COUNTS.__init__()  # type: ignore[misc]
    _said.clear()
