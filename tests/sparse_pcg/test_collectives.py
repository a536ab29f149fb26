"""Ranks that agree through a store; one that differs, fails or is silent is named by the others.

Ranks are threads here. What processes, signals and a store that ends do is in test_rank_faults.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import fx

from sparse_pcg import CaptureError, RankError, collectives, liveness
from sparse_pcg.collectives import Ranks, Together, group_of, groups_of
from sparse_pcg.graphs import EmulatedDevice

QUICK = 0.4  # a time-out


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
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
            return list(pool.map(_outcome, padded, self.ranks))

    def close(self) -> None:
        for ranks in self.ranks:
            ranks.watch._stop.set()


def _outcome(call: Callable[[Ranks], Any], ranks: Ranks) -> Any:
    try:
        return call(ranks)
    except Exception as error:
        return error


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(size: int, timeout: float = 20.0) -> Group:
        made.append(Group(size, timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()


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


def test_a_rank_without_a_sign_of_life_is_lost(group: Callable[..., Group]) -> None:
    one = group(2, QUICK)
    one.each(lambda r: r.same("x", {}))
    one.ranks[1].watch._stop.set()  # its thread stops counting
    time.sleep(2.5 * QUICK)
    with pytest.raises(RankError, match=rf"rank 1 has shown no sign of life for {QUICK} s; this is rank 0"):
        one.ranks[0].same("x", {})
    assert one.ends == [[], []], "nothing was under way: the process does not end"


def test_a_process_that_is_gone_is_noticed_before_its_silence(group: Callable[..., Group]) -> None:
    one = group(2)  # time-out 20 s
    one.each(lambda r: r.same("x", {}))
    one.ranks[1].watch._stop.set()
    time.sleep(0.1)
    gone = one.ranks[1].watch._state() | {"start": "another process had this number", "pid": 1}
    one.store.set("alive/1", json.dumps(gone))
    time.sleep(0.3)
    with pytest.raises(RankError, match=r"rank 1 has ended \(its process 1 is gone\)"):
        one.ranks[0].vote("a capture", None)


class Breaking:
    """A store until ``broken``; then it raises, or answers no more."""

    def __init__(self, hang: bool) -> None:
        self._store, self._hang, self.broken = torch.distributed.HashStore(), hang, threading.Event()

    def clone(self) -> Breaking:
        return self

    def __getattr__(self, name: str) -> Any:
        if self.broken.is_set():
            if self._hang:
                threading.Event().wait(5)
            raise RuntimeError("Connection reset by peer\nand a stack")
        return getattr(self._store, name)


@pytest.mark.parametrize("hang", [False, True])
def test_a_store_that_ends_ends_the_run_under_way(hang: bool) -> None:
    store, ends = Breaking(hang), [[], []]  # type: ignore[var-annotated]
    ranks = [Ranks(store, i, ["rank 0", "rank 1"], QUICK, ends[i].append) for i in range(2)]
    try:
        with ranks[1].running("a replay", None):
            time.sleep(0.1)
            store.broken.set()
            time.sleep(QUICK + 0.6)
        why = "has not answered for" if hang else r"is gone, with the process that kept it \(Connection reset by peer\)"
        with pytest.raises(RankError, match=f"the store of the ranks {why}"), ranks[1].running("a replay", None):
            pass
        assert ends[0] == [] and len(ends[1]) == 1
        assert ends[1][0].startswith("rank 1 ends: run 1 (a replay) waits in vain: the store of the ranks")
    finally:
        for one in ranks:
            one.watch._stop.set()


# --- runs ---


def test_a_run_that_waits_for_a_rank_that_left_or_failed_ends_the_process(group: Callable[..., Group]) -> None:
    one = group(3)

    def fails(ranks: Ranks) -> None:
        with ranks.running("a replay", None):
            raise ValueError("too many rows\nand more")

    def waits(ranks: Ranks) -> None:
        with ranks.running("a replay", None):
            deadline = time.monotonic() + 5
            while not one.ends[ranks.index] and time.monotonic() < deadline:
                time.sleep(0.02)

    assert isinstance(one.each(waits, fails, waits)[1], ValueError)
    for index in (0, 2):
        expected = f"rank {index} ends: run 1 (a replay) waits in vain: rank 1 failed in it: ValueError: too many rows"
        assert one.ends[index] == [expected]
    assert one.ends[1] == []


def test_a_failure_that_all_ranks_share_ends_nothing(group: Callable[..., Group]) -> None:
    one = group(2)

    def fails(ranks: Ranks) -> None:
        with ranks.running("a replay", None):
            time.sleep(0.1)
            raise ValueError("too many rows")

    assert all(isinstance(o, ValueError) for o in one.each(fails))
    time.sleep(0.5)
    assert one.ends == [[], []]

    def runs(ranks: Ranks) -> str:
        with ranks.running("a replay", None):
            time.sleep(0.6)
        return "done"

    assert one.each(runs) == ["done", "done"], "a later run has nothing to do with it"


def test_a_collective_that_breaks_names_the_rank_that_left(group: Callable[..., Group]) -> None:
    one = group(2)

    def broken(ranks: Ranks) -> None:
        with ranks.running("a replay of cut, bucket 64", None):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    def own(ranks: Ranks) -> None:
        with ranks.running("a replay", None):
            raise RuntimeError("shapes do not fit")

    began = time.monotonic()
    assert str(one.each(own, lambda r: None)[0]) == "shapes do not fit"
    assert time.monotonic() - began < 0.15, "an error of the model's own is not held up"
    outcomes = one.each(broken, lambda r: r.close())
    assert str(outcomes[0]) == "a replay of cut, bucket 64: rank 1 left"
    assert isinstance(outcomes[0].__cause__, RuntimeError)


def test_a_run_that_does_not_come_back_is_given_up(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "STUCK", 2)
    one = group(2, QUICK)
    with one.ranks[0].running("a replay", None):
        time.sleep(2 * QUICK + 0.6)
    assert one.ends[0] == ["rank 0 ends: run 1 (a replay) waits in vain: not back after 0.8 s (rank 1 in run 0)"]


@pytest.mark.parametrize("lag", [0.1, float("inf")])
def test_a_gpu_that_is_behind_is_not_one_that_hangs(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, lag: float
) -> None:
    """Each run begins before the GPU has done the one before; only a GPU that gets nothing done is given up."""

    class Event:
        done = 0.0

        def record(self, stream: Any) -> None:
            self.done = time.monotonic() + lag

        def query(self) -> bool:
            return time.monotonic() >= self.done

    monkeypatch.setattr(liveness, "STUCK", 2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    one = group(2, QUICK)
    until = time.monotonic() + 2 * QUICK + 0.8
    while time.monotonic() < until:
        with one.ranks[0].running("a replay", torch.device("cuda")):
            time.sleep(0.02)
    assert len(one.ends[0]) == (lag > 1)


def test_leaving_waits_until_the_others_have_read_it(group: Callable[..., Group]) -> None:
    """The store may end with the process that leaves: what the others know of it must be that it left."""
    one = group(2)
    one.each(lambda r: r.same("x", {}))
    one.ranks[0].close()
    assert one.ranks[1].watch._seen[0][0]["left"]
    with one.ranks[1].running("of this rank alone", None):
        pass
    assert one.ends == [[], []]


def test_a_store_that_ends_with_a_rank_that_left_is_no_loss() -> None:
    store, ends = Breaking(False), [[], []]  # type: ignore[var-annotated]
    ranks = [Ranks(store, i, ["rank 0", "rank 1"], QUICK, ends[i].append) for i in range(2)]
    try:
        ranks[0].close()
        store.broken.set()
        time.sleep(2 * QUICK)
        assert ranks[1].watch.lost is None and ends == [[], []]
        with pytest.raises(RankError, match="a capture: rank 0 left"):
            ranks[1].vote("a capture", None)
    finally:
        ranks[1].watch._stop.set()


def test_who_leaves_does_not_wait_for_a_store_that_answers_no_more() -> None:
    store = Breaking(True)
    ranks = [Ranks(store, i, ["rank 0", "rank 1"], QUICK) for i in range(2)]
    store.broken.set()
    time.sleep(0.1)
    began = time.monotonic()
    ranks[0].close()
    assert time.monotonic() - began < 1
    ranks[1].watch._stop.set()


def test_who_asks_a_store_that_answers_no_more_ends() -> None:
    store, ends = Breaking(True), [[], []]  # type: ignore[var-annotated]
    ranks = [Ranks(store, i, ["rank 0", "rank 1"], QUICK, ends[i].append) for i in range(2)]
    store.broken.set()
    threading.Thread(target=_outcome, args=(lambda r: r.same("compiling", {}), ranks[1]), daemon=True).start()
    time.sleep(QUICK + 0.6)
    expected = f"rank 1 ends: compiling waits in vain: the store of the ranks has not answered for {QUICK} s"
    assert ends == [[], [f"{expected}; this is rank 1"]]
    for one in ranks:
        one.watch._stop.set()


def test_who_waits_for_a_key_shows_signs_of_life() -> None:
    """A connection to a store does one thing at a time: process groups wait on theirs while they form."""
    served = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [
        torch.distributed.PrefixStore("ranks", torch.distributed.TCPStore("127.0.0.1", served.port, is_master=False))
        for _ in range(2)
    ]
    ranks = [Ranks(store, i, ["rank 0", "rank 1"], QUICK) for i, store in enumerate(stores)]
    try:
        with pytest.raises(torch.distributed.DistStoreError):
            stores[0].wait(["never"], timedelta(seconds=4 * QUICK))
        assert [one.watch.lost for one in ranks] == [None, None]
    finally:
        for one in ranks:
            one.close()


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
            found.append(_outcome(lambda _: device.capture(lambda t: [t.add_(1)], (x,), pool)[1][0].tolist(), ranks))
        return found

    outcomes = one.each(captures)
    for index, (first, second, third) in enumerate(outcomes):
        assert first == [1, 1] and third == [2, 2], "the one that failed had no effect on any rank"
        assert isinstance(second, CaptureError)
        assert str(second) == "not captured on any rank, since it failed on one: rank 1: capture failed: no memory"
        assert devices[index].launched == 2


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


def test_a_group_that_is_formed_anew_finds_no_messages_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Formed:
        group_name = "formed anew"

        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 0

    store, of = torch.distributed.HashStore(), torch.distributed.distributed_c10d
    monkeypatch.setattr(of, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(collectives.atexit, "register", lambda *args: None)
    found = []
    for _ in range(2):
        group = Formed()
        monkeypatch.setattr(of, "_resolve_process_group", lambda name, group=group: group)
        ranks = collectives.ranks_of(_graph("a"))
        assert ranks is not None and ranks is collectives.ranks_of(_graph("a"))
        found.append(ranks._store.check(["0/1"]))
        ranks._store.set("0/1", "of another run")
        ranks.watch._stop.set()
    assert found == [False, False]


def test_the_time_out_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(collectives.ENV, raising=False)
    assert collectives.timeout_from_env() == 30
    monkeypatch.setenv(collectives.ENV, "2.5")
    assert collectives.timeout_from_env() == 2.5
    for bad in ("0", "-1", "soon", "inf", "nan", ""):
        monkeypatch.setenv(collectives.ENV, bad)
        with pytest.raises(ValueError, match=f"{collectives.ENV}: must be a positive number of seconds, got '{bad}'"):
            collectives.timeout_from_env()


def test_the_thread_that_captures_looks_at_no_event(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA calls the capture off for it."""
    by: set[str] = set()

    class Event:
        def query(self, stream: Any = None) -> bool:
            by.add(threading.current_thread().name)
            return True

        record = query

    def run(ranks: Ranks) -> None:
        ranks.watch._event = ranks.watch._mark = Event()
        with ranks.running("a run", torch.device("cuda")):
            pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for capturing in (False, True):
        by.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        both = group(2)
        assert both.each(run, run) == [None, None]
        callers = {name for name in by if not name.startswith("sparse_pcg ")}
        assert bool(callers) is not capturing
