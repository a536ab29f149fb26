"""Timing shared by the benches: medians by CUDA events, peers interleaved, L2 flushed; the record of a run.

Without a GPU the same functions give wall-clock times, so that a bench can be tried and tested anywhere.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of the largest GPU
_BIG_COPY = 1 << 30
_SHORT = 10  # digits of a commit that are shown
_PACKAGES = ("torch", "triton", "flashinfer-python", "sgl-deep-gemm", "sgl-flash-mla")


def captured(run: Callable[[], Any], warmup: int = 3) -> Callable[[], Any]:
    """``run`` as one CUDA graph: launched one by one, small kernels would show the time of the host.

    The graph keeps ``run`` and what it refers to alive. Without a GPU: ``run`` itself, warmed up.
    """
    for _ in range(warmup):
        run()
    if not torch.cuda.is_available():
        return run
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    owner = (run, graph)
    return lambda: owner[1].replay()


def gpu_us(runs: Mapping[str, Callable[[], Any]], repeats: int = 30, flush: bool = True) -> dict[str, float]:
    """Median device time of each of ``runs`` in us, measured turn by turn.

    flush: overwrite the L2 cache before each, as the layers of a model do; it also hides the host's launch.
    """
    if not torch.cuda.is_available():
        return host_us(runs, repeats)
    buffer = torch.empty(FLUSH_BYTES if flush else 1, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        events = []
        for run in runs.values():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            start.record()
            run()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        for name, (start, end) in zip(runs, events, strict=True):
            times[name].append(start.elapsed_time(end) * 1000)
    return {name: statistics.median(taken) for name, taken in times.items()}


def host_us(runs: Mapping[str, Callable[[], Any]], repeats: int = 30) -> dict[str, float]:
    """Median time in us that each of ``runs`` keeps the host, measured turn by turn; the device is idle before."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            _wait()
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    _wait()
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def copy_runs(nbytes: int) -> dict[str, Callable[[], Any]]:
    """Copies on the device that move ``nbytes``: they read one half and write the other.

    By the driver, and by a kernel of PyTorch: on an H200 the driver's is a third slower at some sizes, as 1 GiB.
    """
    half = max(1, nbytes // 16)
    source, target = (torch.zeros(half, dtype=torch.int64, device=device()) for _ in range(2))
    return {"copy": lambda: target.copy_(source), "copy by kernel": lambda: torch.add(source, 0, out=target)}


def copy_bandwidth(nbytes: int = _BIG_COPY) -> float:
    """GB/s that a large copy on the device moves, the faster of both, bytes read and bytes written counted."""
    nbytes = nbytes if torch.cuda.is_available() else min(nbytes, 1 << 24)
    runs = {name: captured(run) for name, run in copy_runs(nbytes).items()}
    return nbytes / min(gpu_us(runs, repeats=20).values()) / 1000


def matrix_rate(dtype: torch.dtype) -> float:
    """TFLOP/s of a large square product of ``dtype`` (bfloat16 or float8_e4m3fn); 0 where it cannot run."""
    size = 8192 if torch.cuda.is_available() else 256
    a, b = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    one = torch.ones((), device=device())

    def product() -> torch.Tensor:
        if dtype == torch.float8_e4m3fn:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return a @ b

    try:
        taken = gpu_us({"product": captured(product)}, repeats=10)
    except (RuntimeError, NotImplementedError):
        return 0.0
    return 2 * size**3 / taken["product"] / 1e6


def device() -> str:
    """ "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def provenance(root: Path | None = None) -> dict[str, Any]:
    """Machine, versions, commit and command of this run, for the head of a result.

    root: where the commit is looked up, by default the folder of this package; "unknown" outside a checkout. The
    environment variable SPARSE_PCG_COMMIT names it where the files are a copy.
    """
    machine: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    machine["python"] = platform.python_version()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine.update(
            device=properties.name,
            sms=properties.multi_processor_count,
            memory_gib=round(properties.total_memory / 2**30),
            capability=".".join(map(str, torch.cuda.get_device_capability())),
        )
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"machine": machine, "versions": versions, "commit": _commit(root), "command": command_line(sys.argv)}


def command_line(argv: Sequence[str]) -> str:
    """What to type to run this again: the installed command, and results into files of the same name here."""
    called = Path(argv[0])
    name = {"__main__.py": "sparse-pcg", "cli.py": "sparse-pcg bench"}.get(called.name, called.name)
    outputs = ("--json", "--plot")
    words = [Path(w).name if before in outputs else w for before, w in itertools.pairwise(argv)]
    return shlex.join([*name.split(), *words])


def _commit(root: Path | None) -> str:
    if named := os.environ.get("SPARSE_PCG_COMMIT"):
        return named[:_SHORT]
    command = ["git", "rev-parse", f"--short={_SHORT}", "HEAD"]
    where = root or Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def write_json(path: Path | str, result: Mapping[str, Any]) -> None:
    """Write ``result`` as indented JSON. Whoever ends this process meanwhile leaves the file as it was."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(beside, path)
