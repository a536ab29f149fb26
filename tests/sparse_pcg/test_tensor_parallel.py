"""A model that two processes share, over gloo: equal to the model of one, replays bitwise equal to uncaptured runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_pcg.bench import ttft
from sparse_pcg.models import DSAModel, NextN, Rank, preset
from sparse_pcg.models.drawing import draw_weights

ROOT = Path(__file__).parent.parent.parent
# The largest relative distance of half the rows from those of one rank alone, by dtype.
CLOSE = {"columns": 1e-5, "experts": 1e-5, "bfloat16": 2e-2, "inductor": 2e-2}


def torchrun(*command: str, limit: float = 300) -> subprocess.CompletedProcess[str]:
    """Two processes of ``-m command``."""
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command, limit=limit)


def run(*words: str, limit: float = 300) -> subprocess.CompletedProcess[str]:
    """Python with these arguments."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


def look(names: list[str], device: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, by name."""
    words = ("tests.sparse_pcg.shared_model", str(folder), device, *names)
    done = run("-m", *words) if device == "cpu" else torchrun(*words)  # who has looked for a GPU cannot fork
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in names}


def judge_model(name: str, ranks: list[dict[str, Any]], device: str = "cpu") -> None:
    """What must hold for ``shared_model.model``."""
    for found in ranks:
        assert found["reduced"] == {"piece": 4, "cut": 0} and found["cuts"] == 1
        assert found["fallbacks"] == {}
        served = [(b["bucket"], b["variant"]) for b in found["batches"]]
        assert served == [(64, "short"), (16, "short"), (64, "cut"), (16, "cut"), (64, "short")]
        for batch in found["batches"]:
            assert batch["bitwise"] == [True, True] and batch["ranks alike"]
            distances = {kind: batch[kind] for kind in batch if kind.endswith("one rank")}
            assert len(distances) == 4 and max(distances.values()) <= CLOSE[name], distances
        assert "_c10d_functional::all_reduce" in found["text"]
    if device == "cpu":
        assert ranks[0]["findings"] == []


def judge_sums(name: str, ranks: list[dict[str, Any]]) -> None:
    """What must hold for ``shared_model.sums``."""
    for found in ranks:
        assert max(found["distances"]) <= (0 if name == "sums" else 1e-5), found
        assert found["captures"] == 2 and found["replays"] == 1


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return look(["experts", "sums", "sums inductor", "demo"], "cpu", tmp_path_factory.mktemp("ranks"))


def test_two_ranks_equal_one(found: dict[str, Any]) -> None:
    judge_model("experts", found["experts"])


@pytest.mark.parametrize("name", ["sums", "sums inductor"])
def test_sums_among_writes_reads_and_cuts(name: str, found: dict[str, Any]) -> None:
    judge_sums(name, found[name])


def test_the_demo_of_two_ranks(found: dict[str, Any]) -> None:
    assert all(rank["ok"] and rank["ranks"] == 2 for rank in found["demo"])
    assert 0 < max(found["demo"][0]["diffs"]) < 1e-4


@pytest.mark.heavy
def test_the_bench_goes_on_without_what_one_rank_cannot_do(tmp_path: Path) -> None:
    found = look(["bench"], "cpu", tmp_path)
    result = found["bench"][0]["result"]
    assert [rank["rows"] for rank in found["bench"]] == [2, 2] and result["not_measured"] == ["0+9"]
    first, second = result["rows"]
    assert ttft.FLOOR not in first["ms"] and ttft.FLOOR in second["ms"] and "left_out" not in second
    assert "rank 1: capture failed: of this rank alone" in first["left_out"][ttft.FLOOR]
    assert first["bitwise"] and second["bitwise"] and first["turns"] == 1
    assert result["captured_collectives"] == {"sparse_pcg": 4, "engine-cuts": 4}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["columns", "bfloat16", "inductor"])
def test_two_ranks_equal_one_in_other_ways(name: str, tmp_path: Path) -> None:
    judge_model(name, look([name], "cpu", tmp_path)[name])


@pytest.mark.heavy
def test_the_commands_under_torchrun(tmp_path: Path) -> None:
    done = torchrun("sparse_pcg", "demo", "--compiler", "eager", "--json", str(tmp_path / "demo.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("shared by 2 ranks") == 1 and json.loads((tmp_path / "demo.json").read_text())["ok"]
    arguments = ("--model", "tiny", "--layers", "2", "--rows", "0+16,64+16", "--repeats", "1", "--compiler", "eager")
    out = tmp_path / "ttft.json"
    done = torchrun("sparse_pcg", "bench", "ttft", *arguments, "--tp", "2", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["machine"]["ranks"] == result["model"]["tp"] == 2 and all(row["bitwise"] for row in result["rows"])
    assert result["captured_collectives"] == {"sparse_pcg": 4, "engine-cuts": 4}
    assert result["command"].startswith("torchrun --nproc-per-node 2 -m sparse_pcg bench ttft")


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_random_weights_of_a_rank_are_its_part_of_the_whole(
    expert_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.sparse_pcg.test_weights import expected_part

    monkeypatch.setitem(draw_weights.__wrapped__.__globals__, "_STEP", 1000)  # some rows of a tensor at a time
    config = preset("tiny", num_layers=2, max_positions=64)
    whole = DSAModel(config, torch.float32)
    for index in (0, 1):
        rank = Rank(index, 2, expert_parallel)
        part = DSAModel(config, torch.float32, rank=rank)
        for one, other in ((whole, part), (NextN(whole), NextN(part))):
            expected, got = expected_part(one, rank), dict(other.named_parameters())
            assert expected.keys() == got.keys()
            assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_ranks_of_a_mesh() -> None:
    class Mesh:
        ndim = 2

    with pytest.raises(ValueError, match=r"mesh must have one dim, as mesh\['tp'\] has, got 2"):
        Rank.of(Mesh())  # type: ignore[arg-type]
