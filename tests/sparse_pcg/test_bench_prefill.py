"""``bench ttft`` and ``bench serve`` on a tiny model: what they give, what they refuse, their pictures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from sparse_pcg.bench import serve, ttft
from sparse_pcg.bench.cli import app
from sparse_pcg.bench.prefill import MODES, World, full_graph, rank_config
from sparse_pcg.verification import same_bytes

TINY = "--model tiny --layers 2 --compiler eager"


@pytest.fixture(scope="module")
def world(fresh_module: None) -> World:
    """What both commands would build."""
    return World.build(rank_config("tiny", 2, 4, 80), (8, 16), 12, "eager")


@pytest.fixture
def built(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(World, "build", lambda *_: world)
    return world


def test_ttft_of_every_mode(built: World, tmp_path: Path) -> None:
    out, picture = tmp_path / "ttft.json", tmp_path / "ttft.png"
    line = f"ttft {TINY} --rows 0+8,64+8 --repeats 1 --json {out} --plot {picture}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    short, long = result["rows"]
    assert set(short["ms"]) == {*MODES, ttft.FLOOR} and set(long["ms"]) == set(short["ms"]) - {"sparse_pcg-short"}
    assert all(row["bitwise"] and row["turns"] == 1 for row in result["rows"])
    assert all(low <= row["ms"][m] <= high for row in result["rows"] for m, (low, high) in row["range_ms"].items())
    assert short["served"]["sparse_pcg"] == [8, "cut"] and short["served"]["sparse_pcg-short"] == [8, "short"]
    assert result["cuts"]["engine-cuts"] > result["cuts"]["sparse_pcg"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_row_takes_no_further_turns_when_patience_ends(built: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "MODES", ("uncaptured", "sparse_pcg"))
    ttft.capture_all(built)
    assert ttft.measure_rows(built, {}, [(0, 8)], 50, patience=0.0)["rows"][0]["turns"] == 2


def test_the_floor_gives_what_a_replay_gives(built: World) -> None:
    ttft.capture_all(built)
    pages, batch = built.request(64, 8, 3)
    with pages, full_graph(built.runner, batch, 8) as floor:
        replayed, alone = built.forward("sparse_pcg", batch), floor()
        assert same_bytes(alone.hidden, replayed.hidden) and same_bytes(alone.logits, replayed.logits)
        assert built.forward("sparse_pcg", batch).variant == "cut"


def test_no_row_begins_when_the_time_is_over(built: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ttft.capture_all(built)
    out = tmp_path / "part.json"
    row = ttft._row

    def seen(*arguments: Any) -> dict[str, Any]:
        # What there is when a row begins is what a run that is ended in it leaves.
        assert json.loads(out.read_text())["not_measured"] == ["0+8", "64+8"]
        monkeypatch.setattr(ttft, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 7200))
        return row(*arguments)

    monkeypatch.setattr(ttft, "_row", seen)
    rows = [(0, 8), (64, 8)]
    result = ttft.measure_rows(built, {}, rows, 1, out, until=time.perf_counter() + 3600)
    assert [r["new"] for r in result["rows"]] == [8] and result["not_measured"] == ["64+8"]
    assert json.loads(out.read_text()) == result and list(tmp_path.iterdir()) == [out]


def test_serve_of_several_lanes(built: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "ALONE", 3)
    monkeypatch.setattr(serve, "TOGETHER", 7)
    monkeypatch.setattr(serve, "LEAST", 1)
    monkeypatch.setattr(serve, "OFFSET", 0.001)
    monkeypatch.setattr(serve, "CHUNK", 16)  # three lanes of 8 do not fit: a request waits, or is cut in two
    out, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    line = f"serve {TINY} --rows 0+6,64+6 --lanes 1,3 --modes engine-cuts,sparse_pcg-short --runs 1"
    done = CliRunner().invoke(app, [*line.split(), "--json", str(out), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    built.kv.close()  # raises if a request still holds pages
    classes = json.loads(out.read_text())["classes"]
    assert [(c["prefix"], c["new"], c["lanes"]) for c in classes] == [(0, 6, 1), (0, 6, 3), (64, 6, 1), (64, 6, 3)]
    for c in classes:
        assert set(c["modes"]) == {"engine-cuts", "sparse_pcg-short"}
        for m in c["modes"].values():
            low, high = m["median_range_ms"]
            assert m["requests"] == (3 if c["lanes"] == 1 else 6)
            assert 0 < low <= m["median_ms"] <= high and m["p99_ms"] >= m["median_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ttft --rows 512", "rows"),
        ("ttft --model huge", "huge"),
        ("ttft --repeats 0", "repeats"),
        ("serve --rows 0+0", "rows"),
        ("serve --lanes one", "lanes"),
        ("serve --lanes 0", "lanes"),
        ("serve --modes fast", "fast"),
        ("serve --runs 0", "runs"),
    ],
)
def test_bad_arguments_end_the_command_before_anything_is_built(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "build", lambda *_: pytest.fail("built"))
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2 and said in done.output


def test_the_buckets_and_pages_that_classes_need() -> None:
    assert serve.buckets([(0, 512)], (1, 4)) == (512, 768, 1024, 1536, 2048)
    assert serve.buckets([(0, 512), (0, 8192)], (1, 16)) == serve.BUCKETS
    assert serve.pages_needed([(128, 70)], (2,)) == 2 + 2 * 3 + 2
