"""Processes that share a model over gloo: lists that differ, a capture that fails, ranks that are killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sparse_pcg.forked import free_port

ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    """One rank: its exit status, what it said and when it ended. steps: what it said, by its name."""

    status: int
    steps: dict[str, dict[str, Any]]
    errors: str
    at: float


def run(**scenarios: tuple[int, str, Path, float]) -> dict[str, list[Ended]]:
    """Run every rank of each scenario, given its size, where its ranks meet, a folder and the time-out."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [str(word) for name, given in scenarios.items() for word in (name, *given)]
    command = [sys.executable, "-m", "tests.sparse_pcg.rank_worker", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: _ended(folder) for name, (_, _, folder, _) in scenarios.items()}


def _ended(folder: Path) -> list[Ended]:
    found = []
    for rank, (status, at) in enumerate(json.loads((folder / "ends.json").read_text())):
        said = (folder / f"out{rank}").read_text().splitlines()
        steps = {fact["step"]: fact for fact in map(json.loads, said)}
        found.append(Ended(status, steps, (folder / f"err{rank}").read_text(), at))
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    faults, stopped = tmp_path_factory.mktemp("faults"), tmp_path_factory.mktemp("stopped")
    return run(faults=(2, f"file://{faults}/store", faults, 20), stopped=(2, _address(), stopped, 2))


@pytest.fixture
def two(ended: dict[str, list[Ended]]) -> list[Ended]:
    return ended["faults"]


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
    return f"tcp://127.0.0.1:{free_port()}"


def judge_stopped(ranks: list[Ended]) -> None:
    *others, last = ranks
    for index, rank in enumerate(others):
        assert rank.status == 1 and "survived" not in rank.steps, rank.errors
        assert rank.at - last.steps["stopped"]["time"] < 12
        assert f"sparse_pcg: rank {index} ends: run 4 (a replay of cut, size" in rank.errors
        assert f"rank {len(others)} has shown no sign of life for 2 s" in rank.errors


def test_a_rank_that_is_stopped_ends_the_other_in_seconds(ended: dict[str, list[Ended]]) -> None:
    """It is there, and holds its connections: only that it shows no sign of life tells."""
    judge_stopped(ended["stopped"])


@pytest.mark.heavy
def test_a_rank_that_is_stopped_ends_two_others(tmp_path: Path) -> None:
    judge_stopped(run(stopped=(3, _address(), tmp_path, 2))["stopped"])


@pytest.mark.heavy
def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    """It keeps the store, too: the other has read that it left before the store ends."""
    first, second = run(raises=(2, _address(), tmp_path, 20))["raises"]
    assert first.status == 1 and "KeyError: 'no such page'" in first.errors
    assert second.status == 1 and "survived" not in second.steps
    assert second.at - first.steps["raised"]["time"] < 10
    assert "rank 0 left: KeyError: 'no such page'" in second.errors
