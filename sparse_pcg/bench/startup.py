"""What a start costs: tracing, compiling, capturing, in a fresh process with empty caches and again with warm ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..buckets import default_schedule
from ..options import Options
from ..runner import PrefillRunner
from .memory import BUCKETS, rank_and_pool, spread
from .timing import device, provenance

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def run_startup(
    *, model: str = "tiny", largest: int = 2048, buckets: int = BUCKETS, compiler: str = "inductor"
) -> dict[str, Any]:
    """Start the runner of ``model`` in a process of its own, twice: ``cold`` with empty cache folders, then ``warm``.

    Returns per start the seconds of import (interpreter and packages), model, trace (Dynamo), split and compile,
    warm-up and capture, and the number of pieces and distinct pieces; the head has machine, versions, commit and
    command.

    Raises ValueError for an unknown model, RuntimeError with the process's last words if a start fails.
    """
    if model not in ("glm5_2", "tiny"):
        raise ValueError(f"startup: model must be 'glm5_2' or 'tiny', got {model!r}")
    result: dict[str, Any] = {"bench": "startup", **provenance()}
    result["model"] = {"name": model, "largest": largest, "buckets": buckets, "compiler": compiler}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / part) for name, part in _CACHES.items()}
        for start in ("cold", "warm"):
            arguments = {"model": model, "largest": largest, "buckets": buckets, "compiler": compiler}
            done = subprocess.run(
                [sys.executable, "-m", __name__, json.dumps({**arguments, "spawned": time.time()})],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                raise RuntimeError(f"startup: the {start} start failed: {done.stderr.strip()[-2000:]}")
            result[start] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_start(
    model: str, largest: int, buckets: int, compiler: str, spawned: float | None = None
) -> dict[str, Any]:
    """One start in this process, which was spawned at ``spawned`` (``time.time()``); see ``run_startup``."""
    imported = time.perf_counter()
    loading = time.time() - spawned if spawned is not None else 0.0
    weights, kv = rank_and_pool("startup", model, largest)
    cuda = device() == "cuda"
    if cuda:
        torch.cuda.synchronize()
    built = time.perf_counter()
    sizes = spread(default_schedule(largest), buckets)
    runner = PrefillRunner(weights, kv, Options(capture_sizes=sizes, compiler=compiler))
    runner.capture(progress=False)
    if cuda:
        torch.cuda.synchronize()
    done = time.perf_counter()
    graph = runner.graphs()[0]
    compile_seconds = sum({d.number: d.seconds for d in graph.distinct if d is not None and d.key}.values())
    return {
        "import_seconds": loading,
        "model_seconds": built - imported,
        "trace_seconds": graph.started - built,
        "split_seconds": graph.build_seconds - compile_seconds,
        "compile_seconds": compile_seconds,
        "capture_seconds": done - graph.started - graph.build_seconds,
        "pieces": graph.piece_count,
        "distinct_pieces": graph.distinct_count,
        "buckets": len(runner.captured),
        "captures": sum(plan.captures for b in runner._buckets.values() for plan in b.plans.values()),
    }


if __name__ == "__main__":
    print(json.dumps(measure_start(**json.loads(sys.argv[1]))))
