"""Split a rewritten graph at its cut ops, in program order.

What comes out is a list of segments: cuts (one op each, its ``getitem`` with it) and pieces (what lies between). The
split is linear: order is kept, nothing is moved across a cut. Every value that crosses a segment is named by the node
that makes it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .analysis import Analysis, NodeFacts, attribute, source_line, storage_of, symbols_of
from .memory import span
from .rewrite import is_cut, overload_of

PIECE, HOST, LIVE, CUT = "piece", "host", "live", "cut"


@dataclass
class Segment:
    """A run of nodes.

    kind: "piece" (captured), "host" (no kernels: views, allocations, symbol arithmetic; run once, when a plan is made),
        "live" (cannot be captured; run at each replay), "cut" (one cut op).
    inputs, outputs: nodes whose values enter and leave. why: why it is live; for a cut, the op.
    module: the piece as a GraphModule returning a tuple of its outputs; None for a cut.
    """

    kind: str
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    why: str = ""
    module: fx.GraphModule | None = None

    @property
    def source(self) -> str:
        """The model's source line of the first node that has one."""
        return next((s for s in map(source_line, self.nodes) if s != "unknown"), "unknown")

    @property
    def ops(self) -> list[str]:
        """Short names of the ops in the segment."""
        return [_short(n) for n in self.nodes]


def _short(node: fx.Node) -> str:
    overload = overload_of(node)
    if overload is not None:
        return overload._schema.name
    return getattr(node.target, "__name__", str(node.target))


def split(gm: fx.GraphModule, analysis: Analysis, named_cuts: frozenset[Any]) -> list[Segment]:
    """The segments of ``gm`` in order. ``analysis`` must be of this graph."""
    _wait_before_cuts(gm.graph, named_cuts)
    segments = [s for s in _partition(gm.graph, named_cuts) if s.nodes]
    known = set().union(*(symbols_of(analysis.values[n]) for n in gm.graph.nodes if n.op == "placeholder"), set())
    contexts = _open_contexts(segments)
    _localise_sizes(gm.graph, segments, analysis)
    home = {node: i for i, segment in enumerate(segments) for node in segment.nodes}
    _edges(gm.graph, segments, home)
    unknown: set[fx.Node] = set()  # values with a size or value that only a run can tell
    for i, segment in enumerate(segments):
        for node in segment.nodes:
            if symbols_of(analysis.values.get(node)) - known:
                unknown.add(node)
        if segment.kind == CUT:
            continue
        segment.kind, segment.why = _classify(segment, analysis, unknown)
        segment.module = _module(gm, segment, contexts[i])
    return segments


def _wait_before_cuts(graph: fx.Graph, named_cuts: frozenset[Any]) -> None:
    """Wait for a collective in the piece that starts it: no capture holds one that is still under way at its end."""
    cuts = 0
    home: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        cuts += is_cut(node, named_cuts)
        home[node] = cuts
        if _short(node) == "_c10d_functional::wait_tensor":
            source = node.all_input_nodes[0]
            if source.op != "placeholder" and home[source] != cuts:
                source.append(node)


def _partition(graph: fx.Graph, named_cuts: frozenset[Any]) -> Iterable[Segment]:
    current = Segment(PIECE, [])
    cuts: list[Segment] = []
    made_by: dict[fx.Node, Segment] = {}
    result: list[Segment] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_cut(node, named_cuts):
            result.append(current)
            current = Segment(PIECE, [])
            cut = Segment(CUT, [node], why=_short(node))
            made_by[node] = cut
            cuts.append(cut)
            result.append(cut)
        elif node.op == "call_function" and node.target is operator.getitem and node.args[0] in made_by:
            made_by[node.args[0]].nodes.append(node)
            if _gives_sequence(node):
                made_by[node] = made_by[node.args[0]]
        else:
            current.nodes.append(node)
    result.append(current)
    return result


def _localise_sizes(graph: fx.Graph, segments: list[Segment], analysis: Analysis) -> None:
    """Compute sizes at the head of each segment that uses them.

    One that crossed from the first layer's piece, or stood elsewhere in it, would set that piece apart from the other
    layers'. Only arithmetic on symbols that are inputs of the graph; a size read off a tensor stays with the tensor.
    """
    for segment in segments:
        if segment.kind == CUT:
            continue
        copies: dict[fx.Node, fx.Node] = {}
        for node in list(segment.nodes):
            if _is_pure_size(node, analysis):
                continue  # its users get a copy
            for source in node.all_input_nodes:
                copy = _local_size(source, copies, segment, graph, analysis)
                if copy is not source:
                    node.replace_input_with(source, copy)
        segment.nodes[:0] = copies.values()
    for segment in reversed(segments):
        for node in reversed(segment.nodes):
            if not node.users and _is_pure_size(node, analysis):
                segment.nodes.remove(node)
                graph.erase_node(node)


def _is_pure_size(node: fx.Node, analysis: Analysis) -> bool:
    """A size computed, through sizes alone, from sizes that are inputs of the graph."""
    if not isinstance(analysis.values.get(node), (int, torch.SymInt)):
        return False
    if node.op == "placeholder":
        return True
    return node.op == "call_function" and all(_is_pure_size(n, analysis) for n in node.all_input_nodes)


def _local_size(
    node: fx.Node, copies: dict[fx.Node, fx.Node], segment: Segment, graph: fx.Graph, analysis: Analysis
) -> fx.Node:
    """``node``, or its copy at the head of ``segment`` if it is a size computed from sizes alone."""
    if node.op == "placeholder" or not _is_pure_size(node, analysis):
        return node
    if node not in copies:
        sources = {n: _local_size(n, copies, segment, graph, analysis) for n in node.all_input_nodes}
        with graph.inserting_before(segment.nodes[0]):
            copies[node] = graph.node_copy(node, sources.__getitem__)
        analysis.values[copies[node]] = analysis.values[node]
        analysis.facts[copies[node]] = NodeFacts()
    return copies[node]


def _gives_sequence(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (tuple, list))


def _edges(graph: fx.Graph, segments: list[Segment], home: dict[fx.Node, int]) -> None:
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    for i, segment in enumerate(segments):
        entering: dict[fx.Node, None] = {}
        leaving: dict[fx.Node, None] = {}
        for node in segment.nodes:
            for source in node.all_input_nodes:
                if home.get(source, -1) != i:
                    entering[source] = None
            if any(user is output or home.get(user) != i for user in node.users):
                leaving[node] = None
        segment.inputs, segment.outputs = list(entering), list(leaving)


def _classify(segment: Segment, analysis: Analysis, unknown: set[fx.Node]) -> tuple[str, str]:
    facts = [analysis.facts.get(n, NodeFacts()) for n in segment.nodes]
    for node, fact in zip(segment.nodes, facts, strict=True):
        if fact.sync:
            return LIVE, f"{fact.sync} reads device data on the host ({source_line(node)})"
    for node in (*segment.inputs, *segment.nodes):
        if node in unknown:
            return LIVE, f"the size or value of {node.name} is known only after a run ({source_line(node)})"
    devices = set().union(*(f.devices for f in facts), set()) - {"meta"}
    if len(devices) > 1:
        return LIVE, f"mixes devices {sorted(devices)}: a captured graph would freeze what the CPU computes"
    if all(f.kernels == 0 for f in facts):
        return HOST, "no kernels"
    return PIECE, ""


def _module(gm: fx.GraphModule, segment: Segment, contexts: tuple[list[fx.Node], list[fx.Node]]) -> fx.GraphModule:
    """The segment as a module of its own: placeholders for what enters, a tuple of what leaves."""
    entered, left_open = contexts
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in segment.inputs:
        if node not in entered:
            environment[node] = graph.placeholder(node.name)
            environment[node].meta = _light_meta(node)
    for node in (*entered, *segment.nodes):
        _copy(graph, node, environment)
    for node in reversed(left_open):
        graph.call_function(_EXIT, (environment[node],))
    outputs = [n for n in segment.outputs if n.target is not _ENTER]
    segment.outputs = outputs
    graph.output(tuple(environment[n] for n in outputs))
    segment.inputs = [n for n in segment.inputs if n not in entered]
    module = fx.GraphModule(_attributes(gm, segment), graph)
    return module


def _copy(graph: fx.Graph, node: fx.Node, environment: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, environment.__getitem__)
    copied.meta = _light_meta(node)
    copied.stack_trace = node.stack_trace
    environment[node] = copied
    return copied


def _light_meta(node: fx.Node) -> dict[str, Any]:
    """Only what compiling needs: Dynamo's other metadata keeps model and arguments alive."""
    return {
        k: v
        for k, v in node.meta.items()
        if k in ("example_value", "stack_trace", "nn_module_stack", "source_fn_stack")
    }


def _attributes(gm: fx.GraphModule, segment: Segment) -> dict[str, Any]:
    found = {}
    for node in segment.nodes:
        if node.op in ("get_attr", "call_module"):
            found[str(node.target)] = attribute(gm, str(node.target))
    return found


# Autocast regions: Dynamo leaves enter and exit calls in the graph. A region that a cut divides is closed at the end of
# each piece and opened again in the next.
_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def _open_contexts(segments: list[Segment]) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Per segment: the autocast regions open at its head, and those open at its tail."""
    open_now: list[fx.Node] = []
    result = []
    for segment in segments:
        at_head = list(open_now)
        for node in segment.nodes:
            if node.op == "call_function" and node.target is _ENTER:
                open_now.append(node)
            elif node.op == "call_function" and node.target is _EXIT:
                open_now.remove(node.args[0])  # type: ignore[arg-type]
        result.append((at_head, list(open_now)))
    return result


def alias_groups(nodes: list[fx.Node], analysis: Analysis, real_storage: dict[int, int]) -> list[int]:
    """For each node the number of the group of overlapping memory it belongs to; -1 for what is no tensor.

    Disjoint views of one storage (two layers of one KV pool) do not alias and are in groups of their own.
    real_storage: fake storage of a graph input -> real storage, which tells inputs of one base apart from others.
    """
    groups: list[int] = []
    members: list[list[tuple[int, torch.Tensor]]] = []  # per group: (storage, tensor)
    for node in nodes:
        value = analysis.values.get(node)
        if not isinstance(value, torch.Tensor):
            groups.append(-1)
            continue
        storage = real_storage.get(storage_of(value), storage_of(value))
        hit = [g for g, held in enumerate(members) if any(s == storage and _may_overlap(t, value) for s, t in held)]
        home = hit[0] if hit else len(members)
        if not hit:
            members.append([])
        members[home].append((storage, value))
        for other in hit[1:]:  # this tensor joins groups that were apart
            members[home] += members[other]
            members[other] = []
            groups = [home if g == other else g for g in groups]
        groups.append(home)
    return groups


def _may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage share a byte, by the sizes traced with; True where a size is unknown.

    A call whose arguments overlap otherwise never reaches the code compiled for this.
    """
    spans = []
    for tensor in (a, b):
        sizes, strides = [_hint(s) for s in tensor.shape], [_hint(s) for s in tensor.stride()]
        offset = _hint(tensor.storage_offset())
        if offset is None or None in sizes or None in strides:
            return True
        spans.append(span(tensor.element_size(), offset, sizes, strides))  # type: ignore[arg-type]
    (start_a, stop_a), (start_b, stop_b) = spans
    return start_a < stop_b and start_b < stop_a


def _hint(size: Any) -> int | None:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None
