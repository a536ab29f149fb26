"""Memory at fixed addresses: views by bytes, stable copies of outputs, and the pool that captured graphs share.

Aliasing is kept throughout. Two views of one storage stay two views of one storage, whether they are an operator's
outputs, a caller's arguments or what a plain call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ALIGN = 256
_CHUNK = 1 << 20


def storage_ptr(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage; 0 for an empty one, which aliases nothing."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def span(itemsize: int, offset: Any, sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """First byte and one past the last byte of a view of a storage."""
    start = offset * itemsize
    if 0 in sizes:
        return start, start
    last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return start, start + (last + 1) * itemsize


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """``span`` of a tensor."""
    return span(tensor.element_size(), tensor.storage_offset(), tensor.shape, tensor.stride())


def overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Per tensor: the first tensor whose memory it overlaps (itself, if it is the first), and how many bytes after it.

    Overlap is transitive: a tensor that touches two others joins them. Disjoint views of one storage are apart.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault((storage_ptr(tensor) if tensor.numel() else 0) or -i - 1, []).append(i)
    result = [(i, 0) for i in range(len(tensors))]
    for members in by_storage.values():
        if len(members) == 1:
            continue
        spans = {i: byte_span(tensors[i]) for i in members}
        first: dict[int, int] = {}
        reach, chain = -1, -1
        for i in sorted(members, key=lambda i: spans[i]):  # a sweep along the storage
            if chain < 0 or spans[i][0] >= reach:
                chain = i
            first[i] = chain
            reach = max(reach, spans[i][1])
        for chain in set(first.values()):
            joined = [i for i in members if first[i] == chain]
            for i in joined:
                result[i] = (min(joined), spans[i][0] - spans[min(joined)][0])
    return result


def view_bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes [start, stop) of the tensor's storage, as uint8."""
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def view_like(backing: torch.Tensor, like: torch.Tensor, shift: int) -> torch.Tensor:
    """A tensor with the type, shape, strides and lazy conjugation of ``like`` on the storage of ``backing``.

    shift: bytes to add to ``like``'s byte offset.
    """
    offset = like.storage_offset() * like.element_size() + shift
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        view = empty.set_(backing.untyped_storage(), offset // like.element_size(), like.shape, like.stride())
        view = view.conj() if like.is_conj() else view
        return view._neg_view() if like.is_neg() else view


def alias(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] at an address on a CUDA device. It does not own the memory."""
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


class Pool:
    """Owner of the memory that graphs write: all buckets of one owner lie over one another.

    On CUDA it is a graph memory pool, kept alive by ``owner``. Emulated, it is a few chunks of host memory handed out
    from the start again for each bucket, so that a replay really overwrites what another bucket left.
    """

    def __init__(self, device: torch.device, handle: Any = None, owner: Any = None) -> None:
        self.device = device
        self.handle = handle
        self.owner = owner
        self.held: dict[int, torch.Tensor] = {}  # storages of the bucket being captured that a later step reads
        self._chunks: list[Any] = []
        self._chunk = self._used = 0
        self._lent: dict[int, Any] = {}
        self._free: list[Any] = []
        self._kept: list[torch.Tensor] = []

    def begin_bucket(self) -> None:
        """From here on memory is handed out from the start of the pool again."""
        self._chunk = self._used = 0
        self._lent.clear()
        self._free.clear()

    def hold(self, tensors: Sequence[Any]) -> None:
        """Keep the storages of these tensors from being given to later pieces, until ``let_go``."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self.held.setdefault(storage_ptr(tensor), tensor)

    def let_go(self, pointer: int) -> None:
        """No later step of the bucket being captured reads the storage at ``pointer``: it may be handed out again."""
        self.held.pop(pointer, None)
        piece = self._lent.pop(pointer, None)
        if piece is not None:
            piece.view("int32")[:] = _POISON_WORD
            self._free.append(piece)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """``nbytes`` as uint8, a storage of its own, at an address that stays."""
        if device.type != "cpu":
            with torch.inference_mode(False):
                kept = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
            self._kept.append(kept)
            return kept
        import numpy as np

        size = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        for i, piece in enumerate(self._free):
            if len(piece) >= size:
                del self._free[i]
                if len(piece) > size:
                    self._free.append(piece[size:])
                return self._lend(piece[:size])
        while self._chunk < len(self._chunks) and len(self._chunks[self._chunk]) - self._used < size:
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(np.zeros(max(size, _CHUNK), dtype=np.uint8))
        piece = self._chunks[self._chunk][self._used : self._used + size]
        self._used += size
        return self._lend(piece)

    def _lend(self, piece: Any) -> torch.Tensor:
        self._lent[piece.ctypes.data] = piece
        with torch.inference_mode(False):
            return torch.from_numpy(piece)

    @property
    def nbytes(self) -> int:
        """Bytes held: the graph pool's on CUDA, the chunks' when emulated."""
        held = sum(len(c) for c in self._chunks) + sum(t.numel() for t in self._kept)
        return held + sum(s["total_size"] for s in self._segments())

    def poison(self) -> None:
        """Overwrite all that graphs write: NaN in every float type, a large negative number in every int type."""
        for chunk in self._chunks:
            chunk.view("int32")[:] = _POISON_WORD
        for segment in self._segments():
            memory = alias(segment["address"], segment["total_size"], self.device)
            memory.view(torch.int32).fill_(_POISON_WORD)

    def _segments(self) -> list[dict[str, Any]]:
        if self.handle is None:
            return []
        found = torch.cuda.memory_snapshot()
        return [s for s in found if tuple(s.get("segment_pool_id", (0, 0))) == tuple(self.handle)]

    def release(self) -> None:
        """Give the memory back. What an emulated pool held is poisoned first: a stale reader sees it."""
        for chunk in self._chunks:
            chunk.view("int32")[:] = _POISON_WORD
        self._chunks.clear()
        self._kept.clear()
        self.held.clear()
        self.handle = self.owner = None
        self.begin_bucket()


# 0xFFF1FFF1: a NaN as float64, float32, bfloat16 and float16, every second e4m3 a NaN; as an int a negative number, and
# as int32 one far below any index that Python-style indexing takes from the end.
_POISON_WORD = -0x000E000F


class StableOutputs:
    """Outputs of a function that is run again and again, kept at fixed addresses.

    An output on the storage of an input is that view and is never copied; the others' storages are copied, whole, into
    memory of the pool, once per storage.
    """

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any], pool: Pool) -> None:
        self._inputs = {storage_ptr(t) for t in inputs if isinstance(t, torch.Tensor)} - {0}
        self._owned: list[torch.Tensor] = []
        self.pattern = self._pattern(outputs)
        self.tensors: list[Any] = []
        for out, place in zip(outputs, self.pattern, strict=True):
            if place is None or place == "input":
                self.tensors.append(out)
                continue
            if place == len(self._owned):
                self._owned.append(pool.allocate(out.untyped_storage().nbytes(), out.device))
            self.tensors.append(view_like(self._owned[place], out, 0))
        self.copy_from(outputs)

    def _pattern(self, outputs: Sequence[Any]) -> list[Any]:
        """Per output: None (not a tensor), "input", or the number of its own storage by first use."""
        seen: dict[int, int] = {}
        pattern: list[Any] = []
        for out in outputs:
            if not isinstance(out, torch.Tensor):
                pattern.append(None)
            elif (pointer := storage_ptr(out)) in self._inputs:
                pattern.append("input")
            else:
                # An empty storage aliases nothing: a number of its own.
                pattern.append(seen.setdefault(pointer or -len(pattern) - 1, len(seen)))
        return pattern

    def copy_from(self, outputs: Sequence[Any]) -> None:
        """Copy a new run's outputs to the fixed addresses. Raises RuntimeError if they alias otherwise."""
        pattern = self._pattern(outputs)
        if pattern != self.pattern:
            raise RuntimeError(f"outputs alias otherwise than at capture: {pattern}, at capture {self.pattern}")
        done: set[int] = set()
        for out, place, stable in zip(outputs, pattern, self.tensors, strict=True):
            if not isinstance(place, int) or place in done:
                continue
            if out.shape != stable.shape or out.dtype != stable.dtype or out.stride() != stable.stride():
                raise RuntimeError(
                    f"an output changed from {stable.dtype}{tuple(stable.shape)} to {out.dtype}{tuple(out.shape)}"
                )
            done.add(place)
            nbytes = min(out.untyped_storage().nbytes(), self._owned[place].numel())
            if nbytes:
                self._owned[place][:nbytes].copy_(view_bytes(out, 0, nbytes))
