"""``sparse-pcg bench ops``: what each operator takes by each of its providers, against what the GPU can do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from custom_ops._register import OPS, use_provider

from . import timing
from .floors import floor_run
from .op_cases import NAMES, Case, cases

ROWS = (1, 16, 128, 512, 2048, 8192)
KV_LEN = 32768
OWN = ("triton", "cuda", "reference")
_BIG = 64 << 20  # bytes from which the bandwidth counts, below it the time of a copy of as many
_LARGEST_COPY = 2 << 30
_TOPK_SHAPE, _TOPK_US = (512, 32768), 45.0  # rows and columns, and what their best 2048 may take


def run_ops(
    rows: Sequence[int] = ROWS,
    ops: Sequence[str] = (),
    own: bool = False,
    without: Sequence[str] = (),
    kv_len: int = KV_LEN,
    repeats: int = 20,
    partial: Path | None = None,
) -> dict[str, Any]:
    """Time every op at the shapes of DSA prefill, all providers that can serve it turn by turn.

    rows: token rows of the batches. ops: names, all of ``NAMES`` by default. own: only kernels of this package.
    without: providers that are left out, as ``flashinfer`` or ``topk_slots:flashinfer`` (some compile for minutes at
    first use). kv_len: tokens of the request (8192 rows: half as many). partial: file that holds the result so far.

    Each case has the time in us by provider, ``default`` (who serves it unasked), ``copy_us`` (a copy that moves the
    same bytes, timed alike), ``bound_us`` (bytes at the copy bandwidth, flops at the matrix rate, whichever is more),
    ``floor_us`` (as many launches one after another and loads that wait for one another, and nothing else; on a GPU),
    the default's share of both rates, why a provider is absent, and ``holds``: the default at most 1.1 times the best
    and, for what multiplies no matrices, 70 % of the bandwidth from 64 MB on, below at most 1.5 times the copy; the
    best 2048 of 512 rows of 32768 at most 45 us instead.

    Raises ValueError for an unknown op, or rows or repeats below 1.
    """
    unknown = [name for name in ops if name not in NAMES]
    if unknown:
        raise ValueError(f"ops: must be among {', '.join(NAMES)}, got {', '.join(unknown)}")
    if not rows or min(rows) < 1 or repeats < 1 or kv_len < 1:
        raise ValueError(f"rows, kv_len and repeats: must be at least 1, got {list(rows)}, {kv_len} and {repeats}")
    rates = {
        "copy_gbps": timing.copy_bandwidth(),
        "bf16_tflops": timing.matrix_rate(torch.bfloat16),
        "fp8_tflops": timing.matrix_rate(torch.float8_e4m3fn),
    }
    found: list[dict[str, Any]] = []
    result = {"bench": "ops", **timing.provenance(), "rates": rates, "own": own, "kv_len": kv_len, "cases": found}
    for count in rows:
        for case in cases(count, kv_len if count <= 4096 else kv_len // 2, tuple(ops) or NAMES):
            measured = _measure(case, rates, own, without, repeats)
            if torch.cuda.is_available():
                measured["floor_us"] = _floor_us(*case.chain)
            found.append({"op": case.op, "case": case.label, "rows": count, **measured})
            if partial is not None:
                timing.write_json(partial, result)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return result


@functools.cache
def _floor_us(launches: int, loads: int) -> float:
    run, _ = floor_run(launches, loads)
    return round(timing.gpu_us({"floor": timing.captured(run)})["floor"], 2)


def _left_out(op: str, provider: str, own: bool, without: Sequence[str]) -> bool:
    return provider in without or f"{op}:{provider}" in without or (own and provider not in OWN)


def _candidates(case: Case, own: bool, without: Sequence[str]) -> tuple[str, list[str], dict[str, str]]:
    """Who serves the case unasked, who else can, and why the others are absent."""
    op = OPS[case.op]
    default, usable, absent = "reference", [], {}
    for name in dict.fromkeys((*op.preference, *op.providers)):
        if name == "reference":
            continue
        why = "left out" if _left_out(case.op, name, own, without) else op.refusal(name, *case.args)
        if why is not None:
            absent[name] = why
            continue
        usable.append(name)
        preferred = name in op.preference and op.providers[name].slower(*case.args) is None
        if default == "reference" and preferred:
            default = name
    if not torch.cuda.is_available():
        return "reference", ["reference"], absent
    return default, usable or ["reference"], absent


def _measure(
    case: Case, rates: dict[str, float], own: bool, without: Sequence[str], repeats: int
) -> dict[str, Any]:
    runs: dict[str, Callable[[], Any]] = {}
    copies: dict[str, Callable[[], Any]] = {}
    with case.active():
        default, usable, absent = _candidates(case, own, without)
        for name in usable:
            with use_provider(case.op, name):
                try:
                    runs[name] = timing.captured(case.call)
                except Exception as error:  # one provider that fails leaves the rest of the bench
                    absent[name] = f"failed: {error}"[:300]
        if case.nbytes <= _LARGEST_COPY:
            copies = {name: timing.captured(run) for name, run in timing.copy_runs(case.nbytes).items()}
        times = timing.gpu_us({**runs, **copies}, repeats)
    copy_us = min((times.pop(name) for name in copies), default=case.nbytes / rates["copy_gbps"] / 1e3)
    taken: dict[str, Any] = {"bytes": case.nbytes, "flops": case.flops, "default": default}
    taken |= {"us": {name: round(t, 2) for name, t in times.items()}, "copy_us": round(copy_us, 2), "absent": absent}
    if default not in times:
        return taken
    rate = rates["fp8_tflops" if case.rate == torch.float8_e4m3fn else "bf16_tflops"]
    by_flops = case.flops / rate / 1e6 if rate else 0.0
    bound_us = max(case.nbytes / rates["copy_gbps"] / 1e3, by_flops)
    us = times[default]
    of_bandwidth = case.nbytes / us / 1e3 / rates["copy_gbps"]
    holds = {"default": us <= 1.1 * min(times.values())}
    if case.op in ("topk_indices", "topk_slots") and tuple(case.args[0].shape) == _TOPK_SHAPE:
        holds["time"] = us <= _TOPK_US
    elif not case.flops:
        holds["bandwidth"] = of_bandwidth >= 0.7 if case.nbytes >= _BIG else us <= 1.5 * copy_us
    return {
        **taken, "bound_us": round(bound_us, 3), "of_bandwidth": round(of_bandwidth, 3),
        "of_matrix_rate": round(by_flops / us, 3), "holds": holds,
    }  # fmt: skip


def plot_ops(axes: Any, result: Mapping[str, Any]) -> None:
    """The default's time over that of a copy of the same bytes, or over the bound where matrices are multiplied."""
    labels: list[str] = []
    series: dict[int, list[tuple[int, float]]] = {}
    for case in result["cases"]:
        if case["default"] not in case["us"]:
            continue
        label = f"{case['op']} {case['case'].split(', ')[0] if 'tokens' in case['case'] else case['case']}".strip()
        if label not in labels:
            labels.append(label)
        against = case["bound_us"] if case["flops"] else case["copy_us"]
        series.setdefault(case["rows"], []).append((labels.index(label), case["us"][case["default"]] / against))
    for i, (count, points) in enumerate(sorted(series.items())):
        axes.scatter([x for _, x in points], [y for y, _ in points], s=18, color=f"C{i}", label=f"{count} rows")
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="#94a3b8", linewidth=0.8)
    axes.set_xlabel("time over a copy of the same bytes\n(products: over the bound of bandwidth and matrix rate)")
    axes.legend(fontsize=7)
    axes.figure.set_size_inches(8, max(4.5, 0.2 * len(labels) + 1.5))
