"""KV pages in host memory: requests evicted to it and loaded back, layer by layer, beside the computation.

Eviction copies a request's pages to the host and gives each device page back once its copy is there. Loading takes
device pages and starts the copies; what runs next waits for them: a captured forward for all layers before it starts,
anything else for each layer as it comes to it (``ForwardContext.loads``). Until a copy to the host is done, or where
another request has loaded a page already, loading takes the page that is still on the device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from custom_ops.batch_metadata import PAGE

from .allocator import PageAllocator
from .page_copy import copy_pages
from .pool import PagedKV
from .requests import RequestPages
from .transfers import Transfer, TransferError, TransferQueue


class EvictedPages:
    """A request on the host: what ``HostKV.evict`` gives and ``HostKV.load`` takes. num_tokens: as it had."""

    def __init__(self, host: HostKV, pages: list[int], num_tokens: int) -> None:
        self.host, self.pages, self.num_tokens = host, pages, num_tokens
        self.closed = False

    def fork(self, num_tokens: int) -> EvictedPages:
        """Another evicted request that begins with the first ``num_tokens`` tokens, in the same pages.

        Raises ValueError unless ``num_tokens`` is a multiple of 64 and at most ``self.num_tokens``.
        """
        if self.closed or num_tokens % PAGE or not 0 <= num_tokens <= self.num_tokens:
            limit = "of an open request" if self.closed else f"and at most {self.num_tokens}"
            raise ValueError(f"fork: num_tokens must be a multiple of {PAGE} {limit}, got {num_tokens}")
        pages = self.pages[: num_tokens // PAGE]
        self.host.hold(pages)
        return EvictedPages(self.host, list(pages), num_tokens)

    def close(self) -> None:
        """Give the pages back instead of loading them."""
        if not self.closed:
            self.closed = True
            self.host.release(self.pages)


@dataclass(eq=False)
class _Leaving:
    """Device pages that are held until their copies are on the host."""

    transfer: Transfer
    pages: list[int]


@dataclass(eq=False)
class _Load:
    """Copies to the device, and the host pages that are held until they are done.

    awaited: a forward has waited for some of it.
    """

    transfer: Transfer
    sources: list[int]
    awaited: bool = False


class HostKV:
    """Room for ``num_pages`` pages of ``kv`` in host memory, pinned where ``kv`` is on a CUDA device.

    One per ``PagedKV``; evict, load and close belong to the thread that schedules. Raises ValueError for a pool that
    has one already, or fewer than one page.
    """

    def __init__(self, kv: PagedKV, num_pages: int) -> None:
        if kv.loads is not None:
            raise ValueError("HostKV: kv must be a pool without a host pool, it has one")
        if num_pages < 1:
            raise ValueError(f"HostKV: num_pages must be at least 1, got {num_pages}")
        self.kv = kv
        self.allocator = PageAllocator(num_pages + 1)
        device = kv.latent_pool.device
        self._device_caches = _by_layer(kv, kv.latent_pool, kv.index_pool, kv.num_pages)
        mirrors = [
            torch.empty(
                pool.shape[0],
                (num_pages + 1) * (pool[0].nbytes // kv.num_pages),
                dtype=torch.uint8,
                pin_memory=device.type == "cuda",
            )
            for pool in (kv.latent_pool, kv.index_pool)
        ]
        self._host_caches = _by_layer(kv, mirrors[0], mirrors[1], num_pages + 1)
        self._queue = TransferQueue(kv.num_layers, device)
        self._leaving: list[_Leaving] = []
        self._loads: list[_Load] = []
        self._lock = threading.Lock()  # of the list of loads, which any thread that runs a forward looks at
        self._wanted: Counter[int] = Counter()  # host page -> evicted requests that have it
        # A device page and a host page with the same content, as long as some evicted request has the host page: a page
        # that two requests have is full, so neither writes on it.
        self._host_of: dict[int, int] = {}
        self._device_of: dict[int, int] = {}
        kv.loads = self
        kv.allocator.on_free.insert(0, self._freed)
        kv.allocator.on_short = self._reclaim

    def evict(self, request: RequestPages) -> EvictedPages:
        """Move ``request`` to the host; it is empty afterwards. Its device pages come back as their copies land.

        Pages that another evicted request shares are not copied again. Raises OutOfPages, with nothing changed, when
        the host has no room; ValueError for a request of another pool.
        """
        if request.allocator is not self.kv.allocator or self.kv.loads is not self:
            raise ValueError("evict: request must have its pages in the kv of this host pool, which must not be closed")
        self._reap()
        arriving = {p: h for load in self._loads if self._unused(load) for h, p in load.transfer.pairs}
        known = [arriving.get(p) or self._host_of.get(p) for p in request.pages]
        fresh = iter(self.allocator.allocate(known.count(None)))
        pages, tokens = request.pages, request.num_tokens
        request.pages, request.num_tokens = [], 0
        self.allocator.share(h for h in known if h is not None)
        targets = [next(fresh) if h is None else h for h in known]
        self._wanted.update(targets)
        pairs = []
        for page, target, before in zip(pages, targets, known, strict=True):
            if before is None:
                pairs.append((page, target))
                self._host_of[page], self._device_of[target] = target, page
        if pairs:
            transfer = self._queue.submit("eviction", pairs, self.copy_to_host)
            self._leaving.append(_Leaving(transfer, [page for page, _ in pairs]))
        self.kv.allocator.free(p for p, h in zip(pages, known, strict=True) if h is not None)
        return EvictedPages(self, targets, tokens)

    def load(self, evicted: EvictedPages) -> RequestPages:
        """Bring ``evicted`` back, which is used up: a request with pages whose content is on its way.

        Raises OutOfPages, with nothing changed, when the device has no room; ValueError for what was loaded or closed
        before, or belongs to another host pool.
        """
        if evicted.host is not self or evicted.closed or self.kv.loads is not self:
            raise ValueError("load: evicted must be an open request of this host pool")
        self._reap()
        here = [self._device_of.get(h) for h in evicted.pages]
        present = [p for p in here if p is not None]
        self.kv.allocator.share(present)  # before the allocation, which may give back what was only leaving
        try:
            fresh = self.kv.allocator.allocate(here.count(None))
        except Exception:
            self.kv.allocator.free(present)
            raise
        evicted.closed = True
        self._wanted.subtract(evicted.pages)
        request, pairs = self.kv.request(), []
        new_pages = iter(fresh)
        for source, page in zip(evicted.pages, here, strict=True):
            if page is None:
                page = next(new_pages)
                pairs.append((source, page))
                self._host_of[page], self._device_of[source] = source, page
            request.pages.append(page)
            if not self._wanted[source]:
                self._forget(source)
        request.num_tokens = evicted.num_tokens
        if pairs:
            load = _Load(self._queue.submit("load", pairs, self.copy_to_device), [h for h, _ in pairs])
            with self._lock:
                self._loads.append(load)
        self._drop(h for h, p in zip(evicted.pages, here, strict=True) if p is not None)
        return request

    def wait(self, layer_id: int | None = None) -> None:
        """What reads or writes a layer (None: all of them) next comes after the loads that are under way.

        On the CPU it blocks, on CUDA the current stream waits; nothing is done inside a capture. Raises TransferError
        if copies failed; they are then tried again, and the next wait tells how that went.
        """
        if not self._loads or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        for load in tuple(self._loads):
            load.awaited = True
            self._queue.wait(load.transfer, layer_id)

    def flush(self) -> None:
        """Block until all copies are done and all evicted pages are free. Raises TransferError if some failed."""
        for transfer in (*(x.transfer for x in self._leaving), *(x.transfer for x in self._loads)):
            self._queue.finish(transfer)
        self._reap()

    def close(self) -> None:
        """End the copies. Raises RuntimeError naming the host pages that some evicted request still has."""
        self.flush()
        self._queue.close()
        self.kv.loads = self.kv.allocator.on_short = None
        self.kv.allocator.on_free.remove(self._freed)
        self.allocator.close()

    # Copies, run by the worker.

    def copy_to_host(self, layer: int, pairs: list[tuple[int, int]]) -> None:
        """Copy device pages to host pages in one layer."""
        for device, host in zip(self._device_caches[layer], self._host_caches[layer], strict=True):
            copy_pages(device, host, pairs)

    def copy_to_device(self, layer: int, pairs: list[tuple[int, int]]) -> None:
        """Copy host pages to device pages in one layer."""
        for device, host in zip(self._device_caches[layer], self._host_caches[layer], strict=True):
            copy_pages(host, device, pairs)

    # Who has which page.

    def hold(self, pages: list[int]) -> None:
        """One more evicted request has these host pages."""
        self.allocator.share(pages)
        self._wanted.update(pages)

    def release(self, pages: list[int]) -> None:
        """One evicted request fewer has these host pages."""
        self._wanted.subtract(pages)
        for page in pages:
            if not self._wanted[page]:
                self._forget(page)
        self._drop(pages)

    def _unused(self, load: _Load) -> bool:
        """No forward can have written on the pages of ``load``: their content is still what is on the host."""
        return not (load.awaited and self._queue.issued(load.transfer))

    def _forget(self, host_page: int) -> None:
        """No evicted request has it: who has its content on the device may write on."""
        page = self._device_of.pop(host_page, None)
        if page is not None and self._host_of.get(page) == host_page:
            del self._host_of[page]

    def _drop(self, host_pages: Iterable[int]) -> None:
        """Let go of host pages. What still copies to one that is free now is called off, lest it be tried again."""
        dropped = list(host_pages)
        self.allocator.free(dropped)
        free = {h for h in dropped if not self.allocator.holders(h)}
        for leaving in self._leaving:
            leaving.transfer.pairs = [(p, h) for p, h in leaving.transfer.pairs if h not in free]

    def _freed(self, pages: list[int]) -> None:
        """Device pages became free: they hold nothing that counts, and nothing needs to arrive there."""
        gone = set(pages)
        for page in gone:
            host_page = self._host_of.pop(page, None)
            if host_page is not None:
                self._device_of.pop(host_page, None)
        self._device_of = {h: p for h, p in self._device_of.items() if p not in gone}
        for load in self._loads:
            load.transfer.pairs = [(h, p) for h, p in load.transfer.pairs if p not in gone]

    def _reap(self) -> None:
        """Let go of what finished copies have held."""
        with self._lock:
            finished = [load for load in self._loads if self._queue.finished(load.transfer)]
            self._loads = [load for load in self._loads if load not in finished]
        for load in finished:
            self._drop(load.sources)
        gone = [leaving for leaving in self._leaving if self._queue.finished(leaving.transfer)]
        self._leaving = [leaving for leaving in self._leaving if leaving not in gone]
        for leaving in gone:
            self.kv.allocator.free(leaving.pages)

    def _reclaim(self, count: int) -> None:
        """The allocator is ``count`` pages short: wait for evictions under way, the oldest first, until it is not."""
        enough = self.kv.allocator.num_free + count
        failure: TransferError | None = None
        for leaving in tuple(self._leaving):
            self._reap()
            if self.kv.allocator.num_free >= enough:
                return
            try:
                self._queue.finish(leaving.transfer)
            except TransferError as error:
                failure = failure or error
        self._reap()
        if failure is not None and self.kv.allocator.num_free < enough:
            raise failure


def _by_layer(kv: PagedKV, latent: torch.Tensor, index: torch.Tensor, pages: int) -> dict[int, list[torch.Tensor]]:
    """Per layer its caches as bytes, [pages, bytes of a page]."""
    caches = {i: [cache.view(torch.uint8).view(pages, -1)] for i, cache in enumerate(latent)}
    for i, cache in zip(kv.index_k, index, strict=True):
        caches[i].append(cache.view(pages, -1))
    return caches
