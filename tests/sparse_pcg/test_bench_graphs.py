"""The benches of graphs, small and without a GPU: what they return, what they refuse, their pictures."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparse_pcg.bench.cli import app
from sparse_pcg.bench.cut_cost import run_cut_cost
from sparse_pcg.bench.memory import rank_of_glm5_2, run_memory, spread
from sparse_pcg.bench.plots import plot
from sparse_pcg.bench.startup import measure_start, run_startup
from sparse_pcg.bench.timing import command_line, provenance

pytestmark = pytest.mark.usefixtures("fresh")


def test_cut_cost_times_the_same_model_in_every_way(tmp_path: Path) -> None:
    out, picture = tmp_path / "cut.json", tmp_path / "cut.png"
    line = "cut-cost --layers 3 --hidden 16 --tokens 4 --repeats 2 --compiler eager --peers eager,plan,call"
    done = CliRunner().invoke(app, [*line.split(), "--json", str(out), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert set(result["peers"]) == {"eager", "plan", "call"} and result["model"]["cuts"] == 3
    assert all(row["host_us"] > 0 for row in result["peers"].values())
    assert max(result["differs_from_eager"].values()) < 0.02  # bfloat16
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {"machine", "versions", "commit", "command"} <= set(result)


@pytest.mark.parametrize(("line", "said"), [("--rows x", "rows"), ("--ops topq", "topq"), ("--repeats 0", "repeats")])
def test_bad_arguments_of_ops_end_the_command(line: str, said: str) -> None:
    done = CliRunner().invoke(app, ["ops", *line.split()])
    assert done.exit_code == 2 and said in done.output


def test_ops_gets_what_the_command_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}

    def run(*args: object, **named: object) -> dict[str, str]:
        seen.update(args=args, **named)
        return {"bench": "ops"}

    monkeypatch.setattr("sparse_pcg.bench.ops.run_ops", run)
    out = tmp_path / "ops.json"
    line = f"ops --rows 1,16 --ops rope,topk_slots --own --without flashinfer,topk_slots:cuda --repeats 3 --json {out}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    chosen = ((1, 16), ("rope", "topk_slots"), True, ("flashinfer", "topk_slots:cuda"))
    assert seen == {"args": chosen, "repeats": 3, "partial": out} and json.loads(out.read_text()) == {"bench": "ops"}


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: run_cut_cost(peers=("eagre",)), "eagre"),
        (lambda: run_cut_cost(layers=0), "layers"),
        (lambda: run_memory(model="huge"), "huge"),
        (lambda: run_memory(model="tiny", buckets=0), "buckets"),
        (lambda: run_startup(model="huge"), "huge"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(call: object, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        call()  # type: ignore[operator]


def test_a_result_says_how_to_get_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = ["/somewhere/sparse_pcg/__main__.py", "bench", "memory", "--json", "/tmp/a/memory.json", "--buckets", "3"]
    assert command_line(written) == "sparse-pcg bench memory --json memory.json --buckets 3"
    assert command_line(["/bin/sparse-pcg", "bench", "ops"]) == "sparse-pcg bench ops"
    assert command_line(["/x/bench/cli.py", "cut-cost"]) == "sparse-pcg bench cut-cost"
    monkeypatch.delenv("SPARSE_PCG_COMMIT", raising=False)
    assert provenance(tmp_path)["commit"] == "unknown"
    monkeypatch.setenv("SPARSE_PCG_COMMIT", "0123456789abcdef")
    assert provenance(tmp_path)["commit"] == provenance()["commit"] == "0123456789"


def test_memory_of_buckets_over_one_another() -> None:
    result = run_memory(model="tiny", largest=32, buckets=3, compiler="eager")
    rows = result["buckets"]
    assert [r["bucket"] for r in rows] == sorted((r["bucket"] for r in rows), reverse=True) and rows[0]["bucket"] == 32
    pools = [r["pool_bytes"] for r in rows]
    assert pools == sorted(pools) and pools[0] > 0
    assert result["ratio"] == pools[-1] / pools[0] <= 1.2
    assert result["pool_bytes_captured_again"] == pools[-1]
    assert result["left_by_capturing_again"] == {"reserved": 0, "driver": 0}


def test_a_start_in_its_phases() -> None:
    result = measure_start("tiny", 16, 2, "eager", spawned=time.time() - 5)
    assert 5 <= result["import_seconds"] < 6
    assert result["buckets"] == 2 and result["captures"] > 0 and result["distinct_pieces"] <= result["pieces"]
    assert all(v >= 0 for k, v in result.items() if k.endswith("_seconds")), result


def test_the_models_shapes() -> None:
    config = rank_of_glm5_2()
    assert (config.num_heads, config.local_experts, config.hidden_size, config.index_topk) == (8, (0, 32), 6144, 2048)
    assert spread((4, 8, 16, 32), 2) == (8, 32) and spread((4, 8, 16, 32), 4) == (4, 8, 16, 32)


PHASES = dict.fromkeys(("import", "model", "trace", "split", "compile", "capture"), 1.5)
START = {f"{name}_seconds": value for name, value in PHASES.items()} | {"pieces": 9, "distinct_pieces": 4, "buckets": 2}
PICTURES = {
    "memory": {
        "buckets": [{"bucket": b, "pool_bytes": 1 << 20, "driver_bytes": 1 << 19} for b in (8, 4)],
        "ratio": 1.0,
    },
    "startup": {"cold": START, "warm": START},
    "ttft": {
        "model": {"name": "tiny", "layers": 4},
        "rows": [
            {"prefix": 0, "new": 8, "ms": {"eager": 3.0, "sparse_pcg": 1.0, "sparse_pcg-short": 0.9}},
            {"prefix": 64, "new": 8, "ms": {"eager": 3.5, "sparse_pcg": 1.1}},
        ],
    },
}

WORDS = {
    "memory": ("graph pool", "driver", "1.00x"),
    "startup": ("cold", "warm", "compile", "9 pieces, 4 distinct"),
    "ttft": ("0 + 8", "64 + 8", "sparse_pcg-short", "3.5", "tiny, 4 layers"),
}


@pytest.mark.parametrize("bench", PICTURES)
def test_a_picture_of_each_result(bench: str, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    plot({"bench": bench, "machine": {"device": "a GPU"}, "versions": {"torch": "2.0"}, **PICTURES[bench]}, path)
    text = path.read_text()
    assert "a GPU, torch 2.0" in text and all(word in text for word in WORDS[bench])
    with pytest.raises(ValueError, match="one of"):
        plot({"bench": "other"}, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
