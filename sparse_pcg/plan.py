"""A program (the compiled pieces and cuts in order) and a plan (the same, recorded for fixed arguments).

``Program.run`` is the general path: any size, no graphs. ``record_plan`` runs a program once while capturing it and
returns the flat list of what a replay calls: graph launches and bodies of cut ops, every argument bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .counters import COUNTS
from .errors import CaptureError, note
from .graphs import GraphDevice
from .memory import Pool, StableOutputs
from .split import CUT, HOST, LIVE, PIECE


@dataclass(frozen=True)
class Ref:
    """Stands for value number ``index`` in the arguments of a step."""

    index: int


@dataclass(frozen=True)
class Step:
    """One segment, ready to run.

    args, kwargs: trees with ``Ref`` where a value goes. outputs: (value number, path into the result).
    short: the body that replaces a cut in a short graph, or None.
    """

    kind: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    name: str
    source: str
    short: Callable[..., Any] | None = None

    def bind(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the values filled in."""
        if not self.kwargs and all(type(a) is Ref for a in self.args):
            return tuple(values[a.index] for a in self.args), self.kwargs
        return pytree.tree_map_only(Ref, lambda r: values[r.index], (self.args, self.kwargs))

    def store(self, result: Any, values: list[Any]) -> None:
        """Put the parts of a result where later steps look for them."""
        for index, path in self.outputs:
            values[index] = _part(result, path)


def _part(result: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        result = result[i]
    return result


@dataclass
class Program:
    """steps in order; ``inputs`` values first, then one per value that crosses a segment; dead ones are freed.

    dynamic: values whose size is known only after a run. outputs: a ``Ref`` or a constant per graph output.
    """

    steps: list[Step]
    inputs: int
    size: int
    outputs: tuple[Any, ...]
    dynamic: frozenset[int] = frozenset()
    _dead: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        last: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for leaf in pytree.tree_leaves((step.args, step.kwargs)):
                if isinstance(leaf, Ref):
                    last[leaf.index] = i
            for index, _ in step.outputs:
                last.setdefault(index, i)
        kept = {leaf.index for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, Ref)}
        self._dead = [[] for _ in self.steps]
        for index, i in last.items():
            if index not in kept and index >= self.inputs:
                self._dead[i].append(index)

    def run(self, inputs: Sequence[Any], *, short: bool = False) -> list[Any]:
        """Run without graphs; with ``short`` the cuts' capturable bodies stand in for them."""
        values = [*inputs, *([None] * (self.size - self.inputs))]
        for step, dead in zip(self.steps, self._dead, strict=True):
            args, kwargs = step.bind(values)
            run = step.short if short and step.kind == CUT else step.run
            assert run is not None
            try:
                step.store(run(*args, **kwargs), values)
            except Exception as error:
                note(error, f"in {step.kind} {step.name} at {step.source}")
                raise
            for index in dead:
                values[index] = None
        return self.results(values)

    def results(self, values: list[Any]) -> list[Any]:
        """The graph outputs among ``values``."""
        return [values[o.index] if isinstance(o, Ref) else o for o in self.outputs]

    @property
    def has_short(self) -> bool:
        """Whether the whole program can be one graph: every cut has a capturable body and nothing is live."""
        cuts = [s for s in self.steps if s.kind == CUT]
        return bool(cuts) and all(s.short for s in cuts) and not any(s.kind == LIVE for s in self.steps)


class Plan:
    """What a replay does, and where its results are.

    steps: called in order, no arguments. outputs: tensors at fixed addresses (a ``Ref``: valid after each replay,
    anew). captures: graphs in it.
    """

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.steps: list[Callable[[], Any]] = []
        self.labels: list[str] = []
        self.captures = 0
        self.cuts = 0
        self.values: list[Any] = []
        self._outputs: tuple[Any, ...] = ()
        self.owner: Any = None  # what keeps the memory of a recorded plan

    def replay(self) -> None:
        """Run all steps, without autograd whatever mode the caller is in."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.replay()
        step: Callable[[], Any] | None = None
        try:
            for step in self.steps:
                step()
        except Exception as error:
            if step is not None:
                note(error, f"while replaying {self.labels[self.steps.index(step)]}")
            raise
        COUNTS.replays += 1

    @property
    def outputs(self) -> list[Any]:
        """The results of the last replay; the next one overwrites them."""
        return [self.values[o.index] if isinstance(o, Ref) else o for o in self._outputs]

    def add(self, step: Callable[[], Any], label: str) -> None:
        """Append a step with its description for error messages."""
        self.steps.append(step)
        self.labels.append(label)


class _LiveStep:
    """A step whose arguments or results are not at fixed addresses: binds and stores them at each replay."""

    def __init__(self, step: Step, values: list[Any], dynamic: frozenset[int], pool: Pool) -> None:
        self.step, self.values = step, values
        self._fixed = [o for o in step.outputs if o[0] not in dynamic]
        self._moving = [o for o in step.outputs if o[0] in dynamic]
        args, kwargs = step.bind(values)
        result = step.run(*args, **kwargs)
        self._store_moving(result)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        fixed = self._parts(result)
        self.stable = StableOutputs(fixed, tensors, pool)
        for (index, _), part, stable in zip(self._fixed, fixed, self.stable.tensors, strict=True):
            values[index] = part if stable is None else stable

    def _parts(self, result: Any) -> list[Any]:
        return [_part(result, path) for _, path in self._fixed]

    def _store_moving(self, result: Any) -> None:
        for index, path in self._moving:
            self.values[index] = _part(result, path)

    def __call__(self) -> None:
        args, kwargs = self.step.bind(self.values)
        result = self.step.run(*args, **kwargs)
        self._store_moving(result)
        self.stable.copy_from(self._parts(result))


def record_plan(
    program: Program, inputs: Sequence[Any], device: GraphDevice, pool: Pool, *, variant: str = "cut", label: str = ""
) -> Plan:
    """Capture ``program`` for ``inputs``, which stay where they are. Every effect takes place exactly once.

    Raises CaptureError naming the piece, its source line and ``label`` when a piece cannot be captured.
    """
    plan = Plan(variant)
    with device.session(pool):
        if variant == "short":
            _record_short(plan, program, inputs, device, pool)
        else:
            _record_cut(plan, program, inputs, device, pool, label)
    COUNTS.captures += plan.captures
    return plan


def _record_short(plan: Plan, program: Program, inputs: Sequence[Any], device: GraphDevice, pool: Pool) -> None:
    if not program.has_short:
        raise CaptureError("no short graph: a cut has no capturable body, or a piece cannot be captured")
    replay, outputs = device.capture(lambda *args: program.run(args, short=True), inputs, pool)
    plan.add(replay, "the short graph")
    plan.captures = 1
    plan.values = list(outputs)
    plan._outputs = tuple(Ref(i) for i in range(len(outputs)))


def _record_cut(
    plan: Plan, program: Program, inputs: Sequence[Any], device: GraphDevice, pool: Pool, label: str
) -> None:
    values = plan.values = [*inputs, *([None] * (program.size - program.inputs))]
    for step in program.steps:
        where = f"{step.kind} {step.name} at {step.source}{label}"
        try:
            args, kwargs = step.bind(values)
            moving = any(
                isinstance(leaf, Ref) and leaf.index in program.dynamic
                for leaf in pytree.tree_leaves((step.args, step.kwargs))
            )
            if step.kind == PIECE and not moving:
                replay, outputs = device.capture(step.run, args, pool)
                step.store(outputs, values)
                plan.add(replay, where)
                plan.captures += 1
            elif step.kind == HOST and not moving:
                result = step.run(*args, **kwargs)
                step.store(StableOutputs(result, args, pool).tensors, values)
            elif step.kind == CUT and not step.outputs and not moving:
                step.run(*args, **kwargs)
                plan.add(partial(step.run, *args, **kwargs), where)
                plan.cuts += 1
            else:
                live = _LiveStep(step, values, program.dynamic, pool)
                plan.add(live, where)
                plan.cuts += step.kind == CUT
        except CaptureError as error:
            raise CaptureError(f"{error} (in {where})") from error
        except Exception as error:
            note(error, f"while capturing {where}")
            raise
    plan._outputs = program.outputs
