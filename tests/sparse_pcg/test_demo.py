"""The command: its table, its JSON, its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sparse_pcg
from sparse_pcg import demo
from sparse_pcg.cli import app


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(demo, "REPEATS", 1)
    torch._dynamo.reset()
    sparse_pcg.reset()
    yield
    sparse_pcg.reset()


def test_every_kind_of_prefill_is_served_and_written_down(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_bytes(bytes(range(32, 127)) * 8)
    done = CliRunner().invoke(app, ["demo", "--compiler", "eager", "--prompt-file", str(text), "--json", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert result["ok"] and all(row["bitwise"] and row["close"] for row in result["rows"])
    assert [(r["rows"], r["bucket"], r["variant"], r["cuts"]) for r in result["rows"]] == [
        (200, 256, "cut", 2),
        (40, 64, "short", 0),
        (128, 128, "cut", 2),
        (128, 128, "cut", 2),
        (44, 64, "cut", 2),
        (62, 64, "cut", 2),
        (91, 128, "cut", 2),
    ]
    assert all(row["launches_saved"] > 100 for row in result["rows"])
    assert "mixed batch" in done.output and "DIFFERS" not in done.output


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "same_bytes", lambda a, b: False)
    done = CliRunner().invoke(app, ["demo", "--compiler", "eager"])
    assert done.exit_code == 1 and "DIFFERS" in done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--device", "cuda"], "CUDA"),
        (["--compiler", "nvcc"], "nvcc"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--json", "/nowhere/out.json"], "/nowhere"),
    ],
)
def test_what_cannot_be_is_said_at_once(args: list[str], said: str) -> None:
    if said == "CUDA" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = CliRunner().invoke(app, ["demo", *args])
    assert done.exit_code == 2 and said in done.output


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    done = CliRunner().invoke(app, ["demo", "--prompt-file", str(text)])
    assert done.exit_code == 2 and "at least 512" in done.output
