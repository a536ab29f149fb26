"""The command line: ``sparse-pcg demo | bench | explain | check | doctor`` (also ``python -m sparse_pcg``)."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from .bench.cli import app as bench_app
from .demo import Result, demo_config, pick_device, read_prompt, run_demo
from .inspection_cli import add_to
from .launch import is_first, launched, processes

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(bench_app, name="bench")
add_to(app)


_LOG_WIDTH = 132  # in a log there is no window to fit into


class Compiler(str, Enum):
    """Accepted values of ``--compiler``."""

    eager = "eager"
    inductor = "inductor"


class Device(str, Enum):
    """Accepted values of ``--device``."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def _root() -> None:
    """Piecewise CUDA graphs for DeepSeek-Sparse-Attention prefill."""


@app.command()
def demo(
    prompt_file: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads the annotation at run time on Python 3.10)
        typer.Option(help="Serve this text instead of the one shipped.", exists=True, dir_okay=False, readable=True),
    ] = None,
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", help="Also write the results to this file.", dir_okay=False),
    ] = None,
    compiler: Annotated[Compiler, typer.Option(help="What compiles the pieces.")] = Compiler.inductor,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is one.")] = Device.auto,
) -> None:
    """Capture a tiny GLM-5.2-shaped model, serve a text to it, and compare replay with uncaptured and eager.

    Exits with 1 if a replay differs from uncaptured in a single bit, or from eager by more than rounding explains.
    Under torchrun (``torchrun --nproc-per-node 2 -m sparse_pcg demo``) the processes share the model, which is compared
    with the one that a single rank has, too.
    """
    try:
        text, chosen = read_prompt(prompt_file), pick_device(device.value)
        demo_config(processes())
        if json_file is not None and not json_file.parent.is_dir():
            raise ValueError(f"json: there is no folder {json_file.parent}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with launched(chosen.type) as mesh:
        result = run_demo(text, compiler.value, chosen, is_first(), mesh)
    if is_first():
        _print(result)
        if json_file is not None:
            json_file.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    if not result.ok:
        raise typer.Exit(1)


def _print(result: Result) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH + (18 if result.ranks > 1 else 0))
    console.print(
        f"{result.machine['device']}, torch {result.machine['torch']}, compiler {result.compiler}: "
        f"{result.pieces} pieces ({result.distinct_pieces} distinct) captured in {result.capture_seconds:.1f} s"
        + (f", shared by {result.ranks} ranks" if result.ranks > 1 else "")
    )
    table = Table()
    for name in ("request", "rows", "bucket", "variant", "cuts", "launches saved"):
        table.add_column(name, justify="left" if name == "request" else "right")
    for name in ("eager ms", "uncaptured ms", "replay ms", "bitwise", "diff from eager"):
        table.add_column(name, justify="right")
    if result.ranks > 1:
        table.add_column("diff from one rank", justify="right")
    for row in result.rows:
        table.add_row(
            row.request,
            str(row.rows),
            str(row.bucket or "-"),
            row.variant or "-",
            str(row.cuts),
            str(row.launches_saved),
            f"{row.eager_ms:.2f}",
            f"{row.uncaptured_ms:.2f}",
            f"{row.replay_ms:.2f}",
            "equal" if row.bitwise else "DIFFERS",
            f"{row.max_diff:.2e}" + ("" if row.close else " (TOO LARGE)"),
            *([] if row.rank_diff is None else [f"{row.rank_diff:.2e}" + ("" if row.alike else " (TOO LARGE)")]),
        )
    console.print(table)
    console.print(
        "bitwise: replay against uncaptured, outputs and KV. launches saved: kernels of the captured pieces, less the "
        "graph launches that replace them."
    )
    for row in result.rows:
        if row.undecided is not None:
            console.print(
                f"{row.request}: {row.undecided:.0%} of the rows move by more than the tolerance in the eager model "
                "itself when its weights change in their last bits (a near-tie between tokens or experts); they are "
                "judged by twice that move."
            )
    if result.fallbacks:
        console.print(f"fallbacks: {result.fallbacks}")


def main() -> None:
    """Entry point of the ``sparse-pcg`` command."""
    app()
