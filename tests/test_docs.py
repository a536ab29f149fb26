"""The documents run as they stand, what is generated is current, and the site builds without a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparse_pcg.cli import app
from sparse_pcg.reference_pages import PAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _blocks(name: str) -> list[str]:
    return re.findall(r"```python[^\n]*\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run python -m sparse_pcg.reference_pages"


def test_the_tutorial_runs(tmp_path: Path) -> None:
    model, serve, watch = _blocks("tutorial.md")
    (tmp_path / "mymodel.py").write_text(model)
    for block in (serve, watch):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    factory = f"{tmp_path / 'mymodel.py'}:make"
    run = CliRunner()
    clean = run.invoke(app, ["check", factory])
    assert clean.exit_code == 0 and "nothing found" in clean.output
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    args = ["explain", factory, "--compiler", "eager", "--html", str(page), "--json", str(data)]
    assert run.invoke(app, args).exit_code == 0
    report = json.loads(data.read_text())
    assert len(report["cuts"]) == 3 and [p["distinct"] for p in report["pieces"]] == [0, 1, 1, 2]
    assert "mymodel.py" in page.read_text()
    faulty = model.replace(
        "        for layer in", "        if x.sum() > 0:\n            x = x + 1\n        for layer in"
    )
    (tmp_path / "faulty.py").write_text(
        faulty.replace('"mymodel"', '"faulty_model"').replace(".mymodel.", ".faulty_model.")
    )
    found = run.invoke(app, ["check", f"{tmp_path / 'faulty.py'}:make"])
    assert found.exit_code == 1 and "host_read" in found.output


def test_adding_an_op_runs(tmp_path: Path) -> None:
    for block in _blocks("adding-an-op.md"):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["check", "nowhere"], "module:function"),
        (["check", "no_such_module_here:make"], "no_such_module_here"),
        (["check", "torch:no_such_name"], "no_such_name"),
        (["check", "nowhere.py:make"], "nowhere.py"),
        (["check", "platform:machine"], "must return"),
        (["doctor", "--json", "/nowhere/out.json"], "/nowhere"),
    ],
)
def test_what_cannot_be_is_said_at_once(args: list[str], said: str) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 and said in done.output


def test_results_become_tables(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS))
    try:
        import build_hooks
    finally:
        sys.path.remove(str(DOCS))
    rows = [{"what": "a|b", "us": 1.23456}, {"what": "c", "more": 2}]
    named = {"passed": 3, "peers": {"ours": {"us": 1.0, "kernels": "many"}, "theirs": {"us": 2.0}}}
    result = {"machine": "one GPU", "ops": rows, "sum": {"cut_us": 7.0}, **named}
    (tmp_path / "first-run.json").write_text(json.dumps(result))
    text = build_hooks.tables(tmp_path)
    assert "## first run" in text and "- machine: one GPU" in text
    assert "| what | us | more |\n|---|---|---|\n| a\\|b | 1.235 |  |\n| c |  | 2 |" in text
    assert "### sum" in text and "| 7 |" in text
    assert "| passed |\n|---|\n| 3 |" in text
    assert "### peers\n\n|  | us |\n|---|---|\n| ours | 1 |\n| theirs | 2 |" in text


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed (extra: docs)")
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra: docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    comparison = (tmp_path / "site" / "comparison.html").read_text()
    assert "RESULTS" not in comparison and "<table>" in comparison
