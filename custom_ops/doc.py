"""Writes docs/ops.md from the registry and the docstrings: ``python -m custom_ops.doc [path]``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import custom_ops
from custom_ops._register import OPS, Op

DEFAULT_PATH = Path(__file__).parent.parent / "docs" / "ops.md"

_HEAD = """# Operators

Registered under `torch.ops.sparse_pcg`, and as functions of the same names in `custom_ops`. Written by
`python -m custom_ops.doc`.

Providers are listed in the order in which they are tried for CUDA tensors; `reference` is plain PyTorch and
serves CPU tensors and whatever the others do not take. `SPARSE_PCG_<OP>=provider` in the environment
overrides the choice. A graph is split at the operators marked as a cut; a composite can also be taken apart
and captured. Row regime: the number of rows, on a GPU of 132 SMs, up to which the order of a reduction, and
so the last bits, depend on the number of rows; "none": never.

| operator | what it does | providers | cut | row regime |
|---|---|---|---|---|
"""


def _row(op: Op) -> str:
    cut = "composite" if op.decompose is not None else "cut" if op.cut else ""
    regime = "none" if op.row_regime is None else str(op.row_regime(132))
    providers = ", ".join(dict.fromkeys((*op.preference, *op.providers)))
    summary = inspect.getdoc(getattr(custom_ops, op.name)).split("\n\n")[0]  # type: ignore[union-attr]
    what = " ".join(summary.split()).replace("``", "`").replace("|", r"\|")
    return f"| [`{op.name}`](#{op.name}) | {what} | {providers} | {cut} | {regime} |\n"


def _section(op: Op) -> str:
    text = inspect.getdoc(getattr(custom_ops, op.name))
    return f"\n## {op.name}\n\n`{op.schema}`\n\n```text\n{text}\n```\n"


def render() -> str:
    """The document: a table with one row an operator, then each schema and docstring."""
    ops = sorted(OPS.values(), key=lambda op: op.name)
    return _HEAD + "".join(map(_row, ops)) + "".join(map(_section, ops))


def main() -> None:
    """Write the document to the path given on the command line, or to docs/ops.md of the checkout."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH
    path.write_text(render())


if __name__ == "__main__":
    main()
