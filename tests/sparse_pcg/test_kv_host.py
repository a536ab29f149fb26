"""Pages that went to the host and came back: no byte is lost, whatever else happens meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_pcg.kv import EvictedPages, HostKV, OutOfPages, PagedKV, RequestPages, TransferError
from sparse_pcg.kv.page_copy import copy_pages, copy_scattered, page_runs
from tests.sparse_pcg.host_pools import Failing, Gate, filled, holds, intact, pools, stamp, until_failed
from tests.sparse_pcg.toys import same


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
