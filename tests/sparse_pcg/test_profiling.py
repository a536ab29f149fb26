"""Costs of a runner's steps, NVTX ranges. (Traces and the steps of one plan: test_plan.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sparse_pcg
from sparse_pcg import profiling
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from sparse_pcg.plan import Plan
from tests.sparse_pcg.agreement import mixed
from tests.sparse_pcg.test_runner import batch_of
from tests.sparse_pcg.toys import same


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> Iterator[None]:
    yield
    Plan.observer = None


def test_the_steps_of_a_bucket() -> None:
    config = replace(preset("tiny"), num_layers=2, index_topk=16)
    kv = PagedKV(2, 8, index_layers=config.index_layers, dtype=torch.float32)
    options = sparse_pcg.Options(capture_sizes=(8, 32), compiler="eager")
    runner = sparse_pcg.PrefillRunner(DSAModel(config, dtype=torch.float32), kv, options)
    with pytest.raises(ValueError, match="bucket"):
        profiling.runner_costs(runner)
    runner.capture(progress=False)
    with kv.request() as request:  # the row buffers hold a real batch
        runner.forward(batch_of([(request, 20)], 0))
    context = kv.context(None)
    caches = [cache.view(kv.num_pages, -1)[1:] for cache in (*context.latent_kv.values(), *context.index_k.values())]
    for cache in caches:
        cache.zero_()
    cut = profiling.runner_costs(runner, repeats=2)
    short = profiling.runner_costs(runner, bucket=8, variant="short", repeats=2)
    assert [c.label for c in cut] == runner._buckets[32].plans["cut"].labels and "bucket 32" in cut[0].label
    assert {c.kind for c in cut} == {"piece", "cut"} and [c.kind for c in short] == ["piece"]
    assert all(c.host_us > 0 and c.gpu_us is None for c in (*cut, *short))
    assert not any(bool(cache.view(torch.uint8).any()) for cache in caches)  # no page but the dummy is written
    for bad in ({"bucket": 16}, {"variant": "shorter"}):
        with pytest.raises(ValueError, match="must be captured ones of"):
            profiling.runner_costs(runner, **bad)  # type: ignore[arg-type]


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mixed(torch.relu(x)) + 1


def test_nvtx_names_plan_and_steps_until_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    depth = 0

    @contextmanager
    def span(name: str) -> Iterator[None]:
        nonlocal depth
        said.append("." * depth + name)
        depth += 1
        yield
        depth -= 1

    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    plan = sparse_pcg.record(Model(), x)
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", span)
    profiling.nvtx(True)
    x.mul_(2)
    plan.replay()
    assert said == ["sparse_pcg cut", *("." + label for label in plan.labels)]
    assert same(plan.outputs[0], Model()(x))
    profiling.nvtx(False)
    plan.replay()
    assert Plan.observer is None and len(said) == 1 + len(plan.labels)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_switches_nvtx_on(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.delenv("SPARSE_PCG_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("SPARSE_PCG_NVTX", value)
    profiling._from_environment()
    assert (Plan.observer is not None) is on


def test_nvtx_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", missing)
    with pytest.raises(RuntimeError, match="CUDA"):
        profiling.nvtx(True)
    assert Plan.observer is None
