"""The command: its table, its JSON, its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparse_pcg import Options, PrefillRunner, demo
from sparse_pcg.batch import Batch
from sparse_pcg.cli import app
from sparse_pcg.kv import PagedKV, page_table
from sparse_pcg.models import DSAModel, preset
from sparse_pcg.verification import TOLERANCE, pages_of, same_bytes


@pytest.fixture(autouse=True)
def _small(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REPEATS", 1)


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


def test_rows_that_eager_does_not_decide_are_judged_by_its_own_move(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DSAModel(preset("tiny", num_layers=2), dtype=torch.float32)
    kv = PagedKV(2, 8, index_layers=model.config.index_layers, dtype=torch.float32, device="cpu")
    runner = PrefillRunner(model, kv, Options(capture_sizes=(64,), compiler="eager", graphs="off"))
    weights = [p.clone() for p in model.parameters()]
    with kv.request() as request:
        request.extend(40)
        ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(0))
        batch = Batch(ids, [40], [0], page_table([request]))
        runner.forward(batch)
        eager = runner.forward(batch, "eager").hidden
        runner.forward(batch)
        written = pages_of(runner, request.pages)
        noise = torch.randn(eager.shape, generator=torch.Generator().manual_seed(1))
        rounded, wrong = eager * (1 + 2e-7 * noise), eager * (1 + 1e-4 * noise)
        assert demo._judge(runner, batch, rounded, eager) == (True, None)
        monkeypatch.setitem(TOLERANCE, torch.float32, 1e-9)  # as if every row were undecided
        assert demo._judge(runner, batch, rounded, eager) == (True, 1.0)
        assert demo._judge(runner, batch, wrong, eager) == (False, 1.0)
        assert all(map(same_bytes, written, pages_of(runner, request.pages)))
    assert all(map(same_bytes, weights, model.parameters()))


@pytest.mark.parametrize(("close", "code"), [(True, 0), (False, 1)])
def test_undecided_rows_are_explained(close: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = demo.Row("fresh", 200, 256, "cut", 2, 195, 9.0, 5.0, 1.0, True, 3e-2, close, undecided=0.25)
    machine = {"device": "a device", "torch": "2"}
    result = demo.Result([row], machine, "eager", 1.0, 3, 3, {})
    monkeypatch.setattr("sparse_pcg.cli.run_demo", lambda *args: result)
    done = CliRunner().invoke(app, ["demo", "--compiler", "eager"])
    assert done.exit_code == code, done.output
    assert "fresh: 25% of the rows" in done.output and ("(TOO" in done.output) == (not close)


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
