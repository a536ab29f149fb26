"""Ranks as forks of one process that has imported everything: an interpreter of its own would cost each seconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

LIMIT = 240  # seconds until ranks that hang are killed


def run_ranks(
    size: int,
    folder: Path,
    body: Callable[[int], None],
    environment: Mapping[str, str],
    wanted: int | None = None,
) -> list[tuple[int, float]]:
    """Run ``body(rank)`` in ``size`` processes; per rank its exit status and when it ended.

    Their output goes to ``out0``, ``err0`` and so on in folder. wanted: once as many have ended, the others are killed.
    In a child this does not return: the process ends as one does whose main module is through.
    """
    sys.stdout.flush()
    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            for stream, kind in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{kind}{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
            os.environ.update(environment)
            body(rank)
            sys.exit()
        ranks[pid] = rank
    ends: dict[int, tuple[int, float]] = {}

    def kill(*_: int | FrameType | None) -> None:
        for pid in [p for p, rank in ranks.items() if rank not in ends]:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(LIMIT)
    while len(ends) < size:
        pid, status = os.wait()
        ends[ranks[pid]] = os.waitstatus_to_exitcode(status), time.time()
        if len(ends) == wanted:
            kill()
    signal.alarm(0)
    return [ends[rank] for rank in range(size)]


def free_port() -> int:
    """One on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
