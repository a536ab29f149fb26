"""A program (the compiled pieces and cuts in order) and a plan (the same, recorded for fixed arguments).

``Program.run`` is the general path: any size, no graphs. ``record_plan`` runs a program once while capturing it and
returns the flat list of what a replay calls: graph launches and bodies of cut ops, every argument bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .analysis import source_line
from .collectives import Ranks, Together, group_of, together
from .counters import COUNTS
from .errors import CaptureError, note
from .graph_launch import Flat
from .graphs import GraphDevice
from .handed_objects import HandedObjects
from .memory import Pool, StableOutputs, storage_ptr
from .op_body import past_dispatcher
from .split import CUT, HOST, LIVE, PIECE


@dataclass(frozen=True)
class Ref:
    """Stands for value number ``index`` in the arguments of a step."""

    index: int


@dataclass(frozen=True)
class Step:
    """One segment, ready to run.

    args, kwargs: trees with ``Ref`` where a value goes. outputs: (value number, path into the result).
    short: the body that replaces a cut in a short graph, or None. graph: the ops of a piece, to name one in an error.
    """

    kind: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    name: str
    source: str
    short: Callable[..., Any] | None = None
    graph: fx.GraphModule | None = None

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
    dead: per step, the values that no later step reads. before: called with the number of each step that runs next,
    where the steps run one by one. ranks: those that run it together, since it has collectives; None: this one alone.
    objects: streams and events that the steps read by number.
    """

    steps: list[Step]
    inputs: int
    size: int
    outputs: tuple[Any, ...]
    dynamic: frozenset[int] = frozenset()
    dead: list[list[int]] = field(default_factory=list)
    before: Callable[[int], None] | None = None
    ranks: Ranks | None = None
    objects: HandedObjects = field(default_factory=HandedObjects)

    def __post_init__(self) -> None:
        last: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for leaf in pytree.tree_leaves((step.args, step.kwargs)):
                if isinstance(leaf, Ref):
                    last[leaf.index] = i
            for index, _ in step.outputs:
                last.setdefault(index, i)
        kept = {leaf.index for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, Ref)}
        self.dead = [[] for _ in self.steps]
        for index, i in last.items():
            if index not in kept and index >= self.inputs:
                self.dead[i].append(index)

    def run(self, inputs: Sequence[Any], *, short: bool = False) -> list[Any]:
        """Run without graphs; with ``short`` the cuts' capturable bodies stand in for them."""
        with together(self.ranks, "an uncaptured run", inputs), self.objects.in_table():
            return self._run(inputs, short)

    def _run(self, inputs: Sequence[Any], short: bool) -> list[Any]:
        values = [*inputs, *([None] * (self.size - self.inputs))]
        for i, (step, dead) in enumerate(zip(self.steps, self.dead, strict=True)):
            if self.before is not None and not short:
                self.before(i)
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


Observer = Callable[["Plan"], None]


class Plan:
    """What a replay does, and where its results are.

    steps: called in order, no arguments. labels, kinds: one per step. outputs: tensors at fixed addresses (a ``Ref``:
    valid after each replay, anew). captures: graphs in it. failure: why it cannot be replayed; ``outputs`` are then the
    results of the run that tried to record it.
    """

    observer: ClassVar[Observer | None] = None  # runs the steps in place of ``replay``: profiling

    def __init__(self, variant: str, name: str = "") -> None:
        self.variant, self.name = variant, name or variant
        self.steps: list[Callable[[], Any]] = []
        self.labels: list[str] = []
        self.kinds: list[str] = []
        self.captures = 0
        self.cuts = 0
        self.values: list[Any] = []
        self._outputs: tuple[Any, ...] = ()
        self.failure: CaptureError | None = None
        self.owner: Any = None  # what keeps the memory of a recorded plan
        self.ranks: Ranks | None = None  # that replay it together
        self._flat: Flat | None = None

    def replay(self) -> None:
        """Run all steps, without autograd whatever mode the caller is in."""
        if self.failure is not None:
            raise self.failure
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.replay()
        if self.ranks is None:
            self._replay()
        else:
            with together(self.ranks, f"a replay of {self.name}", self.values):
                self._replay()
        COUNTS.replays += 1

    def _replay(self) -> None:
        # What a cut body calls has nothing to record for autograd: its dispatch keys are a cost only.
        with torch._C._AutoDispatchBelowAutograd():
            if Plan.observer is not None:
                Plan.observer(self)
                return
            flat = self._flat
            if flat is None or not flat.settled or flat.steps is not self.steps:
                flat = self._flat = Flat(self.steps, self.labels)
            flat.run()

    @property
    def outputs(self) -> list[Any]:
        """The results of the last replay; the next one overwrites them."""
        return [self.values[o.index] if isinstance(o, Ref) else o for o in self._outputs]

    def add(self, step: Callable[[], Any], label: str, kind: str = LIVE) -> None:
        """Append a step: its description for error messages, and "piece", "cut" or "live"."""
        self._flat = None
        self.steps.append(step)
        self.labels.append(label)
        self.kinds.append(kind)

    def clear(self) -> None:
        """Drop all steps, and with them the graphs."""
        self.steps, self.labels, self.kinds = [], [], []
        self._flat = None


class _LiveStep:
    """A step whose arguments or results are not at fixed addresses: binds and stores them at each replay."""

    def __init__(self, step: Step, values: list[Any], dynamic: frozenset[int], pool: Pool) -> None:
        self.step, self.values = step, values
        self._fixed = [o for o in step.outputs if o[0] not in dynamic]
        self._moving = [o for o in step.outputs if o[0] in dynamic]
        args, kwargs = step.bind(values)
        result = step.run(*args, **kwargs)
        self._store_moving(result)
        self._run = past_dispatcher(step.run, args, kwargs)
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
        result = self._run(*args, **kwargs)
        self._store_moving(result)
        self.stable.copy_from(self._parts(result))


def record_plan(
    program: Program, inputs: Sequence[Any], device: GraphDevice, pool: Pool, *, variant: str = "cut", label: str = ""
) -> Plan:
    """Capture ``program`` for ``inputs``, which stay where they are. Every effect takes place exactly once.

    A plan whose capture fails has run all the same, uncaptured from there on, and has a ``failure``: a CaptureError
    naming the piece, the op, its source line and ``label``.
    """
    plan = Plan(variant, f"{variant}{label}")
    plan.ranks = program.ranks
    if program.ranks is not None:
        program.ranks.same(f"the capture of {plan.name}", {"steps": len(program.steps)})
        device = Together(device, program.ranks)
    with together(program.ranks, f"the capture of {plan.name}", inputs), device.session(pool):
        try:
            if variant in ("short", "whole"):
                _record_whole(plan, program, inputs, device, pool)
            else:
                with program.objects.in_table():
                    _Recording(plan, program, inputs, device, pool, label).run()
        finally:
            if plan.failure is not None:
                plan.clear()
                plan.captures = plan.cuts = 0
    plan.steps = program.objects.around(plan.steps)
    COUNTS.captures += plan.captures
    return plan


def _record_whole(plan: Plan, program: Program, inputs: Sequence[Any], device: GraphDevice, pool: Pool) -> None:
    """One graph of all steps. short: with the capturable bodies of the cuts; whole: with the cuts themselves.

    What a cut reads on the host is as it is now in each replay of ``whole``.
    """
    short = plan.variant == "short"
    if any(s.kind == LIVE for s in program.steps) or (short and not program.has_short):
        raise CaptureError(
            f"no {plan.variant} graph: a cut has no capturable body, or a piece cannot be captured"
        )
    try:
        replay, outputs = device.capture(lambda *args: program.run(args, short=short), inputs, pool)
    except CaptureError as error:
        plan.failure = error
        outputs = program.run(inputs, short=short)
    else:
        plan.add(replay, f"the {plan.variant} graph", PIECE)
        plan.captures = 1
    plan.values = list(outputs)
    plan._outputs = tuple(Ref(i) for i in range(len(outputs)))


class _Recording:
    """Runs the steps of a program in order, capturing what can be."""

    def __init__(
        self, plan: Plan, program: Program, inputs: Sequence[Any], device: GraphDevice, pool: Pool, label: str
    ) -> None:
        self.plan, self.program, self.device, self.pool, self.label = plan, program, device, pool, label
        self.values = plan.values = [*inputs, *([None] * (program.size - program.inputs))]
        plan._outputs = program.outputs

    def run(self) -> None:
        """Each step once; after a failure the others run as they are."""
        live: Counter[int] = Counter()  # values on each storage that a later step may read
        for step, dead in zip(self.program.steps, self.program.dead, strict=True):
            where = f"{step.kind} {step.name} at {step.source}{self.label}"
            try:
                args, kwargs = step.bind(self.values)
                if self.plan.failure is not None:
                    step.store(step.run(*args, **kwargs), self.values)
                else:
                    self._step(step, args, kwargs, where)
            except Exception as error:
                note(error, f"while capturing {where}")
                raise
            live.update(p for index, _ in step.outputs if (p := self._storage(index)))
            for index in dead:
                pointer = self._storage(index)
                live[pointer] -= 1
                if pointer and not live[pointer]:
                    self.pool.let_go(pointer)

    def _storage(self, index: int) -> int:
        value = self.values[index]
        return storage_ptr(value) if isinstance(value, torch.Tensor) else 0

    def _step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> None:
        moving = any(
            isinstance(leaf, Ref) and leaf.index in self.program.dynamic
            for leaf in pytree.tree_leaves((step.args, step.kwargs))
        )
        plan = self.plan
        if step.kind == PIECE and not moving:
            try:
                replay, outputs = self.device.capture(step.run, args, self.pool)
            except CaptureError as error:
                plan.failure = CaptureError(f"{error} (in {self._culprit(step, args)}{where})")
                plan.failure.__cause__ = error.__cause__
                outputs = list(step.run(*args))
            else:
                plan.add(replay, where, PIECE)
                plan.captures += 1
            step.store(outputs, self.values)
        elif step.kind == HOST and not moving:
            result = step.run(*args, **kwargs)
            step.store(StableOutputs(result, args, self.pool).tensors, self.values)
        elif step.kind == CUT and not step.outputs and not moving:
            step.run(*args, **kwargs)
            plan.add(partial(past_dispatcher(step.run, args, kwargs), *args, **kwargs), where, CUT)
            plan.cuts += 1
        else:
            live = _LiveStep(step, self.values, self.program.dynamic, self.pool)
            plan.add(live, where, CUT if step.kind == CUT else LIVE)
            plan.cuts += step.kind == CUT

    def _culprit(self, step: Step, args: tuple[Any, ...]) -> str:
        """Which op of a piece no capture holds: run its ops one by one in a capture that is thrown away."""
        if step.graph is None or any(_reshapes(n) for n in step.graph.graph.nodes):
            return ""
        reached: list[fx.Node] = []

        class OneByOne(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                reached.append(n)
                if group_of(n) is not None or "wait_tensor" in str(n.target):
                    return self.fetch_args_kwargs_from_env(n)[0][0]  # this rank looks alone: nobody would answer
                return super().run_node(n)

        interpreter = OneByOne(step.graph)
        if not self.device.refused(interpreter.run, args, self.pool) or not reached or reached[-1].op == "output":
            return ""  # nothing in the piece: memory ran out, or another thread broke the capture
        return f"op {reached[-1].target} at {source_line(reached[-1])}, in "


def _reshapes(node: fx.Node) -> bool:
    """A collective whose result is not like its argument."""
    return group_of(node) is not None and not any(kind in str(node.target) for kind in ("all_reduce", "broadcast"))
