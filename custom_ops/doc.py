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

## How to use it alone

`import custom_ops` is all: it needs torch and triton, registers the operators and imports nothing of
`sparse_pcg`. Most operators take everything as arguments. Those with a `layer_id` find the batch and the
caches in the current forward context:

```python
import torch

import custom_ops

device = "cuda" if torch.cuda.is_available() else "cpu"
rows, heads, index_topk = 3, 8, 16

# One request: 64 tokens are in page 2 of the cache already, 3 new ones go to page 5.
index_k = torch.zeros(8, 8448, dtype=torch.uint8, device=device)
batch = custom_ops.BatchMetadata.allocate(
    max_rows=4, max_requests=1, max_pages=2, index_topk=index_topk, device=device
)
int32 = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
custom_ops.fill_batch_metadata(
    int32(64), int32(rows), int32([2, 5]), batch.positions, batch.slots, batch.kv_lens, batch.select_lens,
    batch.request_of_row, batch.page_table, batch.num_rows_device, index_topk,
)
batch.num_rows, batch.num_requests, batch.max_kv_len = rows, 1, 64 + rows

key = torch.randn(rows, 128, dtype=torch.bfloat16, device=device)
q_fp8, q_scale = custom_ops.quant_fp8(torch.randn(rows, heads, 128, device=device))
topk = torch.empty(rows, index_topk, dtype=torch.int32, device=device)
with custom_ops.use_context(custom_ops.ForwardContext(batch, index_k={0: index_k})):
    custom_ops.k_cache_and_topk_result(0, key, q_fp8, q_scale, topk)
    with custom_ops.use_provider("indexer_topk", "reference"), custom_ops.debug_checks():
        again = torch.empty_like(topk)
        custom_ops.indexer_topk(0, q_fp8, q_scale, again)
assert ("reference", True, None) in custom_ops.providers_of("indexer_topk")  # who can serve it, and why not
assert batch.slots[:rows].tolist() == [5 * 64, 5 * 64 + 1, 5 * 64 + 2]
assert (topk // 64).unique().tolist() == (again // 64).unique().tolist() == [2, 5]
```

## Table

Providers are listed in the order in which they are tried for CUDA tensors; `reference` is plain PyTorch and
serves CPU tensors and whatever those before it do not take; one marked as forced only is never chosen
unasked. `SPARSE_PCG_<OP>=provider` in the environment and `custom_ops.use_provider` override the choice. A
graph is split at the operators marked as a cut; a composite can also be taken apart and captured. Row regime:
the number of rows, on a GPU of 132 SMs, up to which the order of a reduction, and so the last bits, depend on
the number of rows; "none": never.

| operator | what it does | providers | cut | row regime |
|---|---|---|---|---|
"""


def providers(op: Op) -> str:
    """The providers of an operator in the order tried, then those that are used only where forced."""
    tried = list(dict.fromkeys((*op.preference, "reference")))
    tried = tried[: tried.index("reference") + 1]
    forced = [f"{name} (forced only)" for name in op.providers if name not in tried]
    return ", ".join(tried + forced)


def _row(op: Op) -> str:
    cut = "composite" if op.decompose is not None else "cut" if op.cut else ""
    regime = "none" if op.row_regime is None else str(op.row_regime(132))
    summary = inspect.getdoc(getattr(custom_ops, op.name)).split("\n\n")[0]  # type: ignore[union-attr]
    what = " ".join(summary.split()).replace("``", "`").replace("|", r"\|")
    return f"| [`{op.name}`](#{op.name}) | {what} | {providers(op)} | {cut} | {regime} |\n"


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
