"""Time to first token of one prefill, in every way of running it: from a batch on the host to a token on the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..batch import Batch
from ..compiled_graph import CompiledGraph
from ..counters import logger
from ..errors import CaptureError
from ..launch import is_first, launched, processes
from ..models import ModelConfig
from ..models.sharding import Rank
from ..runner import PrefillOutput
from ..split import PIECE
from ..verification import same_bytes
from .prefill import MODES, PAGE, World, full_graph, median_ms, profiled, rank_config, shared_config
from .timing import device, provenance, write_json

# (tokens in the caches, new tokens)
ROWS = (
    (0, 512),
    (0, 1024),
    (0, 2048),
    (0, 8192),
    (32768, 1024),
    (32768, 4096),
    (131072, 1024),
    (131072, 4096),
)
FLOOR = "full graph"


def parse_rows(text: str) -> tuple[tuple[int, int], ...]:
    """Rows from "0+512,32768+1024". Raises ValueError for anything else."""
    rows = []
    for part in text.split(","):
        prefix, plus, new = part.strip().partition("+")
        if not (plus and prefix.isdigit() and new.isdigit() and int(new)):
            raise ValueError(f"rows: must be like '0+512,32768+1024' (cached + new tokens), got {text!r}")
        rows.append((int(prefix), int(new)))
    return tuple(rows)


def run_ttft(
    *,
    model: str = "glm5_2",
    layers: int | None = None,
    experts: int = 4,
    rows: Sequence[tuple[int, int]] = ROWS,
    repeats: int = 15,
    compiler: str = "inductor",
    tp: int = 1,
    partial: Path | None = None,
) -> dict[str, Any]:
    """Medians of interleaved runs, per row and mode, in milliseconds.

    model: "glm5_2", "deepseek_v32" or "glm5", one of eight tensor-parallel ranks with ``experts`` routed experts, or
    "tiny". layers: None for all. rows: (cached, new) tokens of one request. tp: more than 1: that many processes
    (torchrun's) share the whole model, each with 1 / tp of its heads and widths and ``experts`` of its routed experts;
    a turn takes as long as its slowest rank. partial: a file that the result so far is written to after each row.

    Per row ``ms`` has each mode and the floor, one full graph over the same kernels with lengths frozen;
    ``gpu_busy_ms`` the sum of kernel time of one run; ``draft_ms`` what the draft takes after the token is on the host;
    ``bitwise`` whether the replays equal the uncaptured run; ``left_out`` what could not be captured,
    and why. Raises ValueError for an unknown model or bad rows.
    """
    if model not in ("glm5_2", "glm5", "deepseek_v32", "tiny"):
        raise ValueError(f"ttft: model must be 'glm5_2', 'glm5', 'deepseek_v32' or 'tiny', got {model!r}")
    if repeats < 1:
        raise ValueError(f"ttft: repeats must be at least 1, got {repeats}")
    if tp != processes():
        raise ValueError(f"ttft: tp must be torchrun's number of processes, {processes()} here, got {tp}")
    longest = max(prefix + new for prefix, new in rows)
    sizes = tuple(sorted({new for _, new in rows}))
    settings = {"name": model, "experts": experts, "compiler": compiler}
    if tp == 1:
        world, seconds = _build(rank_config(model, layers, experts, longest), sizes, longest, compiler, Rank())
        return _measured(world, seconds, settings, rows, repeats, partial)
    config = shared_config(model, layers, experts, longest, tp)
    Rank(0, tp, expert_parallel=True).part_of(config)  # what cannot be shared is an error before anything starts
    with launched(device()) as mesh:
        assert mesh is not None
        world, seconds = _build(config, sizes, longest, compiler, Rank.of(mesh, expert_parallel=True))
        return _measured(world, seconds, settings, rows, repeats, partial)


def _build(config: ModelConfig, sizes: tuple[int, ...], longest: int, compiler: str, rank: Rank) -> tuple[World, float]:
    began = time.perf_counter()
    world = World.build(config, sizes, -(-longest // PAGE) + 2, compiler, rank)
    return world, time.perf_counter() - began


def _measured(
    world: World,
    seconds: float,
    settings: dict[str, Any],
    rows: Sequence[tuple[int, int]],
    repeats: int,
    partial: Path | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {"bench": "ttft", **head(world, settings), **capture_all(world)}
    result["seconds"]["weights"] = seconds
    return measure_rows(world, result, rows, repeats, partial if is_first() else None)


def head(world: World, settings: dict[str, Any]) -> dict[str, Any]:
    """What was measured, on what, by which command. ``weight_bytes``: of the rank, target and draft."""
    parameters = (*world.runner.model.parameters(), *world.draft.model.parameters())
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in parameters}
    model = {**settings, "layers": world.config.num_layers, "weight_bytes": sum(weights.values())}
    found = {**provenance(), "model": model}
    if (ranks := world.turns.rank.size) > 1:
        model["tp"] = found["machine"]["ranks"] = ranks
        command = found["command"].replace("sparse-pcg", "sparse_pcg", 1)
        found["command"] = f"torchrun --nproc-per-node {ranks} -m {command}"
    return found


def capture_all(world: World) -> dict[str, Any]:
    """Capture every runner: their cuts, distinct pieces, bytes of graphs, seconds."""
    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    for name, runner in (("sparse_pcg", world.runner), ("draft", world.draft), ("engine-cuts", world.engine)):
        began, held = time.perf_counter(), world.runner.pool_bytes
        runner.capture(progress=False)
        seconds[f"capture {name}"] = time.perf_counter() - began
        memory[name] = world.runner.pool_bytes - held if name == "draft" else runner.pool_bytes
        logger.info("captured %s: %.1f s, %d bytes", name, seconds[f"capture {name}"], memory[name])
    graphs = {"sparse_pcg": world.runner.graphs()[0], "engine-cuts": world.engine.graphs()[0]}
    return {
        "cuts": {name: graph.cut_count for name, graph in graphs.items()},
        "captured_collectives": {name: _collectives(graph) for name, graph in graphs.items()},
        "distinct_pieces": {name: graph.distinct_count for name, graph in graphs.items()},
        "graph_bytes": memory,
        "seconds": seconds,
    }


def _collectives(graph: CompiledGraph) -> int:
    """All-reduces in captured pieces, none of which is a cut."""
    return sum(op.startswith("_c10d_functional::all_reduce") for s in graph.segments if s.kind == PIECE for op in s.ops)


def measure_rows(
    world: World,
    result: dict[str, Any],
    rows: Sequence[tuple[int, int]],
    repeats: int,
    partial: Path | None = None,
    patience: float = float("inf"),
    until: float = float("inf"),
) -> dict[str, Any]:
    """Add to ``result["rows"]``. patience: seconds after which a row takes no further turns, of which it has two.

    until: time by ``time.perf_counter`` after which no further row begins, on any rank. Rows that are to come, or never
    came, are named in ``result["not_measured"]``.
    """
    done = result.setdefault("rows", [])
    waiting = result.setdefault("not_measured", [row_name(row) for row in rows])
    for prefix, new in rows:
        if partial is not None:
            write_json(partial, result)
        began = time.perf_counter()
        if world.turns.most(began - until) > 0:
            logger.info("no time for %s", ", ".join(waiting))
            break
        done.append(_row(world, prefix, new, repeats, len(done), patience))
        waiting.remove(row_name((prefix, new)))
        logger.info("measured %d + %d: %.1f s", prefix, new, time.perf_counter() - began)
    if not waiting:
        del result["not_measured"]
    if partial is not None:
        write_json(partial, result)
    return result


def row_name(row: tuple[int, int]) -> str:
    """As ``parse_rows`` reads it."""
    return f"{row[0]}+{row[1]}"


def _row(world: World, prefix: int, new: int, repeats: int, seed: int, patience: float) -> dict[str, Any]:
    pages, batch = world.request(prefix, new, seed)
    is_short = prefix + new <= world.config.index_topk
    modes = [m for m in MODES if is_short or m != "sparse_pcg-short"]
    seed_out = torch.empty(1, world.config.index_topk, dtype=torch.int32, device=world.runner.device)
    with pages:
        outputs = {mode: world.forward(mode, batch) for mode in modes if mode != "eager"}
        plain = outputs["uncaptured"]
        replays = [outputs[m] for m in modes if m.startswith("sparse_pcg")]
        bitwise = all(same_bytes(r.hidden, plain.hidden) and same_bytes(r.logits, plain.logits) for r in replays)
        bitwise = bool(world.turns.least(bitwise))
        served = {m: (o.bucket, o.variant) for m, o in outputs.items()}
        del outputs, plain, replays
        ways: dict[str, Callable[[], PrefillOutput]] = {m: _way(world, m, batch) for m in modes}
        left_out: dict[str, str] = {}
        with ExitStack() as stack:
            try:
                ways[FLOOR] = stack.enter_context(full_graph(world.runner, batch, new))
            except CaptureError as error:
                left_out[FLOOR] = str(error)
                logger.warning("%d + %d without %s: %s", prefix, new, FLOOR, error)
            times: dict[str, list[float]] = {m: [] for m in ways}
            drafts: dict[str, list[float]] = {m: [] for m in modes}
            _settle()
            began = time.perf_counter()
            for turn in range(repeats + 1):
                if turn > 2 and world.turns.most(time.perf_counter() - began) > patience:
                    break
                for mode, run in ways.items():
                    if mode == "eager" and turn > min(repeats, 5):
                        continue  # far slower than all others, and no less steady
                    took, draft = _once(world, mode, run, batch, seed_out)
                    if turn:  # the first turn warms up
                        times[mode].append(took)
                        if mode in drafts:
                            drafts[mode].append(draft)
        busy, kernels = profiled(_way(world, "uncaptured", batch))
    times, drafts = world.turns.slowest(times), world.turns.slowest(drafts)
    ms = {mode: median_ms(taken) for mode, taken in times.items()}
    return {
        "prefix": prefix,
        "new": new,
        "ms": ms,
        "range_ms": {mode: [min(t) * 1000, max(t) * 1000] for mode, t in times.items()},
        "draft_ms": {mode: median_ms(taken) for mode, taken in drafts.items()},
        "gpu_busy_ms": busy,
        "kernels": kernels,
        "turns": len(times["sparse_pcg"]),
        "served": {m: list(s) for m, s in served.items()},
        "bitwise": bitwise,
        **({"left_out": left_out} if left_out else {}),
    }


def _way(world: World, mode: str, batch: Batch) -> Callable[[], PrefillOutput]:
    return lambda: world.forward(mode, batch)


def _once(
    world: World, mode: str, run: Callable[[], PrefillOutput], batch: Batch, seed: torch.Tensor
) -> tuple[float, float]:
    """Seconds to the first token on the host, and seconds of the draft after it."""
    _synchronize()
    world.turns.start()
    start = time.perf_counter()
    out = run()
    int(out.logits.argmax())
    first = time.perf_counter()
    if mode == FLOOR:
        return first - start, 0.0
    world.extend(mode, batch, out, seed)
    _synchronize()
    return first - start, time.perf_counter() - first


def _settle() -> None:
    gc.collect()
    _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
