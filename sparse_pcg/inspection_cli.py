"""``sparse-pcg explain | check | doctor``: the commands that look and tell."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .graph_runner import GraphRunner

Factory = Annotated[
    str,
    typer.Argument(
        help="module:function or file.py:function; it takes nothing and returns (module, args) or a runner.",
    ),
]
JsonFile = Annotated[
    Optional[Path],  # noqa: UP045  (typer reads the annotation at run time on Python 3.10)
    typer.Option("--json", help="Also write the result to this file.", dir_okay=False),
]
HtmlFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--html", help="Also write one self-contained page to this file.", dir_okay=False),
]
CutOps = Annotated[list[str], typer.Option("--cut-op", help="A further op to cut at (ns::op); may be repeated.")]


def made_by(factory: str) -> tuple[Any, tuple[Any, ...]]:
    """What the factory gives: (module or runner, args). Raises typer.BadParameter naming what is wrong."""
    home, _, name = factory.rpartition(":")
    if not home or not name:
        raise typer.BadParameter(f"must be module:function, got {factory!r}")
    path = Path(home)
    if path.suffix == ".py":
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {home}")
        sys.path.insert(0, str(path.resolve().parent))
        home = path.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name and (home == error.name or home.startswith(f"{error.name}.")):
            raise typer.BadParameter(f"there is no module {home!r}") from error
        raise
    if not callable(make := getattr(module, name, None)):
        raise typer.BadParameter(f"module {home!r} has no function {name!r}")
    made = make()
    if isinstance(made, GraphRunner):
        return made, ()
    if isinstance(made, tuple) and len(made) == 2:
        model, args = made
        return model, tuple(args) if isinstance(args, (tuple, list)) else (args,)
    raise typer.BadParameter(f"{factory} must return (module, args) or a runner, got {type(made).__name__}")


def _check_folder(**files: Path | None) -> None:
    for name, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{name}: there is no folder {path.parent}")


def _write(path: Path | None, value: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def explain_command(
    factory: Factory,
    html_file: HtmlFile = None,
    json_file: JsonFile = None,
    cut_ops: CutOps = [],  # noqa: B006  (typer copies it)
    compiler: Annotated[str, typer.Option(help="What compiles the pieces: inductor or eager.")] = "inductor",
) -> None:
    """Cuts, pieces, buckets and gates of a model, with times: what this backend makes of it.

    A module is compiled, captured for the number of rows in its arguments, and replayed; a runner is captured.
    """
    from .backend import CompiledModule, compile
    from .report import describe

    _check_folder(html=html_file, json=json_file)
    made, args = made_by(factory)
    if isinstance(made, GraphRunner):
        made.capture()
    elif not isinstance(made, CompiledModule):
        import torch

        rows = [a.shape[0] for a in args if isinstance(a, torch.Tensor) and a.dim()]
        sizes: dict[str, Any] = {"capture_sizes": (rows[0],)} if rows and rows[0] > 0 else {}
        made = compile(made, cut_ops=tuple(cut_ops), compiler=compiler, **sizes)
    if not isinstance(made, GraphRunner):
        for _ in range(2):  # the first visit of a size warms up, the second captures
            made(*args)
    report = describe(made, args, {}, measure=True)
    typer.echo(str(report))
    if html_file is not None:
        report.to_html(html_file)
    _write(json_file, report.to_dict())


def check_command(
    factory: Factory,
    json_file: JsonFile = None,
    cut_ops: CutOps = [],  # noqa: B006
) -> None:
    """List what would break a capture or change its meaning, without a GPU. Exits with 1 if anything is found."""
    from .hazards import check

    _check_folder(json=json_file)
    made, args = made_by(factory)
    try:
        findings = check(made, *args, cut_ops=cut_ops)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for finding in findings:
        typer.echo(str(finding))
    typer.echo(f"{len(findings)} found" if findings else "nothing found: this can be captured")
    _write(json_file, [asdict(f) for f in findings])
    if findings:
        raise typer.Exit(1)


def doctor_command(json_file: JsonFile = None) -> None:
    """Versions, GPU, who serves each operator and why, SGLang, known bad combinations. Exits with 1 on a problem."""
    from .doctor import diagnose

    _check_folder(json=json_file)
    found = diagnose()
    typer.echo(str(found))
    _write(json_file, found.to_dict())
    if not found.ok:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    """Add the commands to the ``sparse-pcg`` command line."""
    app.command("explain")(explain_command)
    app.command("check")(check_command)
    app.command("doctor")(doctor_command)
