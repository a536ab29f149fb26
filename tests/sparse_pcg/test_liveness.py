"""A rank, or a store, that is lost is noticed; a run that waits for it ends the process, others go on.

Ranks are threads here. What processes and signals do is in test_rank_faults.py.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from sparse_pcg import RankError, liveness
from sparse_pcg.collectives import Ranks

from .rank_threads import QUICK, Group, make_group, outcome, quick  # noqa: F401


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
    threading.Thread(target=outcome, args=(lambda r: r.same("compiling", {}), ranks[1]), daemon=True).start()
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


def test_the_thread_that_judges_breaks_no_capture_and_asks_only_about_work_under_way(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
            assert mode._obj.value == 2
            asked.append(f"relaxed {threading.current_thread().name}")

    class Event:
        done = False

        def record(self, stream: Any) -> None:
            self.done = False

        def query(self) -> bool:
            if (name := threading.current_thread().name).startswith("sparse_pcg "):
                asked.append(f"query {name}")
            return self.done

    monkeypatch.setattr(liveness, "driver", Driver)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    watch = group(2).ranks[0].watch
    for turn in range(2):
        watch.enter("a replay")
        watch.leave(torch.device("cuda"))
        time.sleep(0.1)
        assert "query sparse_pcg _judge" in asked
        watch._event.done = True
        time.sleep(0.1)
        if turn == 0:
            assert asked[0] == "relaxed sparse_pcg _judge" and len([a for a in asked if "relaxed" in a]) == 1
        asked.clear()
        time.sleep(0.1)
        assert asked == [], "work that is done is not asked about"


def test_who_asks_a_store_that_went_silent_with_a_rank_that_left_ends() -> None:
    store, ends = Breaking(True), [[], []]  # type: ignore[var-annotated]
    ranks = [Ranks(store, i, ["rank 0", "rank 1"], QUICK, ends[i].append) for i in range(2)]
    ranks[0].close("ValueError: too long")
    store.broken.set()
    time.sleep(QUICK + 0.3)
    assert ranks[1].watch.lost is None and ends == [[], []], "nobody asks: no loss"
    threading.Thread(target=outcome, args=(lambda r: r.same("compiling", {}), ranks[1]), daemon=True).start()
    time.sleep(0.5)
    assert ends == [[], ["rank 1 ends: compiling waits in vain: rank 0 left: ValueError: too long"]]


def test_what_was_printed_gets_out_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    status: list[int] = []
    out, raw = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(liveness.os, "_exit", status.append)
    monkeypatch.setattr(liveness.logging, "shutdown", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw))
    print("a result")
    liveness._end_process("rank 1 ends")
    assert status == [1] and out.getvalue() == b"a result\n" and raw.getvalue() == b"sparse_pcg: rank 1 ends\n"
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    liveness._end_process("rank 1 ends")
    assert status == [1, 1]
