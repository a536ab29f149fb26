"""The prefill benches of one rank, of target and draft, in one process: what ``prefill_bench.sh`` runs.

``rows`` writes h200-ttft[-NAME].json and .png into OUT: rows of ``bench ttft`` (partial results as it goes), and with
``--lanes`` then h200-serve.json on the same graphs. ``warm-sparse`` and ``warm-engine`` only fill the compile cache
beside it, from a model of the same pieces with fewer layers.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch

from sparse_pcg.bench.plots import plot
from sparse_pcg.bench.prefill import PAGE, World, rank_config
from sparse_pcg.bench.serve import pages_needed, serve_classes
from sparse_pcg.bench.timing import provenance
from sparse_pcg.bench.ttft import capture_all, measure_rows, parse_rows

ROWS = "0+512,0+1024,0+2048,32768+1024,131072+1024,0+8192,32768+4096,131072+4096"  # those that say most come first
SERVED = 1024  # new tokens of a class that is served at most
MODES = ("engine-cuts", "sparse_pcg-short")
TURNS, PATIENCE = 11, 9.0  # of a row, and seconds after which it takes no further turns
log = logging.getLogger("sparse_pcg").info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "warm-sparse", "warm-engine"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="glm5_2")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--lanes", type=int, nargs="*", default=())
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--name", default="")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    rows = parse_rows(args.rows)
    sizes = tuple(sorted({new for _, new in rows}))
    longest = max(prefix + new for prefix, new in rows)
    served = [row for row in rows if row[1] <= SERVED] if args.lanes else []
    pages = max(-(-longest // PAGE) + 2, pages_needed(served, args.lanes) if served else 0)
    config = rank_config(args.model, args.layers, args.experts, longest)
    if args.what != "rows":
        world = World.build(config, sizes[-1:], pages, args.compiler)
        runner = world.runner if args.what == "warm-sparse" else world.engine
        runner._compiled = runner._compile(runner.options)  # a trace of its own: of this runner's pieces alone
        (world.draft if args.what == "warm-sparse" else runner).capture(progress=False)
        log("warm")
        return

    began = time.perf_counter()
    world = World.build(config, sizes, pages, args.compiler)
    held = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    log("weights and caches: %.1f s, %.1f GiB", time.perf_counter() - began, held)
    model = {"name": args.model, "layers": config.num_layers, "experts": args.experts, "compiler": args.compiler}
    command = f"bash tests/gpu/prefill_bench.sh OUT {args.name}".rstrip()
    head = {**provenance(), "command": command, "model": model, **capture_all(world)}
    name = "h200-ttft" + (f"-{args.name}" if args.name else "")
    result = measure_rows(world, {"bench": "ttft", **head}, rows, TURNS, args.out / f"{name}.json", PATIENCE)
    plot(result, args.out / f"{name}.png")
    log("ttft done")
    if served:
        serve_classes(world, {"bench": "serve", **head}, served, args.lanes, MODES, 2, args.out / "h200-serve.json")
        log("serve done")


if __name__ == "__main__":
    main()
