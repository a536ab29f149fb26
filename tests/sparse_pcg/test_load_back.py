"""A forward over pages that are still coming back from the host: nothing reads a layer before it is there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import sparse_pcg
from sparse_pcg.kv import HostKV, PagedKV, TransferError
from tests.sparse_pcg.host_pools import Failing, Gate
from tests.sparse_pcg.sequences import Driver, Subject
from tests.sparse_pcg.test_batch_sequences import CONFIG, LEAST, build
from tests.sparse_pcg.test_runner import batch_of
from tests.sparse_pcg.toys import same


@pytest.fixture(scope="module")
def served(fresh_module: None) -> tuple[sparse_pcg.PrefillRunner, PagedKV, HostKV]:
    runner, kv = build(pages=12)
    host = HostKV(kv, 12)
    return runner, kv, host


def cached(runner: sparse_pcg.PrefillRunner, kv: PagedKV, host: HostKV, monkeypatch: Any) -> tuple[Any, Any, Gate]:
    """A batch over a cached prefix, its logits as they are without any eviction, and the gate its load stands at."""
    request = kv.request()
    runner.forward(batch_of([(request, 30)], seed=1))
    batch = batch_of([(request, 20)], seed=2)
    want = runner.forward(batch, "uncaptured").logits.clone()
    evicted = host.evict(request)
    host.flush()
    filler = kv.request()  # lies where the request lay, and is not written
    filler.extend(64)
    gate = Gate(host.copy_to_device)
    monkeypatch.setattr(host, "copy_to_device", gate)
    back = host.load(evicted)
    moved = sparse_pcg.Batch(
        batch.input_ids, batch.new_lens, batch.prefix_lens, torch.tensor([back.pages], dtype=torch.int32)
    )
    filler.close()
    return (moved, back), want, gate


@pytest.mark.parametrize("mode", ["replay", "uncaptured", "eager"])
def test_a_forward_waits_for_what_it_reads(served: Any, monkeypatch: Any, mode: str) -> None:
    runner, kv, host = served
    (batch, request), want, gate = cached(runner, kv, host, monkeypatch)
    threading.Thread(target=lambda: [(time.sleep(0.05), gate.let(1)) for _ in range(3)]).start()
    got = runner.forward(batch, mode).logits
    assert same(got, want) if mode != "eager" else torch.allclose(got, want, rtol=1e-3, atol=1e-4)
    request.close()
    kv.close()


@pytest.mark.parametrize("mode", ["uncaptured", "eager"])
def test_an_uncaptured_forward_waits_layer_by_layer(served: Any, monkeypatch: Any, mode: str) -> None:
    """Layer i + 1 is let through only when layer i's attention has run: waiting for all first would never end."""
    runner, kv, host = served
    (batch, request), want, gate = cached(runner, kv, host, monkeypatch)
    seen: list[int | None] = []
    wait = host.wait

    def counted(layer_id: int | None = None) -> None:
        seen.append(layer_id)
        assert layer_id is not None, "waited for all layers at once"
        if gate.started <= layer_id + 1:
            gate.let(1)
        wait(layer_id)

    monkeypatch.setattr(host, "wait", counted)
    got = runner.forward(batch, mode).logits
    assert sorted(set(seen)) == [0, 1, 2] and seen == sorted(seen)  # type: ignore[type-var]
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-4)
    request.close()
    kv.close()


def test_a_replay_starts_when_every_layer_is_there(served: Any, monkeypatch: Any) -> None:
    runner, kv, host = served
    (batch, request), want, gate = cached(runner, kv, host, monkeypatch)
    started: list[int] = []
    for plan in (p for b in runner._buckets.values() for p in b.plans.values()):
        monkeypatch.setattr(plan, "replay", lambda plan=plan, run=plan.replay: (started.append(gate.started), run()))
    threading.Thread(target=lambda: [(time.sleep(0.02), gate.let(1)) for _ in range(3)]).start()
    assert same(runner.forward(batch).logits, want)
    assert started == [CONFIG.num_layers]
    request.close()
    kv.close()


def test_a_failed_load_fails_the_forward_and_the_next_one_works(served: Any, monkeypatch: Any) -> None:
    runner, kv, host = served
    for mode in ("replay", "uncaptured"):
        with monkeypatch.context() as patch:
            (batch, request), want, gate = cached(runner, kv, host, patch)
            gate._copy = Failing(gate._copy, 2, 1)
            gate.let(1 << 10)
            with pytest.raises(TransferError, match="a broken copy"):
                runner.forward(batch, mode)
            assert same(runner.forward(batch, mode).logits, want)
            request.close()
            kv.close()


def test_hundreds_of_batches_equal_those_of_pages_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    runner, kv = build(config=LEAST)
    stays, roomy = build(config=LEAST, pages=64)
    host = HostKV(kv, 12)
    rng = random.Random(5)

    def late(copy: Callable[..., None], layer: int, pairs: list[tuple[int, int]]) -> None:
        time.sleep(rng.choice((0, 0, 0, 0.002)))
        copy(layer, pairs)

    for name in ("copy_to_host", "copy_to_device"):
        monkeypatch.setattr(host, name, partial(late, getattr(host, name)))
    driver = Driver(Subject.of(runner, kv, host), seed=3, twin=Subject.of(stays, roomy))
    replays = sparse_pcg.stats().replays
    for _ in range(100):
        driver.run()
    counts = driver.counts
    driver.close()
    assert counts["batches"] >= 200 and sparse_pcg.stats().replays - replays >= 0.3 * counts["batches"]
    for happened in ("evicted", "loaded", "prefix cached", "pages reused"):
        assert counts[happened] >= 40, counts
    sparse_pcg.reset()
