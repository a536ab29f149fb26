"""Two GPUs, NCCL: captures that fail on one rank with collectives inside, and a rank that is killed in a replay."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ROOT = Path(__file__).parents[2]
LIMIT = 75  # seconds until a rank that hangs is killed


def run(scenario: str) -> list[dict[str, Any]]:
    """Two ranks, without torchrun: per rank its exit status, what it said, its errors, and when it ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rank_faults", scenario],
            cwd=ROOT,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "SPARSE_PCG_RANK_TIMEOUT": "20"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    def wait(process: subprocess.Popen[str]) -> dict[str, Any]:
        try:
            out, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            errors += "\nkilled by the test: it hung"
        facts = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        steps = {fact["step"]: fact for fact in facts}
        return {"status": process.returncode, "steps": steps, "errors": errors, "at": time.time()}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(wait, processes))


@pytest.fixture(scope="module")
def both() -> dict[str, list[dict[str, Any]]]:
    """Both scenarios at the same time."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(("faults", "poison"), pool.map(run, ("faults", "poison")), strict=True))
    for scenario, ranks in found.items():
        for index, rank in enumerate(ranks):
            print(f"\n== {scenario}, rank {index}: status {rank['status']}", json.dumps(rank["steps"]))
            print("\n".join(rank["errors"].strip().splitlines()[-12:]))
    return found


Both = dict[str, list[dict[str, Any]]]


@pytest.mark.parametrize(("rows", "captured"), [(4, True), (8, False), (16, False), (32, True)])
def test_a_capture_that_fails_on_one_rank_is_dropped_by_both(both: Both, rows: int, captured: bool) -> None:
    for rank in both["faults"]:
        step = rank["steps"][f"size {rows}"]
        assert all(step["right"]) and step["once"]
        assert (step["captures"], step["replays"]) == ((2, 4) if captured else (0, 0))


def test_captured_and_uncaptured_collectives_in_turn(both: Both) -> None:
    for index, rank in enumerate(both["faults"]):
        assert rank["steps"]["in turn"]["wrong"] == 0
        log = "\n".join(rank["steps"]["in turn"]["log"])
        assert "failed on one: rank 1: capture failed: " in log
        assert ("op toy.shaky" in log) == (index == 1), "the rank whose capture failed names the op"


def test_the_selection_of_the_first_rank_is_broadcast(both: Both) -> None:
    first, second = (rank["steps"]["selections"] for rank in both["faults"])
    assert first["own"] != second["own"] and first["broadcast"] == second["broadcast"] == first["own"]


def test_a_rank_that_is_killed_ends_the_one_that_waits_for_it_on_the_gpu(both: Both) -> None:
    first, second = both["faults"]
    assert second["status"] == -signal.SIGKILL
    assert first["status"] == 1 and "waits" not in first["steps"]
    assert first["at"] - second["steps"]["killed"]["time"] < 15
    assert "waits in vain: rank 1 has ended (its process" in first["errors"]


def test_a_communicator_that_a_capture_breaks_ends_both_ranks_or_goes_on(both: Both) -> None:
    """Which of the two is NCCL's to say; none hangs, and no result is wrong."""
    first, second = both["poison"]
    if "goes on" in first["steps"]:
        assert all(rank["steps"]["goes on"]["right"] and rank["status"] == 0 for rank in (first, second))
        return
    assert first["status"] != 0 and second["status"] != 0
    assert "hung" not in first["errors"] + second["errors"]
    assert "rank 1 left" in first["errors"] or "rank 1 failed in it" in first["errors"]
