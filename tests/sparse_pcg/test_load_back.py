"""KV pages that went to the host and came back: no byte is lost, and nothing reads a layer before it is there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_pcg
from sparse_pcg.kv import EvictedPages, HostKV, OutOfPages, PagedKV, RequestPages, TransferError
from sparse_pcg.kv.page_copy import copy_pages, copy_scattered, page_runs
from tests.sparse_pcg.sequences import Driver, Subject
from tests.sparse_pcg.test_batch_sequences import CONFIG, build
from tests.sparse_pcg.test_runner import batch_of
from tests.sparse_pcg.toys import same

PATIENCE = 30.0  # seconds after which a test that waits for another thread gives up


def pools(pages: int = 8, host_pages: int = 8, layout: str = "bf16") -> tuple[PagedKV, HostKV]:
    kv = PagedKV(3, pages, layout, index_layers=(0, 2), poison=True)
    return kv, HostKV(kv, host_pages)


def stamp(kv: PagedKV, page: int, value: int) -> None:
    """Write bytes into a page that tell page, layer and kind."""
    for layer in range(kv.num_layers):
        kv.latent_kv[layer].view(torch.uint8).view(kv.num_pages, -1)[page] = (value + layer) % 251
        if layer in kv.index_k:
            kv.index_k[layer][page] = (value + 100 + layer) % 251


def holds(kv: PagedKV, page: int, value: int) -> bool:
    return all(
        bool((kv.latent_kv[layer].view(torch.uint8).view(kv.num_pages, -1)[page] == (value + layer) % 251).all())
        and (layer not in kv.index_k or bool((kv.index_k[layer][page] == (value + 100 + layer) % 251).all()))
        for layer in range(kv.num_layers)
    )


def filled(kv: PagedKV, tokens: int, value: int) -> RequestPages:
    """A request of ``tokens`` tokens whose page i is stamped ``value + 10 i``."""
    request = kv.request()
    request.extend(tokens)
    for i, page in enumerate(request.pages):
        stamp(kv, page, value + 10 * i)
    return request


def intact(kv: PagedKV, request: RequestPages, value: int) -> bool:
    return all(holds(kv, page, value + 10 * i) for i, page in enumerate(request.pages))


class Gate:
    """In place of a copy: holds it back, layer by layer, until it is let through."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy, self._open, self.started = copy, threading.Semaphore(0), 0

    def __call__(self, layer: int, pairs: list[tuple[int, int]]) -> None:
        self.started += 1
        if not self._open.acquire(timeout=PATIENCE):
            raise RuntimeError("the gate stayed shut")
        self._copy(layer, pairs)

    def let(self, layers: int) -> None:
        self._open.release(layers)


class Failing:
    """In place of a copy: raises the first ``times`` times that it comes to ``layer``."""

    def __init__(self, copy: Callable[..., None], layer: int, times: int) -> None:
        self._copy, self._layer, self._times = copy, layer, times

    def __call__(self, layer: int, pairs: list[tuple[int, int]]) -> None:
        if layer == self._layer and self._times:
            self._times -= 1
            raise OSError("a broken copy")
        self._copy(layer, pairs)


def until_failed(host: HostKV) -> None:
    """Until the first load has failed, without asking for it."""
    deadline = time.monotonic() + PATIENCE
    while host._loads[0].transfer.error is None and time.monotonic() < deadline:
        time.sleep(0.001)


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bf16", "fp8_packed", "fp8"])
def test_what_was_evicted_comes_back_in_other_pages(layout: str) -> None:
    kv, host = pools(layout=layout)
    request = filled(kv, 150, 7)
    evicted = host.evict(request)
    assert (request.pages, request.num_tokens, evicted.num_tokens) == ([], 0, 150)
    host.flush()
    assert kv.allocator.num_free == 7
    other = filled(kv, 64, 90)
    back = host.load(evicted)
    kv.read(0), kv.read(1), kv.read(2)
    assert back.num_tokens == 150 and len(back.pages) == 3 and intact(kv, back, 7) and intact(kv, other, 90)
    back.close()
    other.close()
    kv.close()
    host.close()


PAIRS = st.permutations(range(7)).flatmap(
    lambda a: st.permutations(range(7)).map(lambda b: list(zip(a, b, strict=True)))
)


@given(PAIRS, st.integers(0, 7), st.sampled_from((8448, 4, 8196)))
def test_scattered_pages_are_copied_as_runs_are(pairs: list[tuple[int, int]], count: int, size: int) -> None:
    pairs = pairs[:count]
    source = torch.randint(256, (7, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    want = torch.zeros_like(source)
    for old, new in pairs:
        want[new] = source[old]
    runs = page_runs(pairs)
    assert sorted(
        p for old, new, n in runs for p in zip(range(old, old + n), range(new, new + n), strict=True)
    ) == sorted(pairs)
    assert all((a + n, b + n) not in {(x, y) for x, y, _ in runs} for a, b, n in runs)
    for copy in (copy_pages, partial(copy_scattered, device=source.device)):
        target = torch.zeros_like(source)
        if pairs:
            copy(source, target, pairs)
        assert same(target, want)


def test_pages_come_back_once_copied_and_an_allocation_waits_for_them() -> None:
    kv, host = pools(pages=5)
    host.copy_to_host = gate = Gate(host.copy_to_host)  # type: ignore[method-assign]
    evicted = host.evict(filled(kv, 256, 1))
    assert kv.allocator.num_free == 0
    threading.Timer(0.05, gate.let, (3,)).start()
    request = filled(kv, 128, 50)  # blocks until the copies are done
    assert gate.started == 3
    request.close()
    back = host.load(evicted)
    host.wait()
    assert intact(kv, back, 1)


def test_a_request_that_is_still_leaving_takes_its_pages_back() -> None:
    kv, host = pools()
    host.copy_to_host = gate = Gate(host.copy_to_host)  # type: ignore[method-assign]
    request = filled(kv, 100, 3)
    before = list(request.pages)
    back = host.load(host.evict(request))
    assert back.pages == before and intact(kv, back, 3)
    gate.let(3)
    host.flush()
    assert intact(kv, back, 3)
    back.close()
    kv.close()
    host.close()


def test_requests_that_share_pages_share_them_on_the_host_and_after() -> None:
    kv, host = pools()
    first = filled(kv, 130, 5)
    second = RequestPages.with_prefix(first, 128)
    second.extend(5)
    stamp(kv, second.pages[2], 77)
    away = host.evict(first), host.evict(second)
    third = away[1].fork(64)
    assert away[0].pages[:2] == away[1].pages[:2] and third.pages == away[0].pages[:1]
    assert host.allocator.num_free == 8 - 4
    host.flush()
    assert kv.allocator.num_free == 7
    a, b, c = host.load(away[0]), host.load(away[1]), host.load(third)
    assert a.pages[:2] == b.pages[:2] and c.pages == a.pages[:1] and a.pages[2] != b.pages[2]
    host.wait()
    assert intact(kv, a, 5) and holds(kv, b.pages[2], 77) and holds(kv, b.pages[0], 5)
    for request in (a, b, c):
        request.close()
    kv.close()
    assert host.allocator.num_free == 8
    host.close()


def test_an_eviction_amid_a_load_keeps_what_the_host_has() -> None:
    kv, host = pools()
    evicted = host.evict(filled(kv, 100, 9))
    host.flush()
    host.copy_to_device = gate = Gate(host.copy_to_device)  # type: ignore[method-assign]
    again = host.evict(host.load(evicted))  # nothing has arrived yet
    gate.let(1 << 10)
    host.wait()
    other = filled(kv, 300, 60)  # in the pages that it was to arrive in
    back = host.load(again)
    host.wait()
    assert intact(kv, back, 9) and intact(kv, other, 60)


def test_what_was_written_after_a_load_is_evicted_too() -> None:
    kv, host = pools()
    back = host.load(host.evict(filled(kv, 100, 9)))
    fork = host.evict(back)
    back = host.load(fork)
    host.wait()
    back.extend(28)
    stamp(kv, back.pages[1], 200)
    last = host.evict(back)
    host.flush()
    back = host.load(last)
    host.wait()
    assert holds(kv, back.pages[0], 9) and holds(kv, back.pages[1], 200)


def test_a_load_whose_pages_were_written_on_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA its last copy may still be under way when the request, whose forward is queued behind it, is evicted."""
    kv, host = pools()
    evicted = host.evict(filled(kv, 100, 9))
    host.flush()
    back = host.load(evicted)
    host.wait()
    stamp(kv, back.pages[1], 200)
    monkeypatch.setattr(host._queue, "finished", lambda transfer: False)
    last = host.evict(back)
    monkeypatch.undo()
    host.flush()
    back = host.load(last)
    host.wait()
    assert holds(kv, back.pages[0], 9) and holds(kv, back.pages[1], 200)


def test_an_eviction_after_a_failed_load_keeps_what_the_host_has() -> None:
    kv, host = pools()
    evicted = host.evict(filled(kv, 100, 9))
    host.flush()
    host.copy_to_device = Failing(host.copy_to_device, 0, 1)  # type: ignore[method-assign]
    back = host.load(evicted)
    until_failed(host)
    back = host.load(host.evict(back))
    host.wait()
    assert intact(kv, back, 9)


def test_a_failed_load_is_an_error_at_each_wait_until_it_works() -> None:
    kv, host = pools()
    evicted = host.evict(filled(kv, 100, 9))
    host.flush()
    host.copy_to_device = Failing(host.copy_to_device, 1, 2)  # type: ignore[method-assign]
    back = host.load(evicted)
    kv.read(0)  # the layer before it has arrived
    for _ in range(2):
        with pytest.raises(TransferError, match=r"load: layer 1 of pages \[\d, \d\] failed \(OSError: a broken copy\)"):
            host.wait()
    host.wait()
    assert intact(kv, back, 9)
    back.close()
    kv.close()
    host.close()


def test_a_failed_load_is_called_off_with_its_request() -> None:
    kv, host = pools()
    evicted = host.evict(filled(kv, 100, 9))
    host.flush()
    host.copy_to_device = Failing(host.copy_to_device, 0, 1)  # type: ignore[method-assign]
    lost = host.load(evicted)
    until_failed(host)
    lost.close()
    other = filled(kv, 7 * 64, 60)
    host.wait()
    host.flush()
    assert intact(kv, other, 60) and host.allocator.num_free == 8


def test_a_failed_eviction_keeps_the_pages_and_says_so_when_they_are_needed() -> None:
    kv, host = pools(pages=4)
    host.copy_to_host = Failing(host.copy_to_host, 2, 2)  # type: ignore[method-assign]
    evicted = host.evict(filled(kv, 150, 2))
    with pytest.raises(TransferError, match="eviction: layer 2"):
        kv.request().extend(64)
    back = host.load(evicted)
    assert intact(kv, back, 2)
    back = host.load(host.evict(back))
    host.flush()
    assert intact(kv, back, 2)


def test_bad_use_is_named_and_changes_nothing() -> None:
    kv, host = pools(host_pages=2)
    elsewhere = PagedKV(1, 4)
    request = filled(kv, 150, 1)
    with pytest.raises(OutOfPages):
        host.evict(request)
    assert intact(kv, request, 1) and len(request.pages) == 3
    with pytest.raises(ValueError, match="evict: request must"):
        host.evict(elsewhere.request())
    request.close()
    evicted = host.evict(filled(kv, 128, 2))
    for tokens in (63, 192, -64):
        with pytest.raises(
            ValueError, match=f"fork: num_tokens must be a multiple of 64 and at most 128, got {tokens}"
        ):
            evicted.fork(tokens)
    host.flush()
    room = filled(kv, 64 * 6, 3)
    with pytest.raises(OutOfPages):
        host.load(evicted)
    room.close()
    back = host.load(evicted)
    host.wait()
    assert intact(kv, back, 2)
    with pytest.raises(ValueError, match="load: evicted must be an open request"):
        host.load(evicted)
    with pytest.raises(ValueError, match="of an open request"):
        evicted.fork(64)
    with pytest.raises(ValueError, match="without a host pool"):
        HostKV(kv, 1)
    with pytest.raises(ValueError, match="num_pages"):
        HostKV(elsewhere, 0)
    closed = host.evict(back)
    closed.close()
    closed.close()
    kv.close()
    host.close()
    with pytest.raises(ValueError, match="which must not be closed"):
        host.evict(kv.request())
    HostKV(kv, 1).close()


class _Model:
    """Requests of one page list each, on the device or away, and what each page must hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv, self.host = pools(pages=10, host_pages=9)
        self.live: list[tuple[RequestPages | EvictedPages, list[int]]] = []
        self.next_value = 0
        for name in ("copy_to_host", "copy_to_device"):
            setattr(self.host, name, self._unreliable(getattr(self.host, name)))

    def _unreliable(self, copy: Callable[..., None]) -> Callable[..., None]:
        def slow(layer: int, pairs: list[tuple[int, int]]) -> None:
            if self.rng.random() < 0.2:
                time.sleep(0.001)
            if self.rng.random() < 0.05:
                raise OSError("a broken copy")
            copy(layer, pairs)

        return slow

    def patiently(self, act: Callable[[], Any]) -> Any:
        for _ in range(100):
            try:
                return act()
            except TransferError:
                continue
        raise AssertionError("never came through")

    def write(self, request: RequestPages, values: list[int], at: int) -> None:
        self.patiently(self.host.wait)
        for i in range(at, len(request.pages)):
            self.next_value += 1
            values[i:] = [self.next_value]
            stamp(self.kv, request.pages[i], self.next_value)

    def step(self, action: str, which: int, tokens: int) -> None:
        if action == "new":
            request = self.kv.request()
            self.live.append((request, []))
        if not self.live:
            return
        place = which % len(self.live)
        held, values = self.live[place]
        away = isinstance(held, EvictedPages)
        if action in ("new", "extend") and isinstance(held, RequestPages):
            # A forward would write the last page on, and the pages after it.
            at = held.num_tokens // 64
            self.patiently(lambda: held.extend(tokens))
            self.write(held, values, at)
        elif action == "evict" and isinstance(held, RequestPages):
            self.live[place] = (self.host.evict(held), values)
        elif action == "load" and isinstance(held, EvictedPages):
            self.live[place] = (self.patiently(lambda: self.host.load(held)), values)
        elif action == "share":
            full = held.num_tokens // 64
            share = held.fork if isinstance(held, EvictedPages) else None
            new = share(64 * full) if share else RequestPages.with_prefix(held, 64 * full)  # type: ignore[arg-type]
            self.live.append((new, values[:full]))
        elif action == "close":
            held.close()
            del self.live[place]
        elif action == "check" and not away:
            self.patiently(self.host.wait)
            assert all(holds(self.kv, p, v) for p, v in zip(held.pages, values, strict=True))

    def end(self) -> None:
        for held, values in self.live:
            back = held
            if isinstance(held, EvictedPages):
                try:
                    back = self.patiently(lambda h=held: self.host.load(h))
                except OutOfPages:
                    held.close()
                    continue
            self.patiently(self.host.wait)
            assert all(holds(self.kv, p, v) for p, v in zip(back.pages, values, strict=True))
            back.close()
        self.patiently(self.kv.close)
        assert self.host.allocator.num_free == 9 and self.kv.allocator.num_free == 9
        self.host.close()


ACTIONS = st.sampled_from(("new", "extend", "evict", "evict", "load", "load", "share", "close", "check"))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(ACTIONS, st.integers(0, 5), st.integers(1, 150)), min_size=5, max_size=40), st.integers(0, 99)
)
def test_no_interleaving_loses_a_byte(steps: list[tuple[str, int, int]], seed: int) -> None:
    model = _Model(seed)
    for step in steps:
        try:
            model.step(*step)
        except OutOfPages:
            continue
    model.end()


# --- the runner -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[sparse_pcg.PrefillRunner, PagedKV, HostKV]]:
    torch._dynamo.reset()
    sparse_pcg.reset()
    runner, kv = build(pages=12)
    host = HostKV(kv, 12)
    yield runner, kv, host
    sparse_pcg.reset()


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
    runner, kv = build()
    stays, roomy = build(pages=64)
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
