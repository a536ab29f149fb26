"""Batch sequences, load-back and generation on real CUDA graphs, streams and pinned memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

import sparse_pcg
from sparse_pcg.generation import decoder_of
from sparse_pcg.kv import HostKV, PagedKV
from sparse_pcg.models import preset
from tests.sparse_pcg.sequences import Driver, Subject
from tests.sparse_pcg.test_batch_sequences import build
from tests.sparse_pcg.test_generation import prompt
from tests.sparse_pcg.test_runner import batch_of
from tests.sparse_pcg.toys import same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
CONFIG = replace(preset("tiny"), num_layers=4)
MILLISECOND = 1_500_000  # cycles, about


def on_gpu(pages: int, **options: object) -> tuple[sparse_pcg.PrefillRunner, PagedKV]:
    chosen = {"capture_sizes": (8, 32, 64), **options}
    return build(pages, "cuda", CONFIG, torch.bfloat16, **chosen)


def late(copy: Callable[..., None], delay: Callable[[], float], layer: int, pairs: list[tuple[int, int]]) -> None:
    """In place of a copy: the stream is busy for so many milliseconds first."""
    torch.cuda._sleep(int(delay() * MILLISECOND))
    copy(layer, pairs)


def test_replay_equals_uncaptured_over_random_sequences() -> None:
    runner, kv = on_gpu(16, capture_sizes=(4, 8, 16, 32, 64))
    driver = Driver(Subject.of(runner, kv), seed=1)
    before = sparse_pcg.stats()
    for _ in range(150):
        driver.run()
    driver.close()
    after, counts = sparse_pcg.stats(), driver.counts
    assert after.captures == before.captures and after.replays - before.replays > 0.7 * counts["batches"], counts


def test_batches_with_load_back_equal_those_of_pages_that_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, kv = on_gpu(14)
    stays, roomy = on_gpu(64)
    host = HostKV(kv, 20)
    rng = random.Random(5)
    for name in ("copy_to_host", "copy_to_device"):
        monkeypatch.setattr(host, name, partial(late, getattr(host, name), lambda: rng.choice((0, 0, 1, 3))))
    driver = Driver(Subject.of(runner, kv, host), seed=3, twin=Subject.of(stays, roomy))
    for _ in range(100):
        driver.run()
    driver.close()
    assert min(driver.counts[n] for n in ("evicted", "loaded", "prefix cached")) >= 20, driver.counts


@pytest.mark.parametrize("mode", ["replay", "uncaptured", "eager"])
def test_a_forward_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    runner, kv = on_gpu(16)
    host = HostKV(kv, 8)
    request = kv.request()
    runner.forward(batch_of([(request, 60)], seed=1))
    batch = batch_of([(request, 40)], seed=2)
    want = runner.forward(batch, mode).logits.clone()
    evicted = host.evict(request)
    host.flush()
    kv.latent_pool.view(torch.uint8).fill_(0xFF)
    monkeypatch.setattr(host, "copy_to_device", partial(late, host.copy_to_device, lambda: 30.0))
    back = host.load(evicted)
    start = time.perf_counter()
    host.wait()  # in the stream, not on the host: each layer takes 30 ms to come
    waited = time.perf_counter() - start
    moved = sparse_pcg.Batch(batch.input_ids, [40], [60], torch.tensor([back.pages], dtype=torch.int32))
    got = runner.forward(moved, mode).logits
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    assert same(got, want)
    assert waited < 0.06 and took > 0.06, (waited, issued, took)
    back.close()
    kv.close()
    host.close()


def test_scattered_pages_come_back_whole() -> None:
    kv = PagedKV(2, 100, device="cuda")
    host = HostKV(kv, 60)
    held = [kv.request() for _ in range(98)]
    for request in held:
        request.extend(1)
    many = kv.request()
    many.pages, many.num_tokens = [r.pages.pop() for r in held[::2]], 49 * 64
    content = [p.copy_(torch.randint(256, p.shape, device="cuda")) for p in _bytes(kv)]
    want = [c[:, many.pages].clone() for c in content]
    evicted = host.evict(many)
    host.flush()
    for p in _bytes(kv):
        p.fill_(0xFF)
    first = kv.request()
    first.extend(1)
    back = host.load(evicted)
    host.wait()
    assert all(same(p[:, back.pages], w) for p, w in zip(_bytes(kv), want, strict=True))
    assert all(bool((p[:, 0] == 0xFF).all()) for p in _bytes(kv))


def _bytes(kv: PagedKV) -> list[torch.Tensor]:
    """The caches as [layers, pages, bytes]."""
    return [p.view(torch.uint8).view(p.shape[0], kv.num_pages, -1) for p in (kv.latent_pool, kv.index_pool)]


def test_the_host_pool_is_pinned() -> None:
    kv = PagedKV(2, 4, device="cuda")
    host = HostKV(kv, 4)
    assert all(cache.is_pinned() for caches in host._host_caches.values() for cache in caches)
    host.close()


def test_decoding_by_graphs_gives_the_tokens_of_the_pieces() -> None:
    runner, kv = on_gpu(40)
    plain, other = on_gpu(40, graphs="off")
    prompts = [prompt(n, n) for n in (3, 60, 120, 64, 300)]
    got = sparse_pcg.generate(runner, prompts, 12)
    assert got == sparse_pcg.generate(plain, prompts, 12)
    with sparse_pcg.stats().expect(captures=0, fallbacks={}):
        assert sparse_pcg.generate(runner, prompts, 12) == got
    kv.close()
    other.close()


def test_a_decode_graph_equals_its_pieces_uncaptured() -> None:
    runner, kv = on_gpu(40)
    decoder = decoder_of(runner)
    for count in (1, 3, 8):
        held = [kv.request() for _ in range(count)]
        for i, request in enumerate(held):
            runner.forward(batch_of([(request, 61 + i)], seed=i))
        for step in range(6):
            batch = batch_of([(r, 1) for r in held], seed=step)
            want = decoder.step(batch, 128, "uncaptured").clone()
            written = kv.latent_pool[:, 64:].clone()
            kv.latent_pool[:, :64] = float("nan")
            assert same(decoder.step(batch, 128), want) and same(kv.latent_pool[:, 64:], written)
        for request in held:
            request.close()
    kv.close()
