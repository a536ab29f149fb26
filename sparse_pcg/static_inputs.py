"""Arguments of a plain call at fixed addresses: copied in before a replay, and back where the graph writes them.

Arguments that overlap are copied as one span of bytes, so that they alias in the buffers as they do for the
caller. What a replay returns is delivered as PyTorch would return it: an argument as itself, a view of an argument as a
view of the caller's, anything else as a fresh tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .memory import byte_span, overlaps, storage_ptr, view_bytes, view_like


class Buffers:
    """Backing memory of the copied arguments: one per argument, shared by all buckets (each call fills it)."""

    def __init__(self) -> None:
        self._backing: dict[int, torch.Tensor] = {}

    def get(self, slot: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """At least ``nbytes``; a buffer that proved too small stays alive in the plans that use it."""
        held = self._backing.get(slot)
        if held is None or held.numel() < nbytes or held.device != device:
            with torch.inference_mode(False):
                held = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device)
            self._backing[slot] = held
        return held

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() for t in self._backing.values())


class StaticInputs:
    """The inputs of one plan.

    moving: positions of tensor inputs that a call may give at another address. written: those that the graph writes.
    """

    def __init__(self, args: Sequence[Any], moving: Sequence[int], written: frozenset[int], buffers: Buffers) -> None:
        self.tensors: list[Any] = list(args)
        self._groups: list[_Group] = []
        grouped: dict[int, list[int]] = {}
        for i, (first, _) in zip(moving, overlaps([args[i] for i in moving]), strict=True):
            grouped.setdefault(first, []).append(i)
        for members in grouped.values():
            group = _Group(args, members, any(i in written for i in members), buffers)
            self._groups.append(group)
            for i, tensor in zip(members, group.tensors, strict=True):
                self.tensors[i] = tensor
        self._group_of = {storage_ptr(g.backing): g for g in self._groups}
        self._fixed = {
            storage_ptr(t) for i, t in enumerate(args) if isinstance(t, torch.Tensor) and i not in set(moving)
        }

    def copy_in(self, args: Sequence[Any]) -> None:
        """Bring the caller's values to the fixed addresses."""
        for group in self._groups:
            group.copy_in(args)

    def copy_back(self, args: Sequence[Any]) -> None:
        """Bring what the graph wrote back to the caller's tensors."""
        for group in self._groups:
            if group.written:
                group.copy_back(args)

    def deliver(self, outputs: Sequence[Any], args: Sequence[Any], static_outputs: bool) -> list[Any]:
        """``outputs`` (at fixed addresses) as the caller may have them."""
        fresh: dict[int, list[int]] = {}
        result: list[Any] = list(outputs)
        for i, out in enumerate(outputs):
            if not isinstance(out, torch.Tensor):
                continue
            pointer = storage_ptr(out)
            if pointer in self._group_of:
                result[i] = self._group_of[pointer].on_caller(out, args)
            elif pointer and pointer in self._fixed:
                result[i] = out
            elif not static_outputs:
                fresh.setdefault(pointer or -i - 1, []).append(i)
        for members in fresh.values():
            spans = [byte_span(outputs[i]) for i in members]
            start, stop = min(s for s, _ in spans), max(e for _, e in spans)
            start -= start % 16  # keep the alignment that compiled code may rely on
            with torch.inference_mode(False):
                copy = view_bytes(outputs[members[0]], start, stop).clone()
            for i in members:
                result[i] = view_like(copy, outputs[i], -start)
        return result


class _Group:
    """Arguments whose memory overlaps, and the span of storage they cover."""

    def __init__(self, args: Sequence[Any], members: list[int], written: bool, buffers: Buffers) -> None:
        self.members, self.written = members, written
        start, stop = self._span(args)
        self.backing = buffers.get(members[0], stop - start, args[members[0]].device)
        self.tensors = [view_like(self.backing, args[i], -start) for i in members]
        self._whole = len(members) > 1 or not _copied_as_it_is(args[members[0]])

    def _span(self, args: Sequence[Any]) -> tuple[int, int]:
        spans = [byte_span(args[i]) for i in self.members]
        start = min(s for s, _ in spans)
        return start - start % args[self.members[0]].element_size(), max(e for _, e in spans)

    def copy_in(self, args: Sequence[Any]) -> None:
        self._copy(args, back=False)

    def copy_back(self, args: Sequence[Any]) -> None:
        self._copy(args, back=True)

    def _copy(self, args: Sequence[Any], back: bool) -> None:
        first = args[self.members[0]]
        if not self._whole:
            pair = (first, self.tensors[0]) if back else (self.tensors[0], first)
            pair[0].copy_(pair[1])
            return
        start, stop = self._span(args)
        if stop == start:
            return
        theirs, ours = view_bytes(first, start, stop), self.backing[: stop - start]
        if back:
            theirs.copy_(ours)
        else:
            ours.copy_(theirs)

    def on_caller(self, out: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
        """A view of our buffer as the same view of the caller's storage."""
        for i, tensor in zip(self.members, self.tensors, strict=True):
            if _same_view(out, tensor):
                return args[i]
        start, _ = self._span(args)
        return view_like(args[self.members[0]], out, start)


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _copied_as_it_is(tensor: torch.Tensor) -> bool:
    """A contiguous tensor and a sparse view (a few columns of a wide matrix) are copied as tensors, others as bytes."""
    if tensor.is_contiguous():
        return True
    start, stop = byte_span(tensor)
    return stop - start > 2 * tensor.numel() * tensor.element_size() and tensor.numel() > 0
