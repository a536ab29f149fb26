"""Which ranks of a process group are still there, and the end of a run that waits for one that is not.

A collective inside a CUDA graph waits for all ranks on the GPU, where no time-out of the process group applies. So each
rank counts upwards in the store from a thread of its own and looks at the others' counts. The process of a rank on this
machine is looked up besides: that it ended is known at once. A rank that is lost makes every further use raise; a run
that is under way and waits for it ends the process.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from custom_ops._driver import driver

from .errors import RankError, first_line

BEAT = 0.5  # seconds between two heartbeats
GRACE = 3.0  # seconds that a run has to return on its own once a rank it may wait for is in trouble
STUCK = 20  # a run that has not come back within so many time-outs is given up though every rank is there

logger = logging.getLogger("sparse_pcg")


class Watch:
    """One rank's view of the others.

    store: a ``torch.distributed.Store`` of the group's own. index: this rank's number in it. names: of each rank, for
    messages. timeout: seconds after which a rank that shows no sign of life is lost. end: called in place of ending the
    process, with the message.

    lost: the message of the first rank that was found lost; ``check`` raises it.
    asking: what this rank asks the store about just now, or nothing: a store that is silent holds it up like a run.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        names: Sequence[str],
        timeout: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._index, self._names, self._timeout = store, index, names, timeout
        self._end = end or _end_process
        self._others = [i for i in range(len(names)) if i != index]
        self.lost: str | None = None
        self.asking = ""
        self._note = ""  # of this rank: why it left, or what failed
        self._failed_run = -1
        self._leaving = False
        self._run, self._what, self._depth = 0, "", 0
        self._began = 0.0  # when the last run did
        self._since = 0.0  # when the run did that is under way, or on the GPU an earlier one whose work is
        self._event: Any = None  # done when the last run's work on the GPU is
        self._recorded = self._done = 0  # how often that was recorded, and which of those is known to be done
        self._mark: Any = None  # done when the work of the run is that began at ``_since``: a GPU may never catch up
        self._relaxed = False  # whether the thread that judges leaves captures alone
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._answered = time.monotonic()  # when the store last answered
        self._blamed: tuple[str, float] | None = None  # why the run under way waits in vain, since when
        self._stop, self._wake = threading.Event(), threading.Event()
        self._beats_so_far = self._beats_done = 0
        self._beat()  # who comes to an agreement has shown a sign of life before
        self._threads = [
            threading.Thread(target=target, name=f"sparse_pcg {target.__name__}", daemon=True)
            for target in (self._beats, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    # What this rank does.

    def check(self) -> None:
        """Raises RankError if a rank is lost."""
        if self.lost is not None:
            raise RankError(self.lost)

    def trouble(self, rank: int) -> str | None:
        """Why rank number ``rank`` will not answer, or None."""
        if self.lost is not None:
            return self.lost
        state = self._seen.get(rank, ({}, 0.0))[0]
        return f"{self._names[rank]} left{_because(state)}" if state.get("left") else None

    def enter(self, what: str) -> bool:
        """A run begins that waits for the other ranks; runs nest. Returns whether it is the outermost."""
        if self._depth == 0:
            self.check()
            self._run += 1
            self._what = what
            self._began = time.monotonic()
            # An event that is looked at inside a capture breaks it.
            if _in_capture() or not _under_way_on_gpu(self._mark):
                self._since = self._began
        self._depth += 1
        return self._depth == 1

    def leave(self, device: torch.device | None) -> None:
        """The run has returned. device: where its work may still be under way; None: nowhere."""
        cuda = device is not None and device.type == "cuda"
        if self._depth == 1 and cuda and not _in_capture():
            if self._event is None:
                self._event, self._mark = torch.cuda.Event(), torch.cuda.Event()
            stream = torch.cuda.current_stream(device)
            if not _under_way_on_gpu(self._mark):
                self._since = self._began
                self._mark.record(stream)
            self._event.record(stream)
            self._recorded += 1  # after it: what is found done before that is an earlier run's
        self._depth -= 1

    def failed(self, reason: str) -> None:
        """The run that is under way has failed on this rank: others that wait for it are told."""
        self._note, self._failed_run = reason, self._run
        self._tell()

    def explain(self, error: BaseException) -> str | None:
        """Which rank's loss made a collective raise ``error``; None: no rank is in trouble, or it is no such error."""
        text = str(error).lower()
        if isinstance(error, torch.distributed.DistError) or "gloo" in text or "nccl" in text:
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and not self._stop.is_set():
                found = [why for rank in self._others if (why := self.trouble(rank))]
                if found:
                    return found[0]
                time.sleep(BEAT / 10)
        return None

    def close(self, reason: str = "") -> None:
        """Leave: the others are told, and have a moment to read it (the store may end with this process)."""
        if self._stop.is_set():
            return
        self._note = reason or self._note
        self._leaving = True
        self._tell()
        before = {rank: self._seen[rank][0].get("beat", 0) for rank in self._others if rank in self._seen}
        deadline = time.monotonic() + 4 * BEAT
        while time.monotonic() < deadline and self.lost is None:
            states = {rank: self._seen[rank][0] for rank in before}
            if all(s.get("left") or s.get("beat", 0) >= before[rank] + 2 for rank, s in states.items()):
                break
            time.sleep(BEAT / 10)
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * BEAT)

    def _tell(self) -> None:
        """Show the state as it is now; no longer than a moment, since a store may not answer any more."""
        before, deadline = self._beats_so_far, time.monotonic() + 4 * BEAT
        self._wake.set()
        while self._beats_done <= before and time.monotonic() < deadline and not self._stop.is_set():
            time.sleep(BEAT / 50)

    # The thread that talks to the store.

    def _beats(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(BEAT)
            self._wake.clear()
            if not self._stop.is_set():
                self._beat()

    def _beat(self) -> None:
        """Show a sign of life, and look for the others'."""
        try:
            self._store.set(f"alive/{self._index}", json.dumps(self._state()))
            # Who was there has a key for good; to get one that is not there would wait for it.
            there = [r for r in self._others if r in self._seen or self._store.check([f"alive/{r}"])]
            texts = self._store.multi_get([f"alive/{rank}" for rank in there]) if there else []
            for rank, state in zip(there, map(json.loads, texts), strict=True):
                if rank not in self._seen or self._seen[rank][0] != state:
                    self._seen[rank] = state, time.monotonic()
            self._answered = time.monotonic()
        except RuntimeError as error:
            # Whoever keeps the store leaves with a word first: that it ends then is no loss.
            if not self._stop.is_set() and not self._who_left():
                self._lose(f"the store of the ranks is gone, with the process that kept it ({first_line(error)})")
                self._stop.wait(BEAT)
        finally:
            self._beats_done = self._beats_so_far

    def _state(self) -> dict[str, Any]:
        self._beats_so_far += 1
        return {
            "beat": self._beats_so_far,
            "run": self._run,
            "failed": self._failed_run,
            "note": self._note,
            "left": self._leaving,
            "machine": _MACHINE,
            "pid": os.getpid(),
            "start": _start_of(os.getpid()),
        }

    # The thread that judges; it talks to nobody, so nothing holds it up.

    def _judge(self) -> None:
        while not self._stop.wait(BEAT / 2):
            now = time.monotonic()
            if self._is_silent(now) and not self._who_left():
                self._lose(f"the store of the ranks has not answered for {self._timeout:g} s")
            for rank, (state, changed) in list(self._seen.items()):
                if state["left"]:
                    continue
                if state["machine"] == _MACHINE and _start_of(state["pid"]) != state["start"]:
                    self._lose(f"{self._names[rank]} has ended (its process {state['pid']} is gone)")
                elif self._answered - changed > self._timeout:
                    self._lose(f"{self._names[rank]} has shown no sign of life for {self._timeout:g} s")
            self._end_if_in_vain(now)

    def _is_silent(self, now: float) -> bool:
        return now - self._answered > self._timeout

    def _who_left(self) -> str | None:
        return next((self.trouble(rank) for rank, (state, _) in list(self._seen.items()) if state.get("left")), None)

    def _lose(self, why: str) -> None:
        if self.lost is None and not self._leaving:
            self.lost = f"{why}; this is {self._names[self._index]}"
            logger.error("%s", self.lost)

    def _end_if_in_vain(self, now: float) -> None:
        what = f"run {self._run} ({self._what})" if self._under_way() else self.asking
        why = None
        if what:
            why = self._no_answer(now) if what == self.asking else self._in_vain(now)
        if why is None:
            self._blamed = None
            return
        if self._blamed is None:
            self._blamed = why, now
        if now - self._blamed[1] > GRACE:
            self._stop.set()
            self._end(f"{self._names[self._index]} ends: {what} waits in vain: {why}")

    def _no_answer(self, now: float) -> str | None:
        """Why what this rank asks the store about will not be answered."""
        # That a store ends with a rank that left is no loss, but nobody answers then either.
        return self.lost or (self._who_left() if self._is_silent(now) else None)

    def _in_vain(self, now: float) -> str | None:
        """Why the run under way will not come back."""
        if self.lost is not None:
            return self.lost
        for rank in self._others:
            state = self._seen.get(rank, ({}, 0.0))[0]
            if state.get("left"):
                return self.trouble(rank)
            if state.get("failed", -1) == self._run != self._failed_run:
                return f"{self._names[rank]} failed in it{_because(state)}"
        if now - self._since > STUCK * self._timeout:
            runs = ", ".join(f"{self._names[r]} in run {s['run']}" for r, (s, _) in sorted(self._seen.items()))
            return f"not back after {STUCK * self._timeout:g} s ({runs})"
        return None

    def _under_way(self) -> bool:
        if self._depth > 0:
            return True
        recorded = self._recorded
        if self._done == recorded:
            return False  # CUDA is asked only while there is something to learn
        if not self._relaxed:
            self._relaxed = True
            _leave_captures_alone()
        if _under_way_on_gpu(self._event):
            return True
        self._done = recorded
        return False


def _under_way_on_gpu(event: Any) -> bool:
    """Whether what lies before ``event`` is; a GPU in an error does nothing any more, and the caller meets it."""
    try:
        return event is not None and not event.query()
    except RuntimeError:
        return False


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def _leave_captures_alone() -> None:
    """What this thread asks CUDA from now on breaks no capture of another one, in torch's default mode either.

    To be called once CUDA is in use.
    """
    with suppress(OSError):  # no NVIDIA driver: no such captures
        mode = ctypes.c_int(_RELAXED)
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _in_capture() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _because(state: dict[str, Any]) -> str:
    return f": {state['note']}" if state.get("note") else ""


def _machine() -> str:
    """Names the set of processes that this one can look up; empty where there is no way to."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty if it has ended (or nobody can tell)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


_MACHINE = _machine()


def _end_process(message: str) -> None:
    """The main thread waits for a GPU that waits for a rank: only the process as a whole can end."""
    with suppress(Exception):  # a closed stream must not keep the process
        print(f"sparse_pcg: {message}", file=sys.stderr)
    with suppress(Exception):
        logging.shutdown()
    leave_process(1)


def leave_process(status: int) -> NoReturn:
    """End the process at once, past all that an end in order would wait for; what it has printed gets out."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)
