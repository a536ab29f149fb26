"""Counters for Prometheus, the split graph in PyTorch's structured trace, and the log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_pcg
from tests.sparse_pcg import toys


def test_prometheus_text_holds_the_counters() -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    fn = sparse_pcg.compile(toys.Toy(2), capture_sizes=[8], compiler="eager")
    for rows in (8, 8, 8, 5):
        fn(*toys.inputs(rows))
    from sparse_pcg.metrics import metrics_text

    now, lines = sparse_pcg.stats(), metrics_text().splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert values["sparse_pcg_captures_total"] == now.captures == 3
    assert values["sparse_pcg_replays_total"] == now.replays == 1
    assert values["sparse_pcg_pool_bytes"] == now.pool_bytes > 0
    assert values['sparse_pcg_fallbacks_total{reason="size"}'] == now.fallbacks["size"] == 1
    sparse_pcg.reset()


def test_without_the_client_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_pcg.metrics import metrics_text

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"sparse-pcg\[metrics\]"):
        metrics_text()


def test_the_split_graph_is_an_artifact_of_the_structured_trace(tmp_path: Path) -> None:
    program = (
        "import sparse_pcg; from tests.sparse_pcg import toys\n"
        "sparse_pcg.compile(toys.Toy(1), capture_sizes=[8], compiler='eager')(*toys.inputs(8))"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=Path(__file__).parents[2])
    text = "".join(p.read_text() for p in tmp_path.iterdir())
    _, payload = text.split('"name": "sparse_pcg_split"', 1)
    body = "\n".join(ln for ln in payload.splitlines()[1:] if ln.startswith("\t"))
    segments = json.JSONDecoder().raw_decode(body.replace("\n\t", "\n").strip())[0]
    assert [s["kind"] for s in segments] == ["piece", "cut", "piece"]
    assert "toys.py" in segments[1]["source"] and segments[1]["why"] == "toy::mix_into"


def test_the_log_tells_of_splits(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, logger="sparse_pcg"):
        sparse_pcg.compile(toys.Toy(1), capture_sizes=[8], compiler="eager")(*toys.inputs(8))
    assert any("split a graph into {'cut': 1, 'piece': 2}" in r.getMessage() for r in caplog.records)
