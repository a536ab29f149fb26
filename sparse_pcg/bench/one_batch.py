"""SGLang's own ``one_batch`` with and without the plug-in, both prefill graph flags, prefill by prefill in turn.

Four processes, each with SGLang's model runner as ``sglang.benchmark.one_batch`` builds it, load at the same time. Then
they take turns: while one prefills the others sleep, so that a drift of the machine meets all four alike.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from .one_batch_model import write_model

SIZES = (128, 256, 512, 1024, 2048)
FLAGS = ("breakable", "tc_piecewise")
WORKERS = tuple(f"{flag}_{plugin}" for flag in FLAGS for plugin in ("off", "on"))
# New tokens of each request behind a cached prefix. Up to index_topk (2048) tokens in all nothing is cut.
PROMPTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((128,), 0), ((100,), 0), ((400,), 0), ((70,), 30), ((60, 50), 0), ((100,), 2000), ((500,), 1900), ((128,), 0),
)  # fmt: skip
MOVES = 0.1  # relative L2 that another context must make to the logits: five times what two runs may differ by
_COMMAND = (sys.executable, "-m", "sparse_pcg.bench.one_batch_worker")
_LOG_LINE = re.compile(r"(sparse_pcg: .*|Capture target prefill.*(?:end|elapsed|usage).*)")


class _Refused(RuntimeError):
    """The process lives, and could not do what it was asked to."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def ask(self, what: str, timeout: float, **arguments: Any) -> Any:
        """Send an order and wait for its answer."""
        self.connection.send((what, arguments))
        return self.answer(timeout)

    def answer(self, timeout: float) -> Any:
        """The next answer. Raises RuntimeError with the end of the log where there is none."""
        try:
            if not self.connection.poll(timeout):
                raise RuntimeError(f"no answer within {timeout:.0f} s")
            good, value = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"the process ended with {self.process.wait(10)}\n{self.tail()}") from None
        if not good:
            raise _Refused(f"{value}\n{self.tail()}")
        return value

    def tail(self, lines: int = 12) -> str:
        """The end of what the process wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def said(self) -> list[str]:
        """Its log lines about cuts, buckets and captures."""
        return list(dict.fromkeys(_LOG_LINE.findall(self.log.read_text(errors="replace"))))


def run_one_batch(
    *,
    heads: int = 8,
    layers: int = 20,
    sizes: Sequence[int] = SIZES,
    repeats: int = 9,
    model: Path | None = None,
    profile: Path | None = None,
    load_timeout: float = 420.0,
    keep: Callable[[dict[str, Any]], None] = lambda part: None,
) -> dict[str, Any]:
    """Prefill latency per size and process, medians of ``repeats`` turns, and how the processes' logits agree.

    heads, layers: of a GLM-5.2-shaped model with invented weights; ``model``: a folder to load instead. profile: a
    folder for one profile of the smallest size per process. keep: called with what there is after each stage. Returns
    ``workers`` (per process ``ms``, ``range_ms``, start-up seconds, bytes in graph pools, the most that the allocator
    has held since, log lines), ``prompts`` (bitwise to our run without graphs; relative L2 to SGLang's) and ``ratios``
    per size. A process that fails has an ``error`` and no times.

    Raises ValueError for a size or count that is not positive, or a folder without a config.
    """
    for name, value in (("heads", heads), ("layers", layers), ("repeats", repeats), ("sizes", min(sizes, default=0))):
        if value < 1:
            raise ValueError(f"one_batch: {name} must be at least 1, got {value}")
    if model is not None and not (model / "config.json").is_file():
        raise ValueError(f"one_batch: model must be a folder with a config.json, got {model}")
    shape = {"model": str(model)} if model else {"heads": heads, "layers": layers}
    result: dict[str, Any] = {**shape, "sizes": list(sizes), "repeats": repeats}
    with tempfile.TemporaryDirectory() as temporary:
        folder = model or write_model(Path(temporary) / "model", layers, heads)
        with _started(folder, sizes, Path(temporary)) as workers:
            rows: dict[str, dict[str, Any]] = {name: {} for name in workers}

            def each(step: Callable[[str, _Worker], None]) -> None:
                for name, worker in workers.items():
                    if "error" not in rows[name]:
                        try:
                            step(name, worker)
                        except RuntimeError as error:
                            rows[name]["error"] = str(error)[-3000:]

            def save() -> None:
                for name, worker in workers.items():
                    rows[name]["log"] = worker.said()
                keep(result)

            each(lambda name, worker: rows[name].update(worker.answer(load_timeout)))
            result["workers"] = rows
            save()
            result["prompts"] = _compare_prompts(each)
            save()
            _take_turns(each, rows, sizes, repeats)
            each(lambda name, worker: rows[name].update(worker.ask("memory", 60)))
            if profile is not None:
                each(lambda n, w: _write(profile / f"{n}.txt", w.ask("profile", 120, size=min(sizes))))
            result["ratios"] = _ratios(rows)
            save()
    return result


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _flags(folder: Path, flag: str, sizes: Sequence[int], port: int) -> list[str]:
    buckets = [str(size) for size in sizes]
    weights = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    fixed = (
        "--batch-size 1 --output-len 1 --disable-decode-cuda-graph --dsa-prefill-backend flashmla_sparse "
        "--dsa-decode-backend flashmla_sparse --mem-fraction-static 0.8 --max-total-tokens 16384 --log-level info"
    )
    return [
        *("--model-path", str(folder), "--load-format", weights, "--nccl-port", str(port), *fixed.split()),
        *("--cuda-graph-backend-prefill", flag, "--cuda-graph-max-bs-prefill", buckets[-1]),
        *("--input-len", *buckets, "--cuda-graph-bs-prefill", *buckets),
    ]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def _started(folder: Path, sizes: Sequence[int], logs: Path) -> Iterator[dict[str, _Worker]]:
    """The four processes, loading; they are ended with the block."""
    workers: dict[str, _Worker] = {}
    try:
        for name, port in zip(WORKERS, _free_ports(len(WORKERS)), strict=True):
            flag, plugin = name.rsplit("_", 1)
            env = {**os.environ, "SPARSE_PCG_SGLANG": str(int(plugin == "on")), "PYTHONUNBUFFERED": "1"}
            # Without it SGLang runs short prompts by another kernel wherever no graph serves them.
            env.setdefault("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
            ours, theirs = Pipe()
            with theirs, open(logs / f"{name}.log", "wb") as log:
                process = subprocess.Popen(
                    [*_COMMAND, str(theirs.fileno()), *_flags(folder, flag, sorted(sizes), port)],
                    env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            workers[name] = _Worker(process, ours, logs / f"{name}.log")
        yield workers
    finally:
        for worker in workers.values():
            with contextlib.suppress(OSError):
                worker.connection.send(None)
            worker.connection.close()
        for worker in workers.values():
            try:
                worker.process.wait(10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


Each = Callable[[Callable[[str, _Worker], None]], None]


def _compare_prompts(each: Each) -> list[dict[str, Any]]:
    found = []
    for number, (new, prefix) in enumerate(PROMPTS):
        answers: dict[str, dict[str, Any]] = {}
        asked = {"new": list(new), "prefix": prefix, "seed": number}

        def ask(name: str, worker: _Worker) -> None:
            try:
                answers[name] = worker.ask("prompt", 240, **asked)  # noqa: B023
            except _Refused as error:
                answers[name] = {"error": str(error)}  # noqa: B023

        each(ask)
        for answer in answers.values():
            if answer.get("context_moves", 1.0) < MOVES:
                answer["error"] = f"another context moves the logits by {answer['context_moves']:.2g}: nothing is shown"
        logits = {name: answer.pop("logits") for name, answer in answers.items() if "logits" in answer}
        for flag in FLAGS:
            ours, theirs = logits.get(f"{flag}_on"), logits.get(f"{flag}_off")
            if ours is not None and theirs is not None:
                distance = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
                answers[f"{flag}_on"]["relative_l2_to_off"] = distance
        found.append({"new": list(new), "prefix": prefix, **answers})
    return found


def _take_turns(each: Each, rows: dict[str, dict[str, Any]], sizes: Sequence[int], repeats: int) -> None:
    """The first turn warms up and is not counted."""
    ms: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in rows}
    for turn in range(repeats + 1):
        for size in sizes:
            each(lambda name, worker: ms[name][size].append(worker.ask("prefill_ms", 60, size=size, seed=turn)))  # noqa: B023
    for name, row in rows.items():
        if "error" not in row:
            counted = {size: taken[1:] for size, taken in ms[name].items()}
            row["ms"] = {size: statistics.median(taken) for size, taken in counted.items()}
            row["range_ms"] = {size: [min(taken), max(taken)] for size, taken in counted.items()}


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Per size: the better of ours over each of SGLang's, and each flag with the plug-in over the same without."""
    if any("ms" not in row for row in rows.values()):
        return {}
    ratios = {}
    for size in next(iter(rows.values()))["ms"]:
        at = {name: row["ms"][size] for name, row in rows.items()}
        best = min(at[f"{flag}_on"] for flag in FLAGS)
        ratios[size] = {f"best_on/{flag}_off": best / at[f"{flag}_off"] for flag in FLAGS}
        ratios[size] |= {f"{flag}_on/{flag}_off": at[f"{flag}_on"] / at[f"{flag}_off"] for flag in FLAGS}
    return ratios


def plot_one_batch(axes: Any, result: Mapping[str, Any]) -> None:
    """Bars of each process's median per size."""
    workers = {name: row for name, row in result["workers"].items() if "ms" in row}
    for number, (name, row) in enumerate(workers.items()):
        places = [i + 0.2 * number for i in range(len(result["sizes"]))]
        bars = axes.bar(places, row["ms"].values(), width=0.19, color=f"C{number}", label=name.replace("_", " "))
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.set_xticks([i + 0.3 for i in range(len(result["sizes"]))], list(map(str, result["sizes"])))
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms per prefill")
    axes.set_title("SGLang's one_batch, the plug-in off and on")
    axes.legend(fontsize=7)
