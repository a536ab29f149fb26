"""Build the program of a split graph: which values each segment takes and gives, and what runs it."""

from __future__ import annotations

from torch import fx

from custom_ops._register import op_of

from .analysis import Analysis, source_line, symbols_of
from .pieces import Distinct
from .plan import Program, Ref, Step
from .rewrite import map_nodes, overload_of
from .split import CUT, Segment


def build_program(
    graph: fx.Graph,
    segments: list[Segment],
    distinct: list[Distinct | None],
    analysis: Analysis,
    placeholders: list[fx.Node],
) -> Program:
    """The program that runs ``segments`` in order; every value that crosses a segment gets a number."""
    number = {node: i for i, node in enumerate(placeholders)}
    for segment in segments:
        for node in segment.nodes if segment.kind == CUT else segment.outputs:
            number[node] = len(number)
    steps = [_step(segment, compiled, number) for segment, compiled in zip(segments, distinct, strict=True)]
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    outputs = map_nodes(tuple(output.args[0]), lambda n: Ref(number[n]))
    known = set().union(*(symbols_of(analysis.values[n]) for n in placeholders), set())
    dynamic = frozenset(i for n, i in number.items() if symbols_of(analysis.values.get(n)) - known)
    return Program(steps, len(placeholders), len(number), tuple(outputs), dynamic)


def _step(segment: Segment, compiled: Distinct | None, number: dict[fx.Node, int]) -> Step:
    if segment.kind != CUT:
        assert compiled is not None
        refs = tuple(Ref(number[n]) for n in segment.inputs)
        outputs = tuple((number[n], (i,)) for i, n in enumerate(segment.outputs))
        name = f"{len(segment.ops)} ops from {segment.ops[0]}"
        return Step(segment.kind, compiled.run, refs, {}, outputs, name, segment.source, graph=segment.module)
    node = segment.nodes[0]
    overload = overload_of(node)
    op = op_of(overload)
    paths: dict[fx.Node, tuple[int, ...]] = {node: ()}
    for item in segment.nodes[1:]:
        source, index = item.args
        paths[item] = (*paths[source], index)  # type: ignore[index,arg-type,dict-item]
    live = {n: p for n, p in paths.items() if _is_value(n)}
    return Step(
        CUT,
        op.cut_body if op is not None else overload,
        map_nodes(node.args, lambda n: Ref(number[n])),
        map_nodes(dict(node.kwargs), lambda n: Ref(number[n])),
        tuple((number[n], p) for n, p in live.items() if n.users),
        segment.why,
        source_line(node),
        op.short_body if op is not None else None,
    )


def _is_value(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return example is not None and not isinstance(example, (tuple, list))
