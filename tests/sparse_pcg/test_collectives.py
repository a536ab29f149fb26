"""Ranks that agree through a store; one that differs, fails or is silent is named by the others.

Ranks are threads here; how one is found lost is in test_liveness.py, what processes and signals do in
test_rank_faults.py.
"""

from __future__ import annotations

import atexit
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from sparse_pcg import CaptureError, RankError, collectives
from sparse_pcg.collectives import Ranks, Together, group_of, groups_of
from sparse_pcg.graphs import EmulatedDevice
from sparse_pcg.memory import Pool

from .rank_threads import QUICK, Group, make_group, outcome, quick  # noqa: F401


def _texts(outcomes: list[Any]) -> list[str]:
    assert all(isinstance(o, RankError) for o in outcomes), outcomes
    return [str(o) for o in outcomes]


# --- agreement ---


@pytest.mark.parametrize("size", [2, 3, 5])
def test_equal_facts_pass_and_leave_no_keys_behind(group: Callable[..., Group], size: int) -> None:
    one = group(size)
    for i in range(6):
        assert one.each(lambda ranks, i=i: ranks.same(f"step {i}", {"rows": 64, "sizes": (1, 2)})) == [None] * size
    time.sleep(0.1)
    assert one.store.num_keys() <= 3 * size, "a message that all have read is deleted"


def test_a_difference_names_the_rank_and_what_differs_on_every_rank(group: Callable[..., Group]) -> None:
    one = group(3)
    with_64 = lambda ranks: ranks.same("compiling", {"options": 1, "capture_sizes": (32, 64)})  # noqa: E731
    with_128 = lambda ranks: ranks.same("compiling", {"options": 1, "capture_sizes": (32, 128)})  # noqa: E731
    texts = _texts(one.each(with_64, with_128, with_64))
    for text in (texts[0], texts[2]):
        assert "rank 1 differs in capture_sizes: it has (32, 128)" in text and "(32, 64)" in text
    assert "rank 0 differs in capture_sizes: it has (32, 64), rank 1 (32, 128)" in texts[1]
    # A fact that only one of them has.
    texts = _texts(
        one.each(
            lambda r: r.same("x", {"a": 1}), lambda r: r.same("x", {"a": 1, "b": 2}), lambda r: r.same("x", {"a": 1})
        )
    )
    assert all("differs in b" in text for text in texts)
    assert one.each(with_64) == [None] * 3, "ranks go on after a refusal"


def test_ranks_that_do_different_things_are_told_which(group: Callable[..., Group]) -> None:
    one = group(2)
    texts = _texts(one.each(lambda r: r.same("the capture of cut, bucket 64", {}), lambda r: r.vote("a capture", None)))
    assert texts[0] == "rank 1 is at 'a capture', rank 0 at 'the capture of cut, bucket 64'"
    assert texts[1] == "rank 0 is at 'the capture of cut, bucket 64', rank 1 at 'a capture'"


def test_one_failure_is_every_ranks(group: Callable[..., Group]) -> None:
    one = group(3)
    assert one.each(lambda r: r.vote("a capture", None)) == [None] * 3
    found = one.each(
        lambda r: r.vote("a capture", None),
        lambda r: r.vote("a capture", None),
        lambda r: r.vote("a capture", "no memory"),
    )
    assert found == ["rank 2: no memory"] * 3


def test_ranks_may_come_at_different_times(group: Callable[..., Group]) -> None:
    one = group(2)

    def late(ranks: Ranks) -> None:
        time.sleep(0.3)
        ranks.same("x", {})

    assert one.each(lambda r: r.same("x", {}), late) == [None, None]


# --- ranks that do not answer ---


def test_a_silent_rank_is_named_in_time(group: Callable[..., Group]) -> None:
    """It lives, but does not come; when it comes later it is not taken in by the message that the others left."""
    one = group(3, QUICK)
    began = time.monotonic()
    first = one.each(lambda r: r.same("x", {}), lambda r: r.same("x", {}), lambda r: "away")
    assert QUICK <= time.monotonic() - began < QUICK + 1
    assert first[2] == "away"
    for index in (0, 1):
        assert str(first[index]) == f"x: nothing from rank 2 in time; rank {index} gives up"
    with pytest.raises(RankError, match="rank 0 gave up: x: nothing from rank 2 in time"):
        one.ranks[2].same("x", {})


def test_patience_waits_longer(group: Callable[..., Group]) -> None:
    one = group(2, QUICK)

    def late(ranks: Ranks) -> None:
        time.sleep(2 * QUICK)
        ranks.same("x", {}, patience=4)

    assert one.each(lambda r: r.same("x", {}, patience=4), late) == [None, None]


def test_a_rank_that_failed_before_it_came_is_named_with_its_error(group: Callable[..., Group]) -> None:
    one = group(2)
    outcomes = one.each(lambda r: r.withdraw("compiling", KeyError("no such op")), lambda r: r.same("compiling", {}))
    assert outcomes[0] is None
    assert str(outcomes[1]) == "compiling: rank 0 gave up: 'no such op'"


def test_a_rank_that_left_is_named_at_once(group: Callable[..., Group]) -> None:
    one = group(2)
    outcomes = one.each(lambda r: r.close("ValueError: too long"), lambda r: r.same("x", {}))
    assert str(outcomes[1]) == "x: rank 0 left: ValueError: too long"


# --- captures ---


class Refusing(EmulatedDevice):
    """Refuses the captures whose numbers are in ``at``."""

    def __init__(self, at: tuple[int, ...] = ()) -> None:
        self.at, self.made, self.launched = at, 0, 0

    def capture(self, fn: Any, args: Any, pool: Any, ready: Any = None) -> Any:
        self.made += 1
        if self.made in self.at:
            raise CaptureError("capture failed: no memory")
        result = super().capture(fn, args, pool, ready)
        self.launched += 1
        return result


def test_a_capture_takes_effect_on_all_ranks_or_on_none(group: Callable[..., Group]) -> None:
    one = group(3)
    devices = [Refusing(), Refusing((2,)), Refusing()]

    def captures(ranks: Ranks) -> list[Any]:
        device = Together(devices[ranks.index], ranks)
        pool, x, found = device.new_pool(), torch.zeros(2), []
        for _ in range(3):
            found.append(outcome(lambda _: device.capture(lambda t: [t.add_(1)], (x,), pool)[1][0].tolist(), ranks))
        return found

    outcomes = one.each(captures)
    for index, (first, second, third) in enumerate(outcomes):
        assert first == [1, 1] and third == [2, 2], "the one that failed had no effect on any rank"
        assert isinstance(second, CaptureError)
        assert str(second) == "not captured on any rank, since it failed on one: rank 1: capture failed: no memory"
        assert devices[index].launched == 2


class Interrupted(EmulatedDevice):
    def capture(self, fn: Any, args: Any, pool: Pool, ready: Any = None) -> Any:
        raise KeyboardInterrupt("by hand")


def test_a_rank_that_is_interrupted_in_a_capture_lets_nobody_wait(group: Callable[..., Group]) -> None:
    one = group(2)  # time-out 20 s

    def interrupted(ranks: Ranks) -> str:
        device = Together(Interrupted(), ranks)
        with pytest.raises(KeyboardInterrupt):
            device.capture(list, (), device.new_pool())
        return "interrupted"

    def captures(ranks: Ranks) -> None:
        device = Together(EmulatedDevice(), ranks)
        device.capture(list, (), device.new_pool())

    began = time.monotonic()
    first, second = one.each(interrupted, captures)
    assert first == "interrupted"
    assert isinstance(second, RankError) and str(second) == "a capture: rank 0 gave up: by hand"
    assert time.monotonic() - began < 5


# --- what a graph says of its groups ---


def _graph(*names: str) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in names:
        reduce: Any = torch.ops._c10d_functional.all_reduce
        value = graph.call_function(reduce.default if name == "a" else reduce, (value, "sum", name))
        value = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (value,))
    graph.output((graph.call_function(torch.relu, (value,)),))
    return graph


def test_the_groups_of_a_graph() -> None:
    assert groups_of(_graph()) == []
    assert groups_of(_graph("a", "b", "a")) == ["a", "b"]
    assert [group_of(n) for n in _graph("a").nodes] == [None, "a", None, None, None]
    assert collectives.ranks_of(_graph()) is None


class Formed:
    """A process group of two ranks, as far as it is looked at."""

    group_name = "formed anew"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.fixture(name="form")
def make_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Formed]]:
    store, of = torch.distributed.HashStore(), torch.distributed.distributed_c10d
    monkeypatch.setattr(of, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(collectives, "_known", weakref.WeakKeyDictionary())

    def form() -> Formed:
        formed = weakref.ref(group := Formed())
        monkeypatch.setattr(of, "_resolve_process_group", lambda name: formed())
        return group

    yield form
    atexit.unregister(collectives._leave_at_exit)


def test_a_group_that_is_formed_anew_finds_no_messages_of_the_one_before(form: Callable[[], Formed]) -> None:
    found = []
    for _ in range(2):
        group = form()
        ranks = collectives.ranks_of(_graph("a"))
        assert ranks is not None and ranks is collectives.ranks_of(_graph("a"))
        found.append(ranks._store.check(["0/1"]))
        ranks._store.set("0/1", "of another run")
        ranks.watch._stop.set()
        del group
    assert found == [False, False]


def test_the_watch_ends_with_its_process_group(form: Callable[[], Formed]) -> None:
    before = set(threading.enumerate())
    groups = [form()]
    ranks = collectives.ranks_of(_graph("a"))
    assert ranks is not None and len(set(threading.enumerate()) - before) == 2
    groups.clear()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
    assert json.loads(ranks._store.get("alive/0"))["left"], "the others are told"
    alive = weakref.ref(ranks)
    del ranks
    gc.collect()
    assert alive() is None, "nothing holds it until the process ends"


def test_the_time_out_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(collectives.ENV, raising=False)
    assert collectives.timeout_from_env() == 30
    monkeypatch.setenv(collectives.ENV, "2.5")
    assert collectives.timeout_from_env() == 2.5
    for bad in ("0", "-1", "soon", "inf", "nan", ""):
        monkeypatch.setenv(collectives.ENV, bad)
        with pytest.raises(ValueError, match=f"{collectives.ENV}: must be a positive number of seconds, got '{bad}'"):
            collectives.timeout_from_env()
