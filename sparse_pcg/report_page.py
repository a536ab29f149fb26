"""The report as one HTML page without scripts or other files: the graph as a picture, then its parts as lists."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .split import LIVE, PIECE

if TYPE_CHECKING:
    from .report import CutReport, PieceReport, Report

_STYLE = """
:root { --ink: #1d2430; --soft: #5b6675; --page: #fbfbf9; --line: #d9dde3;
  --cut: #d1495b; --live: #e9a03b; --host: #c3cad4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa5b4; --page: #14181f; --line: #2d3541; --host: #4a5564 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.35rem; margin: 0 0 .25rem } h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem }
p { margin: .25rem 0 .75rem; color: var(--soft) }
code { font: 12.5px/1.45 ui-monospace, monospace }
.row { display: flex; align-items: center; gap: .5rem; margin: 3px 0 }
.row > span { flex: 0 0 5.2rem; font-size: 12px; color: var(--soft); text-align: right }
.bar { display: flex; flex: 1 1 0; min-width: 0; gap: 2px }
.bar a { flex: var(--w) 1 0; min-width: 4px; height: 22px; border-radius: 3px; background: var(--c);
  color: #fff; font-size: 11px; line-height: 22px; text-align: center; text-decoration: none; overflow: hidden;
  white-space: nowrap }
.bar a:target, a:focus { outline: 2px solid var(--ink) }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin: 0 .3rem 0 .9rem;
  vertical-align: -1px }
ol, ul { padding-left: 0; list-style: none; margin: 0 }
li { border-top: 1px solid var(--line); padding: .4rem 0 }
li:target { background: color-mix(in srgb, var(--c) 18%, transparent) }
li b { font-weight: 600 } li small { color: var(--soft); display: block } summary small { display: inline !important }
dl { display: grid; grid-template-columns: minmax(0, 11rem) minmax(0, 1fr); gap: .2rem .8rem; margin: 0 }
dt { color: var(--soft) } dd { margin: 0 }
summary { cursor: pointer } .off { color: var(--cut) }
"""
_COLOURS = ("#3a6ea5", "#4f8f6b", "#7a5ea8", "#2f8f9d", "#8a6d3b", "#5573b8", "#6b8e23", "#a0527a")


def render(report: Report) -> str:
    """The page."""
    body = [
        f"<h1>sparse_pcg: {escape(report.summary)}</h1>",
        f"<p>{escape(_lead(report))}</p>",
        _picture(report),
        _list("Cuts", [_cut(c) for c in report.cuts], "No cut: the whole forward is one graph."),
        _list("Pieces", [_piece(p) for p in report.pieces], "No pieces."),
        _buckets(report),
        _gates(report),
        _pairs("Fallbacks so far", [(k, str(n)) for k, n in report.fallbacks.items()] or [("none", "")]),
        _inputs(report),
        _pairs("Options", [(k, str(v)) for k, v in report.options.items()]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>sparse_pcg report</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(b for b in body if b) + "\n</body></html>\n"
    )


def _lead(report: Report) -> str:
    if not report.measured:
        return "Widths in the picture are equal: nothing was measured."
    cuts = sum(c.us or 0.0 for c in report.cuts)
    total = cuts + sum(p.us or 0.0 for p in report.pieces)
    return f"{total:.0f} us a replay, {cuts:.0f} us of it in cuts ({report.measured}); widths are to scale."


def _picture(report: Report) -> str:
    segments: list[CutReport | PieceReport] = sorted((*report.cuts, *report.pieces), key=lambda s: (s.graph, s.place))
    rows: list[list[CutReport | PieceReport]] = [[]]
    for segment in segments:
        after_cut = rows[-1] and not hasattr(rows[-1][-1], "kind")
        if rows[-1] and (rows[-1][-1].graph != segment.graph or (after_cut and hasattr(segment, "kind"))):
            rows.append([])
        rows[-1].append(segment)
    widest = max((sum(s.us or 0.0 for s in row) for row in rows), default=0.0)
    drawn = [_row(row, widest if report.measured else 0.0) for row in rows if row]
    key = (
        '<p class="key">a row ends with its cut:'
        f'<i style="background:{_COLOURS[0]}"></i>piece #n (one colour per compiled piece)'
        '<i style="background:var(--cut)"></i>cut<i style="background:var(--live)"></i>live'
        '<i style="background:var(--host)"></i>no kernels</p>'
    )
    return f'<h2>Graph</h2>{key}<div class="graph">{"".join(drawn)}</div>'


def _row(row: list[CutReport | PieceReport], widest: float) -> str:
    layers = [layer for s in row for layer in s.layers]
    named = f"layer {min(layers)}" if layers and min(layers) == max(layers) else ""
    named = named or (f"layers {min(layers)}-{max(layers)}" if layers else "")
    bars = [_bar(s, s.us or 0.0 if widest else 1.0) for s in row]
    if widest and (rest := widest - sum(s.us or 0.0 for s in row)) > 0:
        bars.append(f'<span style="flex:{rest:.2f} 1 0"></span>')
    return f'<div class="row"><span>{named}</span><div class="bar">{"".join(bars)}</div></div>'


def _bar(segment: CutReport | PieceReport, width: float) -> str:
    text = "" if isinstance(getattr(segment, "kind", None), str) and segment.kind != PIECE else _number(segment)  # type: ignore[union-attr]
    title = f"{_title(segment)}{'' if segment.us is None else f', {segment.us:.1f} us'}"
    return (
        f'<a href="#{_anchor(segment)}" style="--w:{max(width, 0.01):.2f};--c:{_colour(segment)}" '
        f'title="{escape(title, quote=True)}">{text}</a>'
    )


def _number(segment: CutReport | PieceReport) -> str:
    return f"#{segment.distinct}" if hasattr(segment, "distinct") else ""


def _title(segment: CutReport | PieceReport) -> str:
    return f"cut {segment.op}" if not hasattr(segment, "kind") else f"{segment.kind} {_number(segment)}"


def _colour(segment: CutReport | PieceReport) -> str:
    kind = getattr(segment, "kind", "cut")
    if kind == PIECE:
        return _COLOURS[segment.distinct % len(_COLOURS)]  # type: ignore[union-attr]
    return {"cut": "var(--cut)", LIVE: "var(--live)"}.get(kind, "var(--host)")


def _anchor(segment: CutReport | PieceReport) -> str:
    return f"s{segment.graph}-{segment.place}"


def _cut(cut: CutReport) -> str:
    of = f" <small>part of {escape(cut.composite)}</small>" if cut.composite else ""
    return _item(cut, f"<b>{escape(cut.op)}</b>{_time(cut)}{of}<small>{escape(cut.why)}</small>")


def _piece(piece: PieceReport) -> str:
    name = f"#{piece.distinct}" if piece.kind == PIECE else piece.kind
    facts = f"{len(piece.ops)} ops, {piece.kernels} kernels, {_bytes(piece.nbytes)} handed on"
    why = f"<small class=off>not captured: {escape(piece.why)}</small>" if piece.kind == LIVE else ""
    ops = f"<details><summary><small>ops</small></summary><code>{escape(', '.join(piece.ops))}</code></details>"
    return _item(piece, f"<b>{escape(name)}</b>{_time(piece)} <small>{facts}</small>{why}{ops}")


def _item(segment: CutReport | PieceReport, inner: str) -> str:
    return (
        f'<li id="{_anchor(segment)}" style="--c:{_colour(segment)}">{inner}<code>{escape(segment.source)}</code></li>'
    )


def _time(segment: CutReport | PieceReport) -> str:
    return "" if segment.us is None else f" {segment.us:.1f} us"


def _list(title: str, items: list[str], nothing: str) -> str:
    inner = f"<ol>{''.join(items)}</ol>" if items else f"<p>{nothing}</p>"
    opened = " open" if len(items) <= 12 else ""
    return f"<h2>{title} ({len(items)})</h2><details{opened}><summary>show</summary>{inner}</details>"


def _buckets(report: Report) -> str:
    if not report.buckets:
        return ""
    pairs = [
        (f"{b['size']} rows", f"{' + '.join(b['variants']) or 'uncaptured'}, {_bytes(b['bytes'])}")
        for b in report.buckets
    ]
    floor = f"floor: {report.floor} rows" if report.floor is not None else "no floor"
    return _pairs(f"Buckets (pool {_bytes(report.pool_bytes)}, {floor})", pairs)


def _gates(report: Report) -> str:
    if not report.gates:
        return ""
    return _pairs("Gates", [(name, "on" if on else f"off: {reason}") for name, on, reason in report.gates])


def _inputs(report: Report) -> str:
    copied = ", ".join(report.copied_inputs) or "none"
    names = escape(", ".join(report.static_inputs))
    static = f"<details><summary>{len(report.static_inputs)}</summary><code>{names}</code></details>"
    return (
        "<h2>Inputs</h2><dl><dt>read in place (static)</dt><dd>" + static + "</dd>"
        f"<dt>copied at each call</dt><dd><code>{escape(copied)}</code></dd></dl>"
    )


def _pairs(title: str, pairs: list[tuple[str, str]]) -> str:
    inner = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)
    return f"<h2>{escape(title)}</h2><dl>{inner}</dl>"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
