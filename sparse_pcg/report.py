"""``explain``: what became of a model, as text, as plain data, and as one HTML page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import session
from .compiled_graph import CompiledGraph
from .counters import stats
from .errors import SparsePCGError
from .graph_runner import GraphRunner
from .plan import Plan
from .profiling import StepCost, runner_costs, step_costs
from .split import CUT, HOST, LIVE, PIECE, Segment


@dataclass(frozen=True)
class CutReport:
    """One cut. op: its name. source: the model's line. composite: what it was decomposed from, or "".

    why: what makes it a cut. us: measured microseconds of a replay (GPU time where there is a GPU), or None.
    place: its number among all segments of its graph.
    """

    graph: int
    op: str
    source: str
    composite: str
    why: str = ""
    layers: tuple[int, ...] = ()
    us: float | None = None
    place: int = 0


@dataclass(frozen=True)
class PieceReport:
    """One piece. distinct: its number among the compiled ones (-1: run as PyTorch runs it). why: if not captured.

    kernels: as the model launches them one by one. nbytes: of what it hands on, at the size it was traced with.
    """

    graph: int
    kind: str
    distinct: int
    ops: tuple[str, ...]
    source: str
    why: str
    kernels: int = 0
    nbytes: int = 0
    layers: tuple[int, ...] = ()
    us: float | None = None
    place: int = 0


@dataclass
class Report:
    """What became of a compiled module or a runner. ``str()`` gives the text.

    gates: (feature, on, reason). floor: the smallest bucket whose graphs hold every op; None where that is not known.
    measured: what the times were measured on, or "".
    """

    cuts: list[CutReport] = field(default_factory=list)
    pieces: list[PieceReport] = field(default_factory=list)
    static_inputs: list[str] = field(default_factory=list)
    copied_inputs: list[str] = field(default_factory=list)
    buckets: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    graphs: int = 0
    gates: list[tuple[str, bool, str]] = field(default_factory=list)
    floor: int | None = None
    pool_bytes: int = 0
    measured: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def to_html(self, path: Path | str) -> None:
        """Write one self-contained page to ``path``. Raises ValueError where its folder does not exist."""
        from .report_page import render

        path = Path(path)
        if not path.parent.is_dir():
            raise ValueError(f"to_html: path must lie in a folder that exists, got {path}")
        path.write_text(render(self), encoding="utf-8")

    @property
    def summary(self) -> str:
        """One line: graphs, cuts, pieces."""
        captured = [p for p in self.pieces if p.kind == PIECE]
        distinct = {(p.graph, p.distinct) for p in captured}
        return (
            f"{_count(self.graphs, 'graph')}, {_count(len(self.cuts), 'cut')}, {_count(len(captured), 'piece')} "
            f"({len(distinct)} distinct), compiler {self.options.get('compiler', '?')}"
        )

    def __str__(self) -> str:
        lines = [self.summary, "", "cuts:"]
        lines += [
            f"  {i:3} {c.op}{f' (of {c.composite})' if c.composite else ''}  {_us(c.us)}{c.source}  [{c.why}]"
            for i, c in enumerate(self.cuts)
        ] or ["  none"]
        lines += ["", "pieces:"]
        for i, piece in enumerate(self.pieces):
            number = f"#{piece.distinct}" if piece.kind == PIECE else piece.kind
            lines.append(
                f"  {i:3} {number:>5} {_count(len(piece.ops), 'op')}, {_count(piece.kernels, 'kernel')}, "
                f"{piece.nbytes} bytes out: {_shorten(piece.ops)}  {_us(piece.us)}{piece.source}"
            )
            if piece.why and piece.kind == LIVE:
                lines.append(f"            not captured: {piece.why}")
        lines += [
            "",
            f"static inputs: {len(self.static_inputs)}, copied inputs: {', '.join(self.copied_inputs) or 'none'}",
        ]
        if self.buckets:
            lines += ["", f"buckets (pool {self.pool_bytes} bytes, floor {self.floor or 'none'}):"]
            lines += [
                f"  {b['size']:>6} rows  {'+'.join(b['variants']) or 'uncaptured'}  {b['bytes']} bytes"
                for b in self.buckets
            ]
        if self.gates:
            lines += ["", "gates:"]
            lines += [f"  {name}: {'on' if on else f'off ({reason})'}" for name, on, reason in self.gates]
        lines += ["", f"fallbacks: {self.fallbacks or 'none'}"]
        if self.measured:
            lines += [f"times: {self.measured}"]
        return "\n".join(lines)


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f} us  "


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _shorten(ops: tuple[str, ...], most: int = 6) -> str:
    own = [op for op in ops if "::" in op]  # custom ops first: they are what a reader looks for
    shown = own[:most] or list(ops[:most])
    return ", ".join(shown) + (", ..." if len(ops) > len(shown) else "")


def explain(compiled: Callable[..., Any] | GraphRunner, *args: Any, **kwargs: Any) -> Report:
    """What became of ``compiled``: a runner, or a compiled module together with arguments to call it with.

    A compiled module is called once with ``args``, on the general path: it has the effects of a call. A captured
    runner's largest bucket is timed on a batch that writes the dummy page only.
    Raises ValueError when nothing of it passes through this backend.
    """
    return describe(compiled, args, kwargs, measure=isinstance(compiled, GraphRunner))


def describe(
    compiled: Callable[..., Any] | GraphRunner, args: Sequence[Any], kwargs: dict[str, Any], measure: bool
) -> Report:
    """``explain``; with ``measure`` a compiled module's plan is replayed too, with all that a replay writes."""
    graphs: list[CompiledGraph] = []
    report = Report(fallbacks=stats().fallbacks)
    costs: list[StepCost] = []
    if isinstance(compiled, GraphRunner):
        graphs = compiled.graphs()
        if not graphs:
            raise ValueError("explain: the runner has captured nothing yet; call capture() first")
        _describe_runner(report, compiled)
        largest = compiled.bucket_sizes()[-1]
        graphs = [compiled._buckets[largest].graph, *(g for g in graphs if g is not compiled._buckets[largest].graph)]
        if measure and "cut" in compiled.variants(largest):
            costs = _measured(lambda: runner_costs(compiled, largest))  # type: ignore[arg-type]
            report.measured = f"medians of 20 replays of bucket {largest}, {_device(compiled.device)}" if costs else ""
    else:
        with session.watching(lambda graph, inputs, outputs: graphs.append(graph)):
            compiled(*args, **kwargs)
        if not graphs:
            raise ValueError("explain: the call did not pass through backend 'sparse_pcg'")
        plan = _last_plan(graphs[0]) if measure else None
        if plan is not None:
            costs = _measured(lambda: step_costs(plan))
            report.measured = f"medians of 20 replays, {_device(_plan_device(plan))}" if costs else ""
    report.graphs = len(graphs)
    report.options = graphs[0].options.to_dict()
    for number, graph in enumerate(graphs):
        _describe(report, number, graph, costs if number == 0 else [])
    return report


def _describe_runner(report: Report, runner: GraphRunner) -> None:
    by_size = {c.bucket: c for c in runner.captured}
    report.buckets = [
        {"size": size, "variants": list(c.variants), "bytes": c.nbytes, "seconds": c.seconds}
        for size, c in sorted(by_size.items())
    ]
    report.gates = [(g.feature, g.on, g.reason) for g in runner.gates]
    report.floor, report.pool_bytes = runner.floor, runner.pool_bytes


def _measured(measure: Callable[[], list[StepCost]]) -> list[StepCost]:
    try:
        return measure()
    except SparsePCGError:
        return []  # a plan that failed has no times; the fallbacks say so


def _last_plan(graph: CompiledGraph) -> Plan | None:
    return next((e.plan for e in reversed(list(graph._entries.values())) if e is not None), None)


def _plan_device(plan: Plan) -> torch.device:
    return next((v.device for v in plan.values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "graphs emulated on the CPU (host time)"


def _describe(report: Report, number: int, graph: CompiledGraph, costs: list[StepCost]) -> None:
    spans = _layer_spans(graph.segments)
    times = _times(graph.segments, costs)
    for place, (segment, compiled) in enumerate(zip(graph.segments, graph.distinct, strict=True)):
        layers, us = spans[place], times[place]
        if segment.kind == CUT:
            node = segment.nodes[0]
            composite = str(node.meta.get("from_composite", ""))
            why = _why(segment, graph)
            report.cuts.append(CutReport(number, segment.why, segment.source, composite, why, layers, us, place))
        else:
            distinct = compiled.number if compiled is not None else -1
            ops, kernels = tuple(segment.ops), graph.kernels_of[place]
            report.pieces.append(
                PieceReport(
                    number,
                    segment.kind,
                    distinct,
                    ops,
                    segment.source,
                    segment.why,
                    kernels,
                    sum(map(_nbytes, segment.outputs)),
                    layers,
                    us,
                    place,
                )
            )
    report.static_inputs += [graph.names[i] for i in graph.static]
    report.copied_inputs += [graph.names[i] for i in graph.moving]
    if not report.gates:
        report.pool_bytes += graph.pool_bytes()
    for key in graph.captured_sizes():
        report.buckets.append({"size": key, "variants": ["cut"], "bytes": graph.pool_bytes()})


def _why(segment: Segment, graph: CompiledGraph) -> str:
    overload = segment.nodes[0].target
    overload = getattr(overload, "default", overload)
    if torch.Tag.cudagraph_unsafe in getattr(overload, "tags", ()):
        return "tagged cudagraph_unsafe"
    named = [n for n in graph.options.cut_ops if segment.why == n.replace("::", ".").replace(".", "::", 1)]
    return "named in option cut_ops" if named else "its last bits depend on the row count below the bucket floor"


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return 0
    size = value.element_size()
    for part in value.shape:
        size *= int(part) if isinstance(part, int) else int(part.node.hint) if part.node.has_hint() else 0
    return size


def _layer_spans(segments: list[Segment]) -> list[tuple[int, ...]]:
    """(first, last) layer of each segment by the numbers in the module paths of its nodes; () where there are none."""
    spans: list[tuple[int, ...]] = []
    current: tuple[int, ...] = ()
    for segment in segments:
        found = [number for node in segment.nodes if (number := _layer_of(node)) is not None]
        if found:
            current = (max(found[-1], 0),)
            spans.append((min(found), max(found)))
        else:
            spans.append(current * 2)
    return spans


def _layer_of(node: fx.Node) -> int | None:
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in stack.values():
        if found := re.search(r"[.\[_'\]](\d+)\b", str(path)):
            return int(found.group(1))
    return None


def _times(segments: list[Segment], costs: list[StepCost]) -> list[float | None]:
    """Per segment its measured microseconds: GPU time where there is any, else host time."""
    times: list[float | None] = []
    at = 0
    for segment in segments:
        wanted = {PIECE: "piece", CUT: "cut", LIVE: "live"}.get(segment.kind)
        kinds = (wanted, "live") if segment.kind == CUT else (wanted,)
        if segment.kind != HOST and at < len(costs) and costs[at].kind in kinds:
            cost = costs[at]
            times.append(cost.host_us if cost.gpu_us is None else cost.gpu_us)
            at += 1
        else:
            times.append(None)
    return times
