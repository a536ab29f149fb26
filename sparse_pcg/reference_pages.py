"""Writes docs/options.md and docs/hazards.md from the code: ``python -m sparse_pcg.reference_pages [folder]``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

from .hazards import KINDS
from .options import Options

FOLDER = Path(__file__).parent.parent / "docs"
_WRITTEN = "\nWritten by `python -m sparse_pcg.reference_pages`.\n"


def options_page() -> str:
    """The options, with their defaults, as the dataclass documents them."""
    text = inspect.getdoc(Options) or ""
    head, _, listed = text.partition("\n\n")
    found = re.findall(r"^(\w+): (.*(?:\n[ \t]+.*|\n(?!\w+: ).+)*)", listed, re.MULTILINE)
    said = {name: " ".join(words.split()) for name, words in found}
    rows = []
    for field in dataclasses.fields(Options):
        default = repr(field.default)
        if field.name == "capture_sizes":
            sizes = Options().capture_sizes
            default = f"{len(sizes)} sizes, {sizes[0]} .. {sizes[-1]}"
        rows.append(
            f"| `{field.name}` | `{default}` | {said[field.name].replace('``', '`').replace('|', chr(92) + '|')} |"
        )
    intro = head.replace("``", "`")
    return (
        f"# Options\n\n{intro} `sparse_pcg.compile(module, **options)` and `Options(...)` take the same. An "
        "unknown name or a bad value is a `ValueError` that names option, value and what is accepted.\n\n"
        "| option | default | what it does |\n|---|---|---|\n" + "\n".join(rows) + "\n" + _WRITTEN
    )


def hazards_page() -> str:
    """The kinds of hazard that ``check`` tells apart."""
    rows = [f"| `{name}` | {kind.harm} | {kind.fix} |" for name, kind in KINDS.items()]
    return (
        "# Hazards that `check` finds\n\n"
        "`sparse-pcg check module:factory`, or `sparse_pcg.check(module, *args)`, runs a copy of the model on the CPU "
        "as if on a GPU, and traces it. It exits with 1 if anything is found. What happens inside a cut op is its own "
        "affair; work within each row is fine, and so is a sum over rows before it, since pads come last. Give it at "
        "least 4 rows, and a number of rows that is no width of the model: rows and columns are then told apart.\n\n"
        "| kind | what happens | what to do |\n|---|---|---|\n" + "\n".join(rows) + "\n" + _WRITTEN
    )


PAGES = {"options.md": options_page, "hazards.md": hazards_page}


def main() -> None:
    """Write the pages to the folder given on the command line, or to docs/ of the checkout."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main()
