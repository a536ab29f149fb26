"""One Dynamo graph, split, compiled and captured: what Dynamo calls in place of the model's code.

A call replays only at exactly a captured size; any other runs the general path (a generic backend cannot know that rows
do not mix, so it never pads). Before a replay the addresses of all static tensors are compared with the captured ones.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from custom_ops.batch_metadata import current_context

from . import session
from .analysis import analyse
from .collectives import COMPILING, Ranks, ranks_of, together
from .counters import LIVE, count_fallback, logger
from .errors import FrozenError
from .graphs import GraphDevice, device_for
from .handed_objects import HandedObjects
from .memory import Pool, overlaps, storage_ptr
from .options import Options
from .pieces import Distinct, compile_pieces, misalignment, real_storages
from .plan import Plan, Program, Ref, record_plan
from .program import build_program
from .rewrite import BoundInput, cut_overloads, overload_of, rewrite
from .split import CUT, PIECE, Segment, split
from .static_inputs import Buffers, StaticInputs
from .symbols import row_reader, row_symbol, symbol_sources
from .tracelog import trace_split

MAX_KEYS_PER_SIZE = 8  # values of the other symbols (page counts, say) that one token count is captured for
MAX_PLACES = 256  # sets of static tensors (instances of a module class) one size is captured for; the oldest goes


# What a captured graph is valid for: the value of every symbol, and the addresses of the static tensors. Dynamo runs
# one graph for every instance of a module class.
_Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _Entry:
    plan: Plan
    inputs: StaticInputs


class CompiledGraph:
    """Callable with the graph's flat arguments.

    segments, distinct: what the graph was split into, and the compiled form of each segment. ranks: those that run it
    together, since it has collectives; they compile it alike or not at all.
    """

    def __init__(self, gm: fx.GraphModule, examples: Sequence[Any], options: Options) -> None:
        self.ranks: Ranks | None = ranks_of(gm.graph)
        try:
            self._build(gm, examples, options)
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.withdraw("compiling", error)
            raise
        if self.ranks is not None:
            self.ranks.same("compiling", self._facts(examples), COMPILING)
        LIVE.add(self)

    def _facts(self, examples: Sequence[Any]) -> dict[str, Any]:
        """What ranks that run this graph together must have in common."""
        ops = [(s.kind, s.ops) for s in self.segments]
        options = self.options.to_dict()
        described = re.sub(r" at 0x[0-9a-f]+", "", repr((self.structure, ops)))  # a function's address is a process's
        digest = hashlib.sha256(described.encode()).hexdigest()[:12]
        return {
            "capture_sizes": options.pop("capture_sizes"),
            **options,
            "the sizes of the arguments": [list(t.shape) for t in examples if isinstance(t, torch.Tensor)],
            "the graph": f"{len(ops)} segments, {digest}",
        }

    def _build(self, gm: fx.GraphModule, examples: Sequence[Any], options: Options) -> None:
        self.options = options
        self.started = time.perf_counter()
        self.grad_enabled = torch.is_grad_enabled()
        self.structure = structure(gm)
        # A bare copy: the metadata on Dynamo's own graph would keep arguments alive.
        self._uncompiled: Callable[..., Any] = _copy_graph(gm, metadata=False).forward
        self._lock = threading.RLock()
        self._named_cuts = cut_overloads(options.cut_ops)
        fake_mode = _fake_mode(gm)
        own = _copy_graph(gm)
        self.bound: list[BoundInput] = rewrite(own, fake_mode)
        placeholders = [n for n in own.graph.nodes if n.op == "placeholder"]
        self.names = [str(n.target) for n in placeholders]
        analysis = analyse(own, fake_mode)
        self.segments: list[Segment] = split(own, analysis, self._named_cuts)
        given = [*examples, *(b.resolve() for b in self.bound)]
        device_for(options.graphs, given)  # an option that these inputs cannot meet is an error now, not at capture
        self._warn_unmatched(own)
        reals = real_storages(placeholders, analysis, given)
        cuda = {n: t for n, t in zip(placeholders, given, strict=True) if isinstance(t, torch.Tensor) and t.is_cuda}
        self.distinct: list[Distinct | None] = compile_pieces(
            self.segments, analysis, reals, misalignment(cuda), options.compiler
        )
        self.program = build_program(own.graph, self.segments, self.distinct, analysis, placeholders)
        self.program.before = _layer_waits(self.program, self.bound, len(examples))
        self.program.ranks = self.ranks
        self.program.objects = HandedObjects(own.graph)
        self.static = [i for i, n in enumerate(placeholders) if _is_static(n)]
        self.static += [len(examples) + i for i, b in enumerate(self.bound) if b.static]
        tensors = [i for i, n in enumerate(placeholders) if isinstance(analysis.values[n], torch.Tensor)]
        fixed = set(self.static)
        self.moving = [i for i in tensors if i not in fixed]
        self.written = frozenset(i for i, n in enumerate(placeholders) if n in analysis.mutated)
        # Kernels of the captured pieces as the model launches them one by one (a compiler may fuse some).
        facts = analysis.facts
        self.kernels_of = [sum(facts[n].kernels for n in s.nodes if n in facts) for s in self.segments]
        self.kernel_count = sum(k for k, s in zip(self.kernels_of, self.segments, strict=True) if s.kind == PIECE)
        self._symbols = symbol_sources(placeholders, analysis)
        tokens, token_dim = session.tokens() or (None, 0)
        declared = next(((i, token_dim) for i in self.moving if given[i] is tokens), None)
        self._row_symbol, self._static_rows = row_symbol(placeholders, analysis, self.moving, declared)
        self._rows_of_bound = [row_reader(b.rows, self._symbols) for b in self.bound]
        self._static_storages = {storage_ptr(given[i]) for i in self.static}
        self._aliasing = self._alias_pattern(given)
        # An argument that overlaps a static tensor stays where it is: a copy of it would not overlap any more.
        places = zip(self.moving, self._aliasing or (), strict=False)
        touching = [i for i, (first, _) in places if first < len(self.static)]
        self._pinned = [*self.static, *touching]
        self._copied = [i for i in self.moving if i not in touching]
        self._entries: dict[_Key, _Entry | None] = {}
        self._failed: dict[_Key, str] = {}  # what could not be captured, and why
        self._buffers = Buffers()
        self._pool: Pool | None = None
        self._lent = False  # whether the pool is another graph's
        self._device: GraphDevice | None = None
        self.build_seconds = time.perf_counter() - self.started
        trace_split(self.segments, self.distinct, self.build_seconds)

    # What the registry of live graphs asks for.

    @property
    def piece_count(self) -> int:
        """Pieces that are captured."""
        return sum(s.kind == PIECE for s in self.segments)

    @property
    def cut_count(self) -> int:
        """Cut ops in the graph."""
        return sum(s.kind == CUT for s in self.segments)

    @property
    def distinct_count(self) -> int:
        """Distinct ones among the captured pieces."""
        return len({d.key for d in self.distinct if d is not None and d.key})

    def pool_bytes(self) -> int:
        """Bytes of this graph's pool and copied-argument buffers."""
        own = self._pool is not None and not self._lent
        return (self._pool.nbytes if own and self._pool is not None else 0) + self._buffers.nbytes

    def share_pool(self, owner: CompiledGraph) -> None:
        """Capture into the pool of ``owner`` from now on, if it has one; its memory stays the owner's."""
        if self._pool is None and owner._pool is not None:
            self._pool, self._lent = owner._pool, True

    def place(self) -> tuple[GraphDevice, Pool] | None:
        """The device and the pool that its graphs are captured with; None before the first."""
        return (self._device, self._pool) if self._device is not None and self._pool is not None else None

    def drop(self) -> None:
        """Drop captured graphs, buffers and the pool; the compiled pieces stay, and calls go on working."""
        with self._lock:
            self._entries.clear()
            self._failed.clear()
            self._buffers = Buffers()
            if self._pool is not None and not self._lent:
                self._pool.release()
            self._pool = self._device = None
            self._lent = False

    # Calls.

    def __call__(self, *args: Any) -> Any:
        with self._lock, torch.no_grad():
            inputs = self._complete(args)
            self.program.objects.keep()
            watcher = session.watcher()
            if watcher is not None:
                outputs = self.program.run(inputs)
                watcher(self, inputs, outputs)
                return tuple(outputs)
            if self._alias_pattern(inputs) != self._aliasing:
                self._leave("recompile", "the arguments alias otherwise than when the graph was compiled")
                with together(self.ranks, "a run of the graph as it is", args):
                    return self._uncompiled(*args)
            return tuple(self._run(inputs))

    def _complete(self, args: Sequence[Any]) -> list[Any]:
        """The flat arguments and what the rewrite bound, for this call."""
        if not self.bound:
            return list(args)
        extra = []
        for bound, rows in zip(self.bound, self._rows_of_bound, strict=True):
            tensor = bound.resolve()
            extra.append(tensor if rows is None else tensor[: rows(args)])
        return [*args, *extra]

    def _run(self, inputs: list[Any]) -> list[Any]:
        sizes = tuple(read(inputs) for read in self._symbols.values())
        key = (sizes, tuple(inputs[i].data_ptr() for i in self._pinned))
        entry = self._entries.get(key)
        if entry is not None:
            entry.inputs.copy_in(inputs)
            entry.plan.replay()
            entry.inputs.copy_back(inputs)
            return entry.inputs.deliver(entry.plan.outputs, inputs, self.options.static_outputs)
        if self.options.graphs == "off" or self.piece_count == 0:
            return self.program.run(inputs)
        if key in self._failed:
            self._leave("capture_failed", self._failed[key])
        elif not self._may_capture(sizes):
            self._leave("size", f"size {self._size(sizes)} is not among the captured sizes")
        elif key in self._entries and not session.frozen():
            return self._capture(key, inputs)
        else:
            known = [a for s, a in self._entries if s == sizes and a != key[1]]
            if known:
                self._leave("moved_static", f"{self._moved(known[-1], key[1])} not where it was at capture")
                self._static_storages = {storage_ptr(inputs[i]) for i in self.static}
            elif session.frozen():
                self._leave("size", f"size {self._size(sizes)} was not captured before freeze()")
            if not session.frozen():
                if len(known) >= MAX_PLACES:
                    del self._entries[(sizes, known[0])]
                self._entries[key] = None  # the first visit warms up, the second captures
        return self.program.run(inputs)

    def _capture(self, key: _Key, inputs: list[Any]) -> list[Any]:
        static = StaticInputs(inputs, self._copied, self.written, self._buffers)
        static.copy_in(inputs)
        plan = self._record(static.tensors, label=f", size {self._size(key[0])}")
        assert plan is not None
        if plan.failure is None:
            self._entries[key] = _Entry(plan, static)
        else:
            self._failed[key] = str(plan.failure)
            self._leave("capture_failed", self._failed[key])
        static.copy_back(inputs)
        # The buffers of a plan that failed are nobody's: what leaves them is a copy.
        return static.deliver(plan.outputs, inputs, self.options.static_outputs and plan.failure is None)

    def plan(self, inputs: Sequence[Any], *, variant: str = "cut", label: str = "") -> Plan | None:
        """Record a plan for ``inputs``, all of which stay where they are, in our pool. None: graphs are off.

        Raises CaptureError, after a run of the program, where it cannot be captured.
        """
        plan = self._record(inputs, variant=variant, label=label)
        if plan is not None and plan.failure is not None:
            raise plan.failure
        return plan

    def _record(self, inputs: Sequence[Any], *, variant: str = "cut", label: str = "") -> Plan | None:
        if self._device is None:
            self._device = device_for(self.options.graphs, inputs)
        if self._device is None:
            return None
        self._pool = self._pool or self._device.new_pool()
        return record_plan(self.program, inputs, self._device, self._pool, variant=variant, label=label)

    def captured_sizes(self) -> list[str]:
        """What plain calls have captured so far, as text: the value of each symbol."""
        return [self._size(key[0]) for key, entry in self._entries.items() if entry is not None]

    def poison(self) -> None:
        """Overwrite what the pool holds: a step that reads stale memory then shows."""
        if self._pool is not None:
            self._pool.poison()

    def _may_capture(self, sizes: tuple[int, ...]) -> bool:
        if not self._symbols:
            return True  # a static graph has one size, and is captured for it
        if self._row_symbol is None:
            return self._static_rows in self.options.capture_sizes and self._others(sizes, None) < MAX_KEYS_PER_SIZE
        place = list(self._symbols).index(self._row_symbol)
        return sizes[place] in self.options.capture_sizes and self._others(sizes, place) < MAX_KEYS_PER_SIZE

    def _others(self, sizes: tuple[int, ...], place: int | None) -> int:
        """How many other values of the symbols are captured for the same token count."""
        same = {s for s, _ in self._entries if place is None or s[place] == sizes[place]}
        return len(same - {sizes})

    def _size(self, key: tuple[int, ...]) -> str:
        return "x".join(map(str, key)) or "static"

    def _leave(self, reason: str, detail: str) -> None:
        """Count a call that leaves the captured graphs; with ``strict``, after ``freeze()``, refuse it."""
        if session.frozen() and self.options.strict:
            raise FrozenError(f"after freeze(), with strict=True: {detail} ({reason})")
        count_fallback(reason, detail)

    def _moved(self, before: tuple[int, ...], now: tuple[int, ...]) -> str:
        places = zip(self._pinned, before, now, strict=True)
        return ", ".join(self.names[i] for i, old, new in places if old != new)

    def _alias_pattern(self, inputs: Sequence[Any]) -> list[tuple[int, int]] | None:
        """Which inputs overlap, and by how much; compiled code and static buffers rely on it. None: none do.

        Static inputs keep their pattern for as long as they keep their addresses.
        """
        if len({p for i in self.moving if (p := storage_ptr(inputs[i]))} - self._static_storages) == len(self.moving):
            return None
        order = (*self.static, *self.moving)
        pattern = overlaps([inputs[i] for i in order])[len(self.static) :]
        alone = all(place == (len(self.static) + i, 0) for i, place in enumerate(pattern))
        return None if alone else pattern

    def _warn_unmatched(self, gm: fx.GraphModule) -> None:
        present = {overload_of(n) for n in gm.graph.nodes}
        for name in self.options.cut_ops:
            if not cut_overloads([name]) & present:
                logger.warning("option 'cut_ops': %s matches nothing in this graph", name)


def _layer_waits(program: Program, bound: list[BoundInput], first: int) -> Callable[[int], None]:
    """Waits, before a step that is given caches, until their layers are loaded. first: number of the first bound input.

    A cut looks its cache up itself.
    """
    layer_of = {first + i: b.layer_id for i, b in enumerate(bound) if b.layer_id is not None}
    layers = [
        sorted({layer_of[leaf.index] for leaf in step.args if isinstance(leaf, Ref) and leaf.index in layer_of})
        for step in program.steps
    ]

    def wait(step: int) -> None:
        context = current_context() if layers[step] else None
        if context is not None and context.loads is not None:
            for layer_id in layers[step]:
                context.loads.wait(layer_id)

    return wait


def structure(gm: fx.GraphModule) -> tuple[str, ...]:
    """What the graph calls, in order, whatever the sizes: tells whether two graphs come from the same code."""
    return tuple(str(n.target) for n in gm.graph.nodes if n.op not in ("placeholder", "output"))


def _copy_graph(gm: fx.GraphModule, metadata: bool = True) -> fx.GraphModule:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copied, return_output_node=True)
    graph.output(cast(Any, output)[0])
    for old, new in copied.items():
        new.meta = dict(old.meta) if metadata else {}
    return fx.GraphModule(gm, graph)


def _fake_mode(gm: fx.GraphModule) -> FakeTensorMode:
    """The mode that the graph's own values belong to (the ambient tracing context has another one)."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


def _is_static(node: fx.Node) -> bool:
    """Parameters, buffers and tensor attributes of the module, and what the caller declared static."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
