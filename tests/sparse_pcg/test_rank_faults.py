"""Processes that share a model over gloo: lists that differ, a capture that fails, ranks that are killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 150  # seconds until a rank that hangs is killed


@dataclass
class Ended:
    """One rank: its exit status, what it said and when it ended. steps: what it said, by its name."""

    status: int
    steps: dict[str, dict[str, Any]]
    errors: str
    at: float


def run(scenario: str, size: int, init: str, folder: Path, timeout: float) -> list[Ended]:
    """Run every rank; those that another has been stopped for are killed once the others have ended."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "SPARSE_PCG_RANK_TIMEOUT": str(timeout)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (folder / "cache").mkdir()
    command = [sys.executable, "-m", "tests.sparse_pcg.rank_worker", scenario]
    outputs = [[(folder / f"{kind}{rank}").open("w+") for kind in ("out", "err")] for rank in range(size)]
    processes = [
        subprocess.Popen([*command, str(rank), str(size), init], cwd=ROOT, env=environment, stdout=out, stderr=err)
        for rank, (out, err) in enumerate(outputs)
    ]
    ends: dict[int, float] = {}
    deadline = time.monotonic() + LIMIT
    try:
        while len(ends) < size and time.monotonic() < deadline:
            ends |= {r: time.time() for r, p in enumerate(processes) if r not in ends and p.poll() is not None}
            if len(ends) == size - 1 and scenario == "stopped":
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for rank, (out, err) in enumerate(outputs):
        for file in (out, err):
            file.seek(0)
        steps = {fact["step"]: fact for fact in map(json.loads, out)}
        found.append(Ended(processes[rank].returncode, steps, err.read(), ends.get(rank, float("inf"))))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    folder = tmp_path_factory.mktemp("two")
    return run("faults", 2, f"file://{folder}/store", folder, timeout=20)


def test_processes_that_compile_at_once_share_a_cache_or_have_their_own(two: list[Ended]) -> None:
    """At first neither knows its rank: both compile one piece into one empty directory. Later each has its own."""
    assert [rank.steps["compiled"]["close"] for rank in two] == [True, True]
    assert {Path(rank.steps["compiled"]["cache"]).name for rank in two} == {"sparse_pcg-x-rank0"}
    assert [Path(rank.steps["began"]["cache"]).name for rank in two] == ["sparse_pcg-x-rank0", "sparse_pcg-x-rank1"]


def test_lists_of_buckets_that_differ_are_refused_by_every_rank(two: list[Ended]) -> None:
    texts = [rank.steps["differ"]["error"].partition("\n")[0] for rank in two]
    start = "RankError: compiling: "
    assert texts[0] == f"{start}rank 1 differs in capture_sizes: it has (8, 32), rank 0 (8, 16)"
    assert texts[1] == f"{start}rank 0 differs in capture_sizes: it has (8, 16), rank 1 (8, 32)"
    assert [rank.steps["differ"]["captures"] for rank in two] == [0, 0]


def test_a_capture_that_fails_on_one_rank_is_dropped_by_all(two: list[Ended]) -> None:
    """That bucket runs uncaptured on both, the others are replayed; one line says whose failure it was, and which."""
    for rank in two:
        found = rank.steps["failing"]
        assert found["variants"] == {"8": ["cut", "short"], "16": ["short"]}
        assert [(rows, bucket, alike) for rows, bucket, alike, _ in found["served"]] == [
            (12, None, True),
            (6, 8, True),
            (14, None, True),
        ]
        assert found["fallbacks"] == {"capture_failed": 3}  # one when it failed, one a batch
        assert len(found["log"]) == 1
        assert "bucket 16, variant cut" in found["log"][0]
        assert "failed on one: rank 1: capture failed: out of memory" in found["log"][0]
    assert two[0].steps["failing"]["served"] == two[1].steps["failing"]["served"], "all ranks have the whole result"


def test_batches_that_differ_are_refused_under_debug_checks(two: list[Ended]) -> None:
    assert two[0].steps["batches"]["error"] == "RankError: a batch: rank 1 differs in rows: it has 7, rank 0 6"
    assert two[1].steps["batches"]["error"] == "RankError: a batch: rank 0 differs in rows: it has 6, rank 1 7"


def test_the_selection_of_the_first_rank_is_broadcast(two: list[Ended]) -> None:
    first, second = (rank.steps["selections"] for rank in two)
    assert first["own"] != second["own"]
    assert first["broadcast"] == second["broadcast"] == first["own"]


def test_a_rank_that_is_killed_ends_the_other_in_seconds(two: list[Ended]) -> None:
    assert two[1].status == -signal.SIGKILL and "killed" in two[1].steps
    assert two[0].status == 1 and "survived" not in two[0].steps
    assert two[0].at - two[1].steps["killed"]["time"] < 10
    assert "RankError: a replay of short, bucket 8: rank 1 has ended (its process" in two[0].errors, two[0].errors


def _address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_a_rank_that_is_stopped_ends_the_others_in_seconds(tmp_path: Path, size: int) -> None:
    """It is there, and holds its connections: only that it shows no sign of life tells."""
    *others, last = run("stopped", size, _address(), tmp_path, timeout=2)
    for index, rank in enumerate(others):
        assert rank.status == 1 and "survived" not in rank.steps, rank.errors
        assert rank.at - last.steps["stopped"]["time"] < 12
        assert f"sparse_pcg: rank {index} ends: run 4 (a replay of cut, size" in rank.errors
        assert f"rank {size - 1} has shown no sign of life for 2 s" in rank.errors


@pytest.mark.heavy
def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    """It keeps the store, too: the other has read that it left before the store ends."""
    first, second = run("raises", 2, _address(), tmp_path, timeout=20)
    assert first.status == 1 and "KeyError: 'no such page'" in first.errors
    assert second.status == 1 and "survived" not in second.steps
    assert second.at - first.steps["raised"]["time"] < 10
    assert "rank 0 left: KeyError: 'no such page'" in second.errors
