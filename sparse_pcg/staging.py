"""Host memory that batches are packed in, and what brings one from there into the static buffers of a runner."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from custom_ops.batch_metadata import BatchMetadata
from custom_ops.metadata_header import HEADER_WORDS, Description, fill_described, takes_header_at_once

from .counters import count_fallback
from .errors import CaptureError
from .graphs import GraphDevice
from .memory import Pool

_TURNS = 4
_LEAST_WORDS = 1 << 16


@dataclass
class Turn:
    """Memory for one batch: int32 ``words`` at ``address``, and the header that describes what was packed.

    read: done when the GPU has read the batch before; None on a CPU. launch: replays the graph that reads this header.
    """

    words: np.ndarray
    address: int
    header: torch.Tensor
    header_words: np.ndarray
    read: torch.cuda.Event | None
    launch: Callable[[], Any] | None = None


class Staging:
    """Several ``Turn``s, one packed while a GPU still reads others; with ``record`` a batch costs one graph launch.

    On CUDA the memory is pinned, and the kernel reads it where it is: the host copies nothing to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        # An index, which torch resolves sooner than a device without one.
        self._index = torch.cuda.current_device() if self._cuda and device.index is None else device.index
        self._stream: tuple[Any, Any] = (None, None)
        self._metadata: BatchMetadata | None = None  # whose buffers the graphs fill
        self._at = 0
        self._turns: list[Turn] = []

    def packs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor must be packed; one that is on the GPU already is read where it is."""
        return not self._cuda or tensor.device != self.device

    def take(self, words: int) -> Turn:
        """The next turn, once nothing reads it any more, with room for ``words`` words."""
        if not self._turns or len(self._turns[0].words) < words:
            self._grow(max(_LEAST_WORDS, 1 << (words - 1).bit_length()))
        self._at = (self._at + 1) % _TURNS
        turn = self._turns[self._at]
        if turn.read is not None:
            turn.read.synchronize()
        return turn

    def fill(self, turn: Turn, given: Description, metadata: BatchMetadata) -> None:
        """Bring what ``given`` describes into ``metadata``, in the order of the current stream.

        ``given`` names memory of ``turn``, and of tensors on the device that the caller keeps until now.
        """
        turn.header_words[:] = given
        if turn.launch is not None and metadata is self._metadata:
            turn.launch()
        else:
            fill_described(metadata, turn.header)
        if turn.read is not None:
            turn.read.record(self._current_stream())

    def record(self, metadata: BatchMetadata, device: GraphDevice, pool: Pool) -> None:
        """From now on batches come into ``metadata`` by graphs, one a turn; it holds an empty batch afterwards.

        Where they cannot be captured, which is logged and counted, batches go on without; so they do on a GPU where the
        op's reference is asked for.
        """
        turns = [self.take(0) for _ in range(_TURNS)]
        for turn in turns:
            turn.header_words[:] = 0
        fill_described(metadata, turns[0].header)  # compiles
        if self._cuda and takes_header_at_once(metadata):
            return
        try:
            with device.session(pool):
                launches = [device.capture(partial(_filled, metadata, turn.header), (), pool)[0] for turn in turns]
        except CaptureError as error:
            count_fallback("capture_failed", f"filling the row buffers: {error}")
            return
        finally:
            if self._cuda:
                torch.cuda.current_stream(self._index).synchronize()  # the headers were read
        for turn, launch in zip(turns, launches, strict=True):
            turn.launch = launch
        self._metadata = metadata

    @property
    def recorded(self) -> bool:
        """Whether there are graphs."""
        return self._metadata is not None

    def drop(self) -> None:
        """Drop the graphs; batches go on without."""
        self._metadata = None
        for turn in self._turns:
            turn.launch = None

    def _current_stream(self) -> torch.cuda.Stream:
        now = torch._C._cuda_getCurrentStream(self._index)  # to make a Stream of it takes longer than to record one
        if now != self._stream[0]:
            self._stream = now, torch.cuda.current_stream(self._index)
        return self._stream[1]

    def _grow(self, words: int) -> None:
        memory = [torch.empty(words, dtype=torch.int32, pin_memory=self._cuda) for _ in range(_TURNS)]
        if not self._turns:
            headers = [torch.zeros(HEADER_WORDS, dtype=torch.int64, pin_memory=self._cuda) for _ in range(_TURNS)]
            events = [torch.cuda.Event() if self._cuda else None for _ in range(_TURNS)]
            parts = zip(memory, headers, events, strict=True)
            self._turns = [Turn(m.numpy(), m.data_ptr(), h, h.numpy(), e) for m, h, e in parts]
            if self._cuda:  # pinned memory that is let go serves another at once
                weakref.finalize(self, _wait, self._turns).atexit = False
            return
        _wait(self._turns)
        for turn, tensor in zip(self._turns, memory, strict=True):
            turn.words, turn.address = tensor.numpy(), tensor.data_ptr()


def _filled(metadata: BatchMetadata, header: torch.Tensor) -> list[Any]:
    fill_described(metadata, header)
    return []


def _wait(turns: list[Turn]) -> None:
    for turn in turns:
        if turn.read is not None:
            turn.read.synchronize()
