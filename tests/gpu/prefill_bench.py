"""The prefill benches of one rank, of target and draft, in one process: what ``prefill_bench.sh`` runs.

``rows`` writes h200-ttft[-NAME].json and .png into OUT: rows of ``bench ttft``. With ``--lanes`` h200-serve[-NAME].json
and .png come of the same graphs, after the first rows, of the classes of prompts in ``--served``. What has been
measured is in the JSON files at any time. ``warm-sparse`` and ``warm-engine`` only fill the compile cache beside it,
from a model of the same pieces with fewer layers. Under torchrun the processes share the whole model, and the files
are called h200x2-ttft-tp2[-NAME].
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sparse_pcg.bench.plots import plot
from sparse_pcg.bench.prefill import PAGE, World, rank_config, shared_config
from sparse_pcg.bench.serve import pages_needed, serve_classes
from sparse_pcg.bench.timing import device
from sparse_pcg.bench.ttft import capture_all, head, measure_rows, parse_rows, row_name
from sparse_pcg.launch import is_first, launched, processes
from sparse_pcg.models import Rank

ROWS = "0+512,0+1024,32768+1024,0+2048,131072+1024,0+8192,32768+4096,131072+4096"  # those that say most come first
SERVED = "0+512,0+1024,32768+1024,131072+1024"
MODES = ("engine-cuts", "sparse_pcg-short")
TURNS, PATIENCE = 11, 6.0  # of a row, and seconds after which it takes no further turns
BEGAN = time.perf_counter()
FIRST = 2  # rows before the lanes
log = logging.getLogger("sparse_pcg").info


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "warm-sparse", "warm-engine"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="glm5_2")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--sizes", type=int, nargs="*", default=(), help="buckets besides those of the rows")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further row begins")
    parser.add_argument("--lanes", type=int, nargs="*", default=())
    parser.add_argument("--served", default=SERVED, help="classes of prompts, among the rows")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--name", default="")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    level = logging.INFO if is_first() else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    with launched(device()) as mesh:
        measure(args, Rank() if mesh is None else Rank.of(mesh, expert_parallel=True))


def measure(args: argparse.Namespace, rank: Rank) -> None:
    rows = parse_rows(args.rows)
    sizes = tuple(sorted({*args.sizes, *(new for _, new in rows)}))
    longest = max(prefix + new for prefix, new in rows)
    served = parse_rows(args.served) if args.lanes else []
    pages = max(-(-longest // PAGE) + 2, pages_needed(served, args.lanes) if served else 0)
    model = (args.model, args.layers, args.experts, longest)
    config = rank_config(*model) if processes() == 1 else shared_config(*model, processes())
    if args.what != "rows":
        world = World.build(config, sizes[-1:], pages, args.compiler, rank)
        runner = world.runner if args.what == "warm-sparse" else world.engine
        runner._compiled = runner._compile(runner.options)  # a trace of its own: of this runner's pieces alone
        (world.draft if args.what == "warm-sparse" else runner).capture(progress=False)
        log("warm")
        return

    began = time.perf_counter()
    world = World.build(config, sizes, pages, args.compiler, rank)
    held = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    log("weights and caches: %.1f s, %.1f GiB", time.perf_counter() - began, held)
    settings = {"name": args.model, "experts": args.experts, "compiler": args.compiler}
    command = f"bash tests/gpu/prefill_bench.sh OUT {args.name}".rstrip()
    top = {**head(world, settings), "command": command, **capture_all(world)}
    log("graphs: %.1f s since the start", time.perf_counter() - BEGAN)
    name = "h200-ttft" if rank.size == 1 else f"h200x{rank.size}-ttft"
    name += f"-{args.name}" if args.name else ""
    partial = args.out / f"{name}.json" if is_first() else None
    turns = (args.turns, partial, PATIENCE, BEGAN + args.seconds)
    result = {"bench": "ttft", **top, "not_measured": [row_name(row) for row in rows]}
    measure_rows(world, result, rows[:FIRST], *turns)
    if served:
        lanes = {"bench": "serve", **top}
        under_load = "h200-serve" + (f"-{args.name}" if args.name else "")
        serve_classes(world, lanes, served, args.lanes, MODES, 2, args.out / f"{under_load}.json")
        plot(lanes, args.out / f"{under_load}.png")
        log("serve done")
    measure_rows(world, result, rows[FIRST:], *turns)
    if is_first() and result["rows"]:
        plot(result, args.out / f"{name}.png")
    log("ttft done")


if __name__ == "__main__":
    main()
