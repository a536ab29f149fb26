"""``sparse-pcg bench``: one command per measurement, each with ``--json`` and ``--plot``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from ..launch import is_first
from .timing import write_json

app = typer.Typer(no_args_is_help=True, help="Measure: the cost of a cut, memory, start-up, operators.")

JsonFile = Annotated[
    Optional[Path],  # noqa: UP045  (typer reads the annotation at run time on Python 3.10)
    typer.Option("--json", help="Also write the result to this file.", dir_okay=False),
]
PlotFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--plot", help="Also draw the result into this file (PNG, SVG, PDF).", dir_okay=False),
]


def finish(run: Callable[[], dict[str, Any]], json_file: Path | None, plot_file: Path | None) -> dict[str, Any]:
    """Run a bench, then write and draw its result; bad arguments end the command before anything runs.

    Where several ranks run it together the first one writes.
    """
    for name, path in (("json", json_file), ("plot", plot_file)):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{name}: there is no folder {path.parent}")
    try:
        result = run()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not is_first():
        return result
    if json_file is not None:
        write_json(json_file, result)
    if plot_file is not None:
        from .plots import plot

        plot(result, plot_file)
    typer.echo(json.dumps(result, indent=2))
    return result


@app.command("cut-cost")
def cut_cost(
    layers: Annotated[int, typer.Option(help="Layers, with one cut each.")] = 60,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Token rows of a forward.")] = 512,
    repeats: Annotated[int, typer.Option(help="Turns; medians are given.")] = 40,
    peers: Annotated[str, typer.Option(help="Comma-separated; default all.")] = "",
    compiler: Annotated[str, typer.Option(help="What compiles the pieces: inductor or eager.")] = "inductor",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Host and GPU time of one forward and of one cut, against PyTorch's own ways and a hand-written loop."""
    from .cut_cost import PEERS, run_cut_cost

    chosen = _words(peers) or PEERS
    sizes = {"layers": layers, "hidden": hidden, "tokens": tokens, "repeats": repeats}
    finish(lambda: run_cut_cost(**sizes, peers=chosen, compiler=compiler), json_file, plot_file)


@app.command()
def memory(
    model: Annotated[str, typer.Option(help="glm5_2 (4 layers of one of eight ranks) or tiny.")] = "glm5_2",
    largest: Annotated[int, typer.Option(help="The biggest bucket.")] = 2048,
    buckets: Annotated[int, typer.Option(help="How many, spread over the schedule.")] = 20,
    compiler: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Bytes of the graph pool and of the driver, bucket by bucket."""
    from .memory import run_memory

    finish(lambda: run_memory(model=model, largest=largest, buckets=buckets, compiler=compiler), json_file, plot_file)


@app.command()
def startup(
    model: Annotated[str, typer.Option(help="glm5_2 (4 layers of one of eight ranks) or tiny.")] = "tiny",
    largest: Annotated[int, typer.Option(help="The biggest bucket.")] = 2048,
    buckets: Annotated[int, typer.Option(help="How many, spread over the schedule.")] = 20,
    compiler: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Seconds to trace, compile and capture, with empty caches and with warm ones."""
    from .startup import run_startup

    finish(lambda: run_startup(model=model, largest=largest, buckets=buckets, compiler=compiler), json_file, plot_file)


@app.command()
def ttft(
    model: Annotated[str, typer.Option(help="glm5_2, glm5, deepseek_v32 (one of eight ranks) or tiny.")] = "glm5_2",
    layers: Annotated[int, typer.Option(help="How many of its layers; 0: all.")] = 0,
    experts: Annotated[int, typer.Option(help="Routed experts on the rank.")] = 4,
    rows: Annotated[str, typer.Option(help="Cached + new tokens, as 0+512,32768+1024; default: eight rows.")] = "",
    repeats: Annotated[int, typer.Option(help="Turns; medians are given.")] = 15,
    compiler: Annotated[str, typer.Option(help="What compiles the pieces: inductor or eager.")] = "inductor",
    tp: Annotated[int, typer.Option(help="Ranks that share the whole model, under torchrun --nproc-per-node.")] = 1,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time to first token of one prefill: eager, uncaptured, with an engine's cuts, ours, and the floor."""
    from .ttft import ROWS, parse_rows, run_ttft

    def run() -> dict[str, Any]:
        chosen = parse_rows(rows) if rows else ROWS
        sizes = {"layers": layers or None, "experts": experts, "repeats": repeats, "tp": tp}
        return run_ttft(model=model, rows=chosen, compiler=compiler, partial=json_file, **sizes)  # type: ignore[arg-type]

    finish(run, json_file, plot_file)


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="glm5_2, glm5, deepseek_v32 (one of eight ranks) or tiny.")] = "glm5_2",
    layers: Annotated[int, typer.Option(help="How many of its layers; 0: all.")] = 0,
    experts: Annotated[int, typer.Option(help="Routed experts on the rank.")] = 4,
    rows: Annotated[str, typer.Option(help="Classes: cached + new tokens, as 0+512,32768+1024; default: eight.")] = "",
    lanes: Annotated[str, typer.Option(help="Clients that send at once, comma-separated; default: 1,4,8,16.")] = "",
    modes: Annotated[str, typer.Option(help="Comma-separated; default: all that ttft measures.")] = "",
    runs: Annotated[int, typer.Option(help="Runs of each mode, in turn.")] = 3,
    compiler: Annotated[str, typer.Option(help="What compiles the pieces: inductor or eager.")] = "inductor",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time to first token under load: clients in a closed loop whose requests share batches."""
    from .prefill import MODES
    from .serve import LANES, run_serve
    from .ttft import ROWS, parse_rows

    def run() -> dict[str, Any]:
        clients = _numbers(lanes, "lanes: must be whole numbers like 1,4") or LANES
        chosen = parse_rows(rows) if rows else ROWS
        sizes = {"layers": layers or None, "experts": experts, "compiler": compiler, "partial": json_file}
        return run_serve(model=model, rows=chosen, lanes=clients, modes=_words(modes) or MODES, runs=runs, **sizes)  # type: ignore[arg-type]

    finish(run, json_file, plot_file)


@app.command()
def ops(
    rows: Annotated[str, typer.Option(help="Token rows, comma-separated; default: 1 to 8192.")] = "",
    names: Annotated[str, typer.Option("--ops", help="Comma-separated; default all.")] = "",
    own: Annotated[bool, typer.Option("--own", help="Only kernels of this package.")] = False,
    without: Annotated[str, typer.Option(help="Providers to leave out, as flashinfer or topk_slots:flashinfer.")] = "",
    repeats: Annotated[int, typer.Option(help="Turns; medians are given.")] = 20,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Each operator by each of its providers, against a copy of the same bytes and the rate of matrix products."""
    from .ops import ROWS, run_ops

    def run() -> dict[str, Any]:
        counts = _numbers(rows, "rows: must be whole numbers like 16,512") or ROWS
        return run_ops(counts, _words(names), own, _words(without), repeats=repeats, partial=json_file)

    finish(run, json_file, plot_file)


@app.command()
def peers(
    layers: Annotated[int, typer.Option(help="Layers, with one cut each.")] = 60,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Token rows of a forward.")] = 512,
    repeats: Annotated[int, typer.Option(help="Turns; medians are given.")] = 40,
    names: Annotated[str, typer.Option("--peers", help="Comma-separated; default all.")] = "",
    compiler: Annotated[str, typer.Option(help="What compiles our pieces: inductor or eager.")] = "inductor",
    one_batch: Annotated[str, typer.Option(help="Also SGLang's one_batch with and without us, as 8,64 heads.")] = "",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """SGLang's own graph backends beside ours on the model of cut-cost: time, start-up, graph memory."""
    from .one_batch import run_one_batch
    from .peers import PEERS, run_peers
    from .timing import provenance

    chosen = _words(names) or PEERS
    sizes = {"layers": layers, "hidden": hidden, "tokens": tokens, "repeats": repeats}

    def run() -> dict[str, Any]:
        heads = _numbers(one_batch, "one-batch: must be numbers of heads like 8,64")
        batches: list[dict[str, Any]] = []
        for count in heads:

            def keep(part: dict[str, Any]) -> None:  # what there is stays, should a later part fail
                if json_file is not None:
                    write_json(json_file, {"bench": "peers", **provenance(), "one_batch": [*batches, part]})

            batches.append(run_one_batch(heads=count, keep=keep))
        return {**run_peers(**sizes, peers=chosen, compiler=compiler), **({"one_batch": batches} if batches else {})}

    finish(run, json_file, plot_file)


@app.command("one-batch")
def one_batch(
    heads: Annotated[int, typer.Option(help="8: one of eight ranks of a GLM-5.2 shape; 64: the whole.")] = 8,
    layers: Annotated[int, typer.Option(help="Its layers.")] = 20,
    model: Annotated[Optional[Path], typer.Option(help="A model folder instead.")] = None,  # noqa: UP045
    repeats: Annotated[int, typer.Option(help="Turns; medians are given.")] = 9,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """SGLang's own one_batch with and without the plug-in, both prefill graph flags, in turn."""
    from .one_batch import run_one_batch
    from .timing import provenance

    def run() -> dict[str, Any]:
        result = run_one_batch(heads=heads, layers=layers, model=model, repeats=repeats)
        return {"bench": "one-batch", **provenance(), **result}

    finish(run, json_file, plot_file)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str, expected: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(text)))
    except ValueError as error:
        raise ValueError(f"{expected}, got {text!r}") from error


if __name__ == "__main__":
    app()
