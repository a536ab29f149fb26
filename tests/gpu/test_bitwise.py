"""Every bucket of the default schedule on real graphs: replay equals uncaptured in every byte; serving stays put."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import sparse_pcg
from sparse_pcg.bench.memory import rank_of_glm5_2
from sparse_pcg.buckets import default_schedule
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from sparse_pcg.plan import Plan
from tests.sparse_pcg.in_order import compare_in_order, requests_with_prefixes
from tests.sparse_pcg.sequences import Driver, Subject

pytestmark = pytest.mark.gpu
BATCHES = 2000


@contextmanager
def replays_without_sync() -> Iterator[None]:
    """Inside the block a replay that waits for the device is an error."""
    replay = Plan.replay

    def strict(self: Plan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Plan.replay = strict  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plan.replay = replay  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=["tiny", "glm5_2"])
def served(request: Any) -> Iterator[tuple[sparse_pcg.PrefillRunner, PagedKV]]:
    torch._dynamo.reset()  # for each of the models, not once for the module: a test freezes
    sparse_pcg.reset()
    config = preset("tiny", num_layers=4, max_positions=16384) if request.param == "tiny" else rank_of_glm5_2()
    model = DSAModel(config, dtype=torch.bfloat16, device="cuda", seed=1)
    kv = PagedKV(config.num_layers, 320, index_layers=config.index_layers, device="cuda", poison=True)
    runner = sparse_pcg.PrefillRunner(model, kv, sparse_pcg.Options(capture_sizes=default_schedule(2048)))
    runner.capture(progress=False)
    yield runner, kv
    sparse_pcg.reset()
    torch._dynamo.reset()


def test_every_bucket_in_both_variants(served: Any) -> None:
    runner, kv = served
    assert runner.bucket_sizes() == sorted(default_schedule(2048))
    with replays_without_sync():
        seen = compare_in_order(runner, kv, random.Random(7))
    wanted = {(b, v) for b in runner.bucket_sizes() for v in runner.variants(b)}
    # With more rows than index_topk, some request mostly sees more than index_topk tokens: no short graph for it.
    wanted -= {(b, "short") for b in runner.bucket_sizes() if b > runner.index_topk}
    assert wanted <= seen, sorted(wanted - seen)
    assert sparse_pcg.stats().fallbacks == {}


def test_random_sequences(served: Any) -> None:
    runner, kv = served
    driver = Driver(Subject.of(runner, kv), seed=5)
    with replays_without_sync():
        for _ in range(12):
            driver.run()
    driver.close()
    assert driver.counts["prefix cached"] and driver.counts["chunks"], driver.counts


def test_thousands_of_batches_leave_memory_and_counters_as_they_are(served: Any) -> None:
    runner, kv = served
    generator = random.Random(11)
    sparse_pcg.freeze()
    with requests_with_prefixes(runner, kv, generator) as make:
        for _ in range(20):
            runner.forward(make(generator.randint(2, runner.sizes[-1]), generator.random() < 0.5))
        torch.cuda.synchronize()
        held = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        with sparse_pcg.stats().expect(captures=0, unique_pieces=0, graphs=0, replays=BATCHES, fallbacks={}):
            for _ in range(BATCHES):
                rows = min(int(2 ** generator.uniform(0, 11)) + 1, runner.sizes[-1])
                runner.forward(make(rows, generator.random() < 0.5))
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] <= held
