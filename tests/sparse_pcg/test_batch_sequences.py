"""Hundreds of random batch sequences over one captured runner: replay equals uncaptured, caches included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparse_pcg
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, ModelConfig, preset
from tests.sparse_pcg.sequences import Driver, Subject

CONFIG = replace(preset("tiny"), num_layers=3, index_topk=16)
LEAST = replace(CONFIG, num_layers=2)  # a dense layer and one with experts
SEQUENCES = 300

pytestmark = pytest.mark.usefixtures("fresh")


def build(
    pages: int = 9,
    device: str = "cpu",
    config: ModelConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> tuple[sparse_pcg.PrefillRunner, PagedKV]:
    model = DSAModel(config, dtype=dtype, device=device, seed=3)
    layers = config.index_layers
    kv = PagedKV(config.num_layers, pages, index_layers=layers, dtype=dtype, device=device, poison=True)
    chosen = sparse_pcg.Options(**{"capture_sizes": (4, 8, 16, 32), "compiler": "eager", **options})  # type: ignore[arg-type]
    runner = sparse_pcg.PrefillRunner(model, kv, chosen)
    runner.capture(progress=False)
    return runner, kv


def test_replay_equals_uncaptured_over_hundreds_of_sequences() -> None:
    runner, kv = build(config=LEAST)
    driver = Driver(Subject.of(runner, kv), seed=1)
    before = sparse_pcg.stats()
    for _ in range(SEQUENCES):
        driver.run()
    driver.close()
    after, counts = sparse_pcg.stats(), driver.counts
    assert (after.captures, after.graphs, after.unique_pieces) == (before.captures, before.graphs, before.unique_pieces)
    replays = after.replays - before.replays
    assert counts["sequences"] == SEQUENCES and replays > 0.8 * counts["batches"]
    for happened in ("prefix cached", "chunks", "preempted", "pages reused"):
        assert counts[happened] >= 50, counts


def test_compiled_pieces_too() -> None:
    runner, kv = build(config=LEAST, compiler="inductor", capture_sizes=(8, 32))
    driver = Driver(Subject.of(runner, kv), seed=2)
    before = sparse_pcg.stats().replays
    for _ in range(12):
        driver.run()
    driver.close()
    assert sparse_pcg.stats().replays - before >= 15
