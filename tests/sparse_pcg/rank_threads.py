"""Ranks that are threads of one process, with quick heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sparse_pcg import liveness
from sparse_pcg.collectives import Ranks

QUICK = 0.4  # a time-out


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats and graces that take no time."""
    monkeypatch.setattr(liveness, "BEAT", 0.02)
    monkeypatch.setattr(liveness, "GRACE", 0.2)


class Group:
    """``size`` ranks on one store; what would have ended each one's process is kept in ``ends``."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.store = torch.distributed.HashStore()
        self.ends: list[list[str]] = [[] for _ in range(size)]
        names = [f"rank {i}" for i in range(size)]
        self.ranks = [Ranks(self.store, i, names, timeout, self.ends[i].append) for i in range(size)]

    def each(self, *calls: Callable[[Ranks], Any]) -> list[Any]:
        """What each rank's call returns, or raises; the last call is that of all further ranks."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            padded = [*calls, *[calls[-1]] * (len(self.ranks) - len(calls))]
            return list(pool.map(outcome, padded, self.ranks))

    def close(self) -> None:
        for ranks in self.ranks:
            ranks.watch._stop.set()


def outcome(call: Callable[[Ranks], Any], ranks: Ranks) -> Any:
    try:
        return call(ranks)
    except Exception as error:
        return error


@pytest.fixture(name="group")
def make_group() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(size: int, timeout: float = 20.0) -> Group:
        made.append(Group(size, timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Watched:
    """In place of the ranks of a runner or graph: keeps what runs it was around, and where."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, torch.device | None]] = []
        self.inside = False

    @contextmanager
    def running(self, what: str, device: torch.device | None) -> Iterator[None]:
        """As that of ``Ranks``."""
        self.runs.append((what, device))
        self.inside = True
        yield
        self.inside = False
