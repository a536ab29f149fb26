"""``explain``: what became of a model, as text and as a dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from . import session
from .compiled_graph import CompiledGraph
from .counters import stats
from .runner import PrefillRunner
from .split import CUT, LIVE, PIECE


@dataclass(frozen=True)
class CutReport:
    """One cut. op: its name. source: the model's line. composite: what it was decomposed from, or ""."""

    graph: int
    op: str
    source: str
    composite: str


@dataclass(frozen=True)
class PieceReport:
    """One piece. distinct: its number among the compiled ones (-1: run as PyTorch runs it). why: if not captured."""

    graph: int
    kind: str
    distinct: int
    ops: tuple[str, ...]
    source: str
    why: str


@dataclass
class Report:
    """What became of a compiled module or a runner. ``str()`` gives the text."""

    cuts: list[CutReport] = field(default_factory=list)
    pieces: list[PieceReport] = field(default_factory=list)
    static_inputs: list[str] = field(default_factory=list)
    copied_inputs: list[str] = field(default_factory=list)
    buckets: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    graphs: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        captured = [p for p in self.pieces if p.kind == PIECE]
        distinct = {(p.graph, p.distinct) for p in captured}
        lines = [
            f"{_count(self.graphs, 'graph')}, {_count(len(self.cuts), 'cut')}, {_count(len(captured), 'piece')} "
            f"({len(distinct)} distinct), compiler {self.options.get('compiler', '?')}",
            "",
            "cuts:",
        ]
        lines += [
            f"  {i:3} {c.op}{f' (of {c.composite})' if c.composite else ''}  {c.source}"
            for i, c in enumerate(self.cuts)
        ] or ["  none"]
        lines += ["", "pieces:"]
        for i, piece in enumerate(self.pieces):
            number = f"#{piece.distinct}" if piece.kind == PIECE else piece.kind
            lines.append(f"  {i:3} {number:>5} {_count(len(piece.ops), 'op')}: {_shorten(piece.ops)}  {piece.source}")
            if piece.why and piece.kind == LIVE:
                lines.append(f"            not captured: {piece.why}")
        lines += [
            "",
            f"static inputs: {len(self.static_inputs)}, copied inputs: {', '.join(self.copied_inputs) or 'none'}",
        ]
        if self.buckets:
            lines += ["", "buckets:"]
            lines += [
                f"  {b['size']:>6} rows  {'+'.join(b['variants']) or 'uncaptured'}  {b['bytes']} bytes"
                for b in self.buckets
            ]
        lines += ["", f"fallbacks: {self.fallbacks or 'none'}"]
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _shorten(ops: tuple[str, ...], most: int = 6) -> str:
    own = [op for op in ops if "::" in op]  # custom ops first: they are what a reader looks for
    shown = own[:most] or list(ops[:most])
    return ", ".join(shown) + (", ..." if len(ops) > len(shown) else "")


def explain(compiled: Callable[..., Any] | PrefillRunner, *args: Any, **kwargs: Any) -> Report:
    """What became of ``compiled``: a runner, or a compiled module together with arguments to call it with.

    A compiled module is called once with ``args``, on the general path: it has the effects of a call.
    Raises ValueError when nothing of it passes through this backend.
    """
    graphs: list[CompiledGraph] = []
    report = Report(fallbacks=stats().fallbacks)
    if isinstance(compiled, PrefillRunner):
        graphs = compiled.graphs()
        by_size = {c.bucket: c for c in compiled.captured}
        report.buckets = [
            {"size": size, "variants": list(c.variants), "bytes": c.nbytes, "seconds": c.seconds}
            for size, c in sorted(by_size.items())
        ]
        if not graphs:
            raise ValueError("explain: the runner has captured nothing yet; call capture() first")
    else:
        with session.watching(lambda graph, inputs, outputs: graphs.append(graph)):
            compiled(*args, **kwargs)
        if not graphs:
            raise ValueError("explain: the call did not pass through backend 'sparse_pcg'")
    report.graphs = len(graphs)
    report.options = graphs[0].options.to_dict()
    for number, graph in enumerate(graphs):
        _describe(report, number, graph)
    return report


def _describe(report: Report, number: int, graph: CompiledGraph) -> None:
    for segment, compiled in zip(graph.segments, graph.distinct, strict=True):
        if segment.kind == CUT:
            composite = str(segment.nodes[0].meta.get("from_composite", ""))
            report.cuts.append(CutReport(number, segment.why, segment.source, composite))
        else:
            place = compiled.number if compiled is not None else -1
            report.pieces.append(
                PieceReport(number, segment.kind, place, tuple(segment.ops), segment.source, segment.why)
            )
    report.static_inputs += [graph.names[i] for i in graph.static]
    report.copied_inputs += [graph.names[i] for i in graph.moving]
    for key in graph.captured_sizes():
        report.buckets.append({"size": key, "variants": ["cut"], "bytes": graph.pool_bytes()})
