"""What the tests of pages in host memory share: pages whose bytes tell where they belong, copies that wait or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from sparse_pcg.kv import HostKV, PagedKV, RequestPages
from sparse_pcg.kv.host import EvictedPages
from sparse_pcg.kv.transfers import Transfer

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


def copy_when_awaited(host: HostKV) -> None:
    """From now on a layer is loaded only once something waits for it: what does not wait runs before its pages come."""
    queue, changed = host._queue, threading.Condition()
    plain_copy, plain_load, plain_wait = host.copy_to_device, host.load, queue.wait
    awaited = -1  # the last layer

    def move_to(layer: int) -> None:
        nonlocal awaited
        with changed:
            awaited = layer
            changed.notify_all()

    def load(evicted: EvictedPages) -> RequestPages:
        move_to(-1)
        return plain_load(evicted)

    def wait(transfer: Transfer, layer: int | None = None) -> None:
        move_to(max(awaited, queue.num_layers - 1 if layer is None else layer))
        plain_wait(transfer, layer)

    def copy(layer: int, pairs: list[tuple[int, int]]) -> None:
        with changed:
            if not changed.wait_for(lambda: awaited >= layer, timeout=PATIENCE):
                raise RuntimeError("nothing waited")
        plain_copy(layer, pairs)

    host.load, host.copy_to_device, queue.wait = load, copy, wait  # type: ignore[method-assign]
