"""Whether rows mix so that pad rows reach valid ones, found by running twice and comparing.

The second run has other values in its last rows, the pads, and follows the first op by op: a host read gives what it
gave before, and a cut gives its valid rows back, since a cut reads the valid row count when it runs. An op whose
result differs anywhere but in the pads is a suspect; its result is put right and the run goes on. Then as many suspects
as possible are left alone, last first, as long as no valid row of the model's results or of an operator's arguments
changes: a sort that a later op undoes is none. What must be put right is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..memory import storage_ptr
from .findings import Findings, site

_MOST = 24  # suspects that are looked into
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of floats; wider for narrower types


@dataclass
class _Step:
    func: Any
    outputs: list[torch.Tensor]
    result: Any
    where: tuple[str, int]


class Rows:
    """How many rows there are, and where the pads begin."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.valid = rows - max(2, rows // 4)

    def perturbed(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A copy with other values in the pad rows: floats are drawn anew, anything else changes places with others."""
        result = tensor.clone()
        tail = result.narrow(dim, self.valid, self.rows - self.valid)
        if tensor.dtype.is_floating_point and tensor.element_size() >= 2:
            generator = torch.Generator().manual_seed(1)
            noise = torch.randn(tail.shape, generator=generator).to(tail.device, tail.dtype)
            tail.copy_(noise * (3 * tensor.float().std(unbiased=False).item() + 1))
        else:
            tail.copy_(tail.roll(1, dim))
        return result

    def confined(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two results differ in pad rows only: at the end of some dim that the rows divide."""
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        differs = _differs(a, b)
        if not bool(differs.any()):
            return True
        for dim, size in enumerate(a.shape):
            if size and size % self.rows == 0:
                head = size // self.rows * self.valid
                if not bool(differs.narrow(dim, 0, head).any()):
                    return True
        return False


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.is_floating_point:
        rtol = _TOLERANCE.get(a.dtype, 3e-2)
        a, b = a.double(), b.double()
        scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
        return ~torch.isclose(a, b, rtol=rtol, atol=rtol * 1e-2 * scale, equal_nan=True)
    if a.is_complex():
        return _differs(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
    return a != b


class _Recorder:
    """The first run: keeps every op's results, and what operators and the ops at ``wanted`` are given."""

    def __init__(self, default: tuple[str, int], wanted: Sequence[int] = ()) -> None:
        self.steps: list[_Step] = []
        self.arguments: dict[int, list[torch.Tensor]] = {}
        self._default, self._wanted = default, set(wanted)

    def given(self, func: Any, tensors: list[torch.Tensor]) -> None:
        if func.namespace != "aten" or len(self.steps) in self._wanted:
            self.arguments[len(self.steps)] = [t.clone() for t in tensors]

    def seen(self, func: Any, result: Any, written: list[torch.Tensor], cut: bool) -> Any:
        kept = pytree.tree_map_only(torch.Tensor, torch.clone, result)
        outputs = [t.clone() for t in _outputs(result, written)]
        self.steps.append(_Step(func, outputs, kept, site(self._default)))
        return result


class _Follower:
    """A later run. healed: the places that are put right. collect: whether further suspects join them."""

    def __init__(self, first: _Recorder, rows: Rows, state: set[int], healed: set[int], collect: bool) -> None:
        self.steps, self.first = first.steps, first
        self.rows, self.state, self.healed, self.collect = rows, state, set(healed), collect
        self.at = 0
        self.lost = False
        self.reached = False

    def given(self, func: Any, tensors: list[torch.Tensor]) -> None:
        if not self.lost and (func.namespace != "aten" or self.at in self.healed):
            for tensor, kept in zip(tensors, self.first.arguments.get(self.at, ()), strict=False):
                if storage_ptr(tensor) not in self.state:
                    self.reached = self.reached or not self.rows.confined(tensor, kept)

    def seen(self, func: Any, result: Any, written: list[torch.Tensor], cut: bool) -> Any:
        place, self.at = self.at, self.at + 1
        if self.lost or place >= len(self.steps) or self.steps[place].func is not func:
            self.lost = True
            return result
        step = self.steps[place]
        outputs = _outputs(result, written)
        if cut:
            return self._restore_valid(step, outputs, result)
        if _reads_data(func):
            return pytree.tree_map_only(torch.Tensor, torch.clone, step.result)
        if place in self.healed:
            return self._heal(func, step, outputs, result)
        pairs = [(o, k) for o, k in zip(outputs, step.outputs, strict=True) if storage_ptr(o) not in self.state]
        if self.collect and not all(self.rows.confined(o, k) for o, k in pairs):
            self.healed.add(place)
            return self._heal(func, step, outputs, result)
        return result

    def _restore_valid(self, step: _Step, outputs: list[Any], result: Any) -> Any:
        if not isinstance(result, torch.Tensor) and not outputs:
            return step.result  # a read on the host
        for out, kept in zip(outputs, step.outputs, strict=True):
            if out.shape != kept.shape:
                return step.result
            by_rows = out.dim() and out.shape[0] == self.rows.rows
            part = slice(0, self.rows.valid) if by_rows else slice(None)
            (out[part] if out.dim() else out).copy_(kept[part] if out.dim() else kept)
        return result

    def _heal(self, func: Any, step: _Step, outputs: list[Any], result: Any) -> Any:
        if getattr(func, "is_view", False):
            return pytree.tree_map_only(torch.Tensor, torch.clone, step.result)
        if any(o.shape != k.shape for o, k in zip(outputs, step.outputs, strict=True)):
            return pytree.tree_map_only(torch.Tensor, torch.clone, step.result)
        for out, kept in zip(outputs, step.outputs, strict=True):
            out.copy_(kept)
        return result


def _outputs(result: Any, written: list[torch.Tensor]) -> list[torch.Tensor]:
    returned = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return returned + [w for w in written if not any(w is r for r in returned)]


def _reads_data(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    if torch.Tag.data_dependent_output in tags:
        return True
    return torch.Tag.dynamic_output_shape in tags and func is not torch.ops.aten.index.Tensor


def find_mixing(run: Callable[..., Any], rows: Rows, findings: Findings, default: tuple[str, int]) -> None:
    """Add a ``row_mixing`` finding per op through which pad rows reach valid ones.

    run(observer, perturb, state): runs a fresh copy of the model under ``observer`` and returns its results; ``state``
    is filled with the storages that the model and its arguments came with.
    """
    recorder = _Recorder(default)
    run(recorder, False, set())
    suspects = sorted(_follow(run, recorder, rows, set(), collect=True)[0].healed)[:_MOST]
    recorder = _Recorder(default, suspects)
    base = _leaves(run(recorder, False, set()))

    def reaches(healed: set[int]) -> bool:
        follower, results = _follow(run, recorder, rows, healed, collect=False)
        changed = len(results) != len(base) or not all(map(rows.confined, results, base))
        return follower.lost or follower.reached or changed

    healed = set(suspects)
    if reaches(healed) and suspects:
        return  # the runs cannot be compared
    progress = True
    while progress:
        progress = False
        for suspect in sorted(healed, reverse=True):
            if not reaches(healed - {suspect}):
                healed.remove(suspect)
                progress = True
    for place in healed:
        step = recorder.steps[place]
        findings.add("row_mixing", step.where, str(step.func._schema.name))


def _follow(
    run: Callable[..., Any], recorder: _Recorder, rows: Rows, healed: set[int], collect: bool
) -> tuple[_Follower, Sequence[torch.Tensor]]:
    state: set[int] = set()
    follower = _Follower(recorder, rows, state, healed, collect)
    return follower, _leaves(run(follower, True, state))


def _leaves(result: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
