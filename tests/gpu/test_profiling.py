"""Costs and traces of plans on real graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sparse_pcg
from sparse_pcg import profiling
from tests.sparse_pcg.test_profiling import Model
from tests.sparse_pcg.toys import same

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    sparse_pcg.reset()
    yield
    profiling.nvtx(False)
    sparse_pcg.reset()


def test_steps_have_times_on_host_and_gpu() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    costs = profiling.step_costs(sparse_pcg.record(Model(), x), repeats=5)
    assert [c.kind for c in costs] == ["piece", "cut", "piece"]
    for cost in costs:
        assert cost.gpu_us is not None and cost.gpu_us > 64 * 2**20 / 5e6  # it writes 64 MiB, at less than 5 TB/s
        assert cost.host_us > 0


def test_ranges_and_a_trace_leave_results_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(16, 8, device="cuda")
    plan = sparse_pcg.record(Model(), x)
    want = Model()(x)
    profiling.nvtx(True)
    plan.replay()
    assert same(plan.outputs[0], want)
    path = tmp_path / "trace.json"
    with profiling.profile(path):
        plan.replay()
    assert same(plan.outputs[0], want)
    events = json.loads(path.read_text())["traceEvents"]
    assert {"sparse_pcg cut", *plan.labels} <= {e.get("name") for e in events}
    assert any(e.get("cat") == "kernel" for e in events)
