"""``record``: a plan without Dynamo, by running a function under capture and breaking at cut ops.

For models that Dynamo cannot trace. The function's Python runs once; what a replay does is the kernels it launched and
the cut bodies it called, on the tensors of that run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from custom_ops._register import op_of

from . import session
from .analysis import launches
from .counters import COUNTS, LIVE
from .errors import CaptureError, FrozenError
from .graphs import CudaDevice, GraphDevice, device_for, type_and_message
from .memory import Pool, StableOutputs
from .op_body import past_dispatcher
from .options import Options
from .plan import Plan
from .rewrite import cut_overloads
from .split import CUT, PIECE
from .split import LIVE as LIVE_STEP


class RecordedGraph:
    """What the registry of live graphs holds for a recorded plan, and the owner of its pool."""

    def __init__(self, plan: Plan, pool: Pool) -> None:
        self.plan, self._pool = plan, pool
        self.piece_count, self.cut_count = plan.captures, plan.cuts

    def pool_bytes(self) -> int:
        """Bytes of the plan's pool."""
        return self._pool.nbytes

    def drop(self) -> None:
        """Give the memory back; the plan cannot be replayed any more."""
        self.plan.clear()
        self.plan.add(_dropped, "a dropped plan", LIVE_STEP)
        LIVE.discard(self)
        self._pool.release()


def _dropped() -> None:
    raise CaptureError("this plan was dropped by reset(); record it again")


def record(fn: Callable[..., Any], *static_args: Any, **options: Any) -> Plan:
    """Record ``fn(*static_args)``: its effects take place once, and again at each ``plan.replay()``.

    static_args: tensors that stay where they are; write new values into them before a replay. Anything else is frozen.
    options: see ``Options``; ``compiler`` has no meaning here. ``plan.outputs`` are fn's results, flattened, at fixed
    addresses; a cut op (tagged, or named in ``cut_ops``) that returns tensors has them copied to fixed addresses.
    Raises CaptureError naming the op for what cannot be captured (a read of device data on the host), and where
    ``graphs="off"``.
    """
    chosen = Options.of(options)
    if session.frozen():
        raise FrozenError("record() was called after freeze()")
    device = device_for(chosen.graphs, [a for a in pytree.tree_leaves(static_args) if isinstance(a, torch.Tensor)])
    if device is None:
        raise CaptureError("option 'graphs': 'off' leaves nothing to record")
    plan, pool = Plan("cut"), device.new_pool()
    recorder = (_CudaRecorder if isinstance(device, CudaDevice) else _TapeRecorder)(
        plan, pool, device, cut_overloads(chosen.cut_ops)
    )
    with device.session(pool), torch.no_grad():
        result = recorder.run(fn, static_args)
    leaves = pytree.tree_leaves(result)
    plan.values = leaves
    plan._outputs = tuple(leaves)
    COUNTS.graphs += 1
    COUNTS.captures += plan.captures
    owner = RecordedGraph(plan, pool)
    plan.owner = owner
    LIVE.add(owner)
    return plan


class _Recorder(TorchDispatchMode):
    """Watches the ops that a function calls, and breaks the recording at cuts."""

    def __init__(self, plan: Plan, pool: Pool, device: GraphDevice, named: frozenset[Any]) -> None:
        super().__init__()
        self.plan, self.pool, self.device, self.named = plan, pool, device, named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.named or torch.Tag.cudagraph_unsafe in func.tags:
            return self._cut(func, args, kwargs)
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and not _by_numbers(func, args)
        ):
            raise CaptureError(f"{func} reads device data on the host: it cannot be captured")
        return self.op(func, args, kwargs)

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.end_piece()
        op = op_of(func)
        body = op.body if op is not None else func
        result = body(*args, **kwargs)
        again = partial(past_dispatcher(body, args, kwargs), *args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if leaves:
            stable = StableOutputs(leaves, tensors, self.pool)
            self.plan.add(lambda: stable.copy_from(pytree.tree_leaves(again())), f"cut {func}", CUT)
            result = pytree.tree_unflatten(stable.tensors, spec)
        else:
            self.plan.add(again, f"cut {func}", CUT)
        self.plan.cuts += 1
        self.begin_piece()
        return result

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record a call of ``fn``; returns its result."""
        raise NotImplementedError

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that is not a cut."""
        return func(*args, **kwargs)

    def begin_piece(self) -> None:
        """Start recording a piece."""

    def end_piece(self) -> None:
        """End the piece; one that launched nothing is not kept."""


class _CudaRecorder(_Recorder):
    """Real graphs: each piece is captured, then launched once."""

    _graph: Any = None
    _launched = False

    @property
    def _cuda(self) -> CudaDevice:
        assert isinstance(self.device, CudaDevice)
        return self.device

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.begin_piece()
        try:
            with self:
                result = fn(*args)
        except BaseException:
            self._abandon()
            raise
        self.end_piece()
        return result

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            raise CaptureError(f"{func} cannot be captured: {type_and_message(error)}") from error
        self._launched = self._launched or launches(func)
        return result

    def begin_piece(self) -> None:
        self._launched = False
        self._graph = self._cuda.begin(self.pool.handle)

    def end_piece(self) -> None:
        graph, self._graph = self._graph, None
        try:
            launch = self._cuda.end(graph, empty=True)
        except Exception as error:
            self._cuda.abandon(graph)
            raise CaptureError(f"capture failed: {type_and_message(error)}") from error
        if self._launched:
            launch()
            self.plan.add(launch, f"piece {self.plan.captures}", PIECE)
            self.plan.captures += 1

    def _abandon(self) -> None:
        if self._graph is not None:
            self._cuda.abandon(self._graph)
            self._graph = None


class _TapeRecorder(_Recorder):
    """Emulated graphs: the ops of a piece are kept with their arguments, and called again at a replay."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.begin_piece()
        with self:
            result = fn(*args)
        self.end_piece()
        return result

    def begin_piece(self) -> None:
        self._tape: list[Callable[[], None]] = []

    def end_piece(self) -> None:
        tape, self._tape = self._tape, []
        if not tape:
            return

        def replay() -> None:
            for call in tape:
                call()

        self.plan.add(replay, f"piece {self.plan.captures}", PIECE)
        self.plan.captures += 1

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        stable = StableOutputs(leaves, tensors, self.pool)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if launches(func) and (writes or any(isinstance(place, int) for place in stable.pattern)):
            self._tape.append(lambda: stable.copy_from(pytree.tree_leaves(func(*args, **kwargs))))
        return pytree.tree_unflatten(stable.tensors, spec)


def _by_numbers(func: Any, args: Any) -> bool:
    """Indexing with positions gives a known size; with a mask the size depends on the mask's values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
