"""Pictures of the results, by matplotlib (extra ``bench``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLUE, _GREY, _ORANGE = "#2563eb", "#94a3b8", "#ea580c"


def plot(result: Mapping[str, Any], path: Path | str) -> None:
    """Draw what a bench returned into ``path`` (PNG, SVG or PDF by its ending).

    Raises ValueError for a result of no known bench, RuntimeError where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("plot: needs matplotlib: pip install 'sparse-pcg[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from .one_batch import plot_one_batch
    from .ops import plot_ops

    kinds = {
        "ops": plot_ops,
        "cut-cost": _cut_cost,
        "memory": _memory,
        "startup": _startup,
        "ttft": _ttft,
        "serve": _serve,
        "peers": _cut_cost,
        "one-batch": plot_one_batch,
    }
    draw = kinds.get(str(result.get("bench")))
    if draw is None:
        raise ValueError(f"plot: result['bench'] must be one of {sorted(kinds)}, got {result.get('bench')!r}")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    try:
        draw(axes, dict(result))
        machine, versions = result.get("machine", {}), result.get("versions", {})
        where = f"{machine.get('device', '')}, torch {versions.get('torch', '?')}"
        figure.supxlabel(where, fontsize=8, color="#475569")
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _cut_cost(axes: Any, result: Mapping[str, Any]) -> None:
    names = list(result["peers"])
    places = range(len(names))
    for shift, key, colour in ((-0.2, "host_us", _GREY), (0.2, "elapsed_us", _BLUE)):
        values = [result["peers"][n][key] for n in names]
        bars = axes.barh([p + shift for p in places], values, height=0.38, color=colour, label=key.replace("_us", ""))
        axes.bar_label(bars, labels=[f"{v:.0f}" for v in values], fontsize=7, padding=2)
    axes.set_yticks(list(places), [n.replace("_", " ") for n in names])
    axes.invert_yaxis()
    times = [row[key] for row in result["peers"].values() for key in ("host_us", "elapsed_us")]
    axes.set_xscale("log" if max(times) > 10 * min(times) else "linear")  # a log axis does not start at 0
    axes.margins(x=0.1)  # room for the numbers
    axes.set_xlabel("us per forward")
    axes.set_title(f"{result['model']['cuts']} cuts: host time and time on the GPU")
    axes.legend(loc="lower right")


def _memory(axes: Any, result: Mapping[str, Any]) -> None:
    rows = result["buckets"]
    sizes = [str(r["bucket"]) for r in rows]
    pool = [r["pool_bytes"] / 2**20 for r in rows]
    driver = [r["driver_bytes"] / 2**20 for r in rows]
    axes.bar(sizes, pool, color=_BLUE, label="graph pool")
    axes.bar(sizes, driver, bottom=pool, color=_ORANGE, label="driver")
    axes.tick_params(axis="x", rotation=60, labelsize=8)
    axes.set_xlabel("buckets captured so far, big to small")
    axes.set_ylabel("MiB")
    axes.set_title(f"pool {result['ratio']:.2f}x the biggest bucket's alone")
    axes.legend(loc="lower left")


def _startup(axes: Any, result: Mapping[str, Any]) -> None:
    phases = ("import", "model", "trace", "split", "compile", "capture")
    starts = [s for s in ("cold", "warm") if s in result]
    left = [0.0] * len(starts)
    for i, phase in enumerate(phases):
        seconds = [result[s][f"{phase}_seconds"] for s in starts]
        axes.barh(starts, seconds, left=left, label=phase, color=f"C{i}")
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    first = result[starts[0]]
    axes.set_title(f"{first['pieces']} pieces, {first['distinct_pieces']} distinct, {first['buckets']} buckets")
    axes.legend(ncols=len(phases), fontsize=8)


def _ttft(axes: Any, result: Mapping[str, Any]) -> None:
    rows = result["rows"]
    _bars_by_mode(axes, [{mode: (ms, ms) for mode, ms in row["ms"].items()} for row in rows], label_size=5)
    axes.set_yticks(range(len(rows)), [f"{row['prefix']} + {row['new']}" for row in rows])
    axes.set_xlabel("ms to the first token (cached + new tokens)")
    axes.set_title(f"{result['model']['name']}, {result['model']['layers']} layers: time to first token")


def _serve(axes: Any, result: Mapping[str, Any]) -> None:
    classes = result["classes"]
    found = [{mode: (m["median_ms"], m["p99_ms"]) for mode, m in c["modes"].items()} for c in classes]
    _bars_by_mode(axes, found, label_size=6)
    axes.set_yticks(range(len(classes)), [f"{c['prefix']} + {c['new']}, {c['lanes']} at once" for c in classes])
    axes.set_xlabel("ms to the first token: median, to the 99th percentile")
    axes.set_title(f"{result['model']['name']}, {result['model']['layers']} layers, under load")


def _bars_by_mode(axes: Any, rows: list[dict[str, tuple[float, float]]], label_size: int) -> None:
    """A group of bars per row, a bar per mode that was measured there: to the first number, a whisker to the second."""
    modes = list(dict.fromkeys(mode for row in rows for mode in row))
    height = 0.84 / len(modes)
    for number, mode in enumerate(modes):
        places = [i for i, row in enumerate(rows) if mode in row]
        shifted = [i + (number - (len(modes) - 1) / 2) * height for i in places]
        values = [rows[i][mode][0] for i in places]
        beyond = [rows[i][mode][1] - rows[i][mode][0] for i in places]
        whiskers = {"xerr": [[0.0] * len(beyond), beyond], "capsize": 2} if any(beyond) else {}
        bars = axes.barh(shifted, values, height=0.9 * height, color=f"C{number}", label=mode, **whiskers)
        axes.bar_label(bars, labels=[f"{v:.1f}" for v in values], fontsize=label_size, padding=2)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.legend(fontsize=7)
