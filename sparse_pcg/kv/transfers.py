"""Copies between pools in the background: one after the other, each layer by layer, with something to wait on.

One worker thread runs them in the order they were given. On the CPU it copies; on CUDA it issues the copies on a stream
of its own and records an event per layer. As there is one order, a copy never overtakes one that it depends on.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

CopyLayer = Callable[[int, list[tuple[int, int]]], None]  # (layer, (source page, target page) pairs)


class TransferError(RuntimeError):
    """Copies of pages failed. They are tried again, so the next wait either finds them done or raises again."""


@dataclass(eq=False)
class Transfer:
    """Copies of the pages ``pairs`` (source, target) in all layers.

    A pair may be taken out of ``pairs``: it is then not copied in the layers that are not begun, nor tried again.
    """

    what: str
    pairs: list[tuple[int, int]]
    copy: CopyLayer
    ready: Any  # event after which the source may be read and the target written; None on the CPU
    done: int = 0  # layers
    error: BaseException | None = None
    events: list[Any] = field(default_factory=list)  # per layer that is done, on CUDA


class TransferQueue:
    """Runs transfers of pools with ``num_layers`` layers on ``device``, in order."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.num_layers, self.device = num_layers, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._stop: Callable[[], Any] | None = None

    def submit(self, what: str, pairs: list[tuple[int, int]], copy: CopyLayer) -> Transfer:
        """Start a transfer, after all that the current stream has been given so far."""
        if self._worker is None:
            arguments = (self._queue, self._changed, self.num_layers, self._stream)
            self._worker = threading.Thread(target=_work, args=arguments, name="kv-transfers", daemon=True)
            self._worker.start()
            self._stop = weakref.finalize(self, self._queue.put, None)
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        transfer = Transfer(what, pairs, copy, ready)
        self._queue.put(transfer)
        return transfer

    def wait(self, transfer: Transfer, layer: int | None = None) -> None:
        """Wait for a layer (None: all): on the CPU until it is copied; on CUDA the current stream waits.

        Raises TransferError if copies of it failed; they are then tried again.
        """
        last = self.num_layers - 1 if layer is None else layer
        with self._changed:
            self._changed.wait_for(lambda: transfer.done > last or transfer.error is not None)
            error = transfer.error if transfer.done <= last else None
            if error is not None and not transfer.pairs:
                return
            if error is not None:
                failed = transfer.done
                transfer.error, transfer.done = None, 0
                transfer.events.clear()
                self._queue.put(transfer)
                raise TransferError(
                    f"{transfer.what}: layer {failed} of pages {sorted(p for _, p in transfer.pairs)} failed "
                    f"({type(error).__name__}: {error}); it is tried again"
                ) from error
            event = transfer.events[last] if transfer.events else None
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def issued(self, transfer: Transfer) -> bool:
        """Whether the copies of all layers are done (on the CPU) or in the stream (on CUDA)."""
        with self._changed:
            return transfer.done == self.num_layers

    def finished(self, transfer: Transfer) -> bool:
        """Whether nothing is left to wait for: all is copied, or has failed and was called off."""
        with self._changed:
            if transfer.error is not None:
                return not transfer.pairs
            if transfer.done < self.num_layers:
                return False
            return not transfer.events or bool(transfer.events[-1].query())

    def finish(self, transfer: Transfer) -> None:
        """Block the host until all layers are copied. Raises TransferError as ``wait`` does."""
        self.wait(transfer)
        with self._changed:
            event = transfer.events[-1] if transfer.events else None
        if event is not None:
            event.synchronize()

    def close(self) -> None:
        """End the worker after what it has been given."""
        if self._stop is not None and self._worker is not None:
            self._stop()
            self._worker.join()


def _work(jobs: queue.SimpleQueue[Transfer | None], changed: threading.Condition, num_layers: int, stream: Any) -> None:
    while (transfer := jobs.get()) is not None:
        try:
            _run(transfer, changed, num_layers, stream)
        except BaseException as error:
            with changed:
                transfer.error = error
                changed.notify_all()
        del transfer  # it holds the pools


def _run(transfer: Transfer, changed: threading.Condition, num_layers: int, stream: Any) -> None:
    if stream is not None:
        stream.wait_event(transfer.ready)
    for layer in range(num_layers):
        event = None
        pairs = list(transfer.pairs)
        if stream is None:
            transfer.copy(layer, pairs)
        else:
            with torch.cuda.stream(stream):
                transfer.copy(layer, pairs)
                event = torch.cuda.Event()
                event.record(stream)
        with changed:
            if event is not None:
                transfer.events.append(event)
            transfer.done = layer + 1
            changed.notify_all()
