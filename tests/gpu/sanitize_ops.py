"""Every own kernel once, on small odd shapes: what ``sanitize.sh`` runs under compute-sanitizer.

usage: python -m tests.gpu.sanitize_ops [ROWS | OP ...]   (default: 3 and 37 rows, all ops)
"""

from __future__ import annotations

import sys

import torch

from custom_ops import sparse_mla_cuda, topk_cuda, vendor
from custom_ops._register import OPS, use_provider
from custom_ops.index_cache import gather_for_rows
from custom_ops.indexer import indexer_topk_short
from custom_ops.sparse_mla_kernels import launch_sparse_mla
from custom_ops.topk_triton import launch_triton
from sparse_pcg.bench import op_cases
from sparse_pcg.kv.page_copy import copy_scattered
from tests.custom_ops.batches import batch

OWN = ("triton", "cuda")


def run(rows: int, kv_len: int, ops: tuple[str, ...]) -> list[str]:
    """Run all own providers of ``ops`` with ``rows`` rows; returns what ran."""
    ran = []
    for case in op_cases.cases(rows, kv_len, ops):
        with case.active():
            for provider in OWN:
                if provider in OPS[case.op].providers and OPS[case.op].refusal(provider, *case.args) is None:
                    with use_provider(case.op, provider):
                        case.call()
                    ran.append(f"{case.op} {case.label} {provider}")
            if case.op == "indexer_topk":
                indexer_topk_short(*case.args)
            if case.op == "topk_indices":
                topk_tunings(rows)
            if case.op == "sparse_mla":
                for split in (False, True):
                    launch_sparse_mla(*case.args, split=split)
                for blocks in (1, 2, 8) if sparse_mla_cuda.refuses(*case.args) is None else ():
                    sparse_mla_cuda.launch(*case.args, blocks=blocks)
                vendor._flash_mla_inputs(case.args[0], *case.args[2:4])
    torch.cuda.synchronize()
    return ran


def topk_tunings(rows: int) -> None:
    """Every build of the top-k, on rows that fit into its registers and on rows that do not."""
    width, k = 17_000, 2048
    logits = torch.randn(rows, width, device="cuda")
    lengths = torch.tensor([width, 4000, 7000], dtype=torch.int32, device="cuda").repeat(-(-rows // 3))[:rows]
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    for tuning in topk_cuda.TUNINGS:
        topk_cuda.launch(out, logits, None, lengths, None, None, rows, tuning=tuning, blocks=1 + tuning.split)


def others() -> list[str]:
    """Kernels that no op of the bench launches: batch metadata, DeepGEMM's gather, top-k by Triton, page copies."""
    metadata = batch([100, 0, 30], [3, 2, 6], rows=16)  # filled by the kernel
    cache = torch.zeros(40, 8448, dtype=torch.uint8, device="cuda")
    lens, owners, table = metadata.kv_lens[:11], metadata.request_of_row[:11], metadata.page_table
    gather_for_rows(cache, table, metadata.num_requests, metadata.max_kv_len, lens, owners)
    out = torch.empty(11, 16, dtype=torch.int32, device="cuda")
    logits = torch.randn(11, metadata.max_kv_len, device="cuda")
    launch_triton(out, logits, None, lens, owners, table, 11)
    copy_scattered(cache, torch.zeros_like(cache), [(1, 5), (7, 2), (3, 3)], cache.device)
    torch.cuda.synchronize()
    return ["fill_batch_metadata", "gather_for_rows", "top-k by Triton", "copy_scattered"]


if __name__ == "__main__":
    counts = [int(a) for a in sys.argv[1:] if a.isdigit()] or [3, 37]
    chosen = tuple(a for a in sys.argv[1:] if not a.isdigit())
    names = [name for rows in counts for name in run(rows, 200 if rows < 16 else 2500, chosen or op_cases.NAMES)]
    names += [] if chosen else others()
    print("\n".join(names))
    print(f"{len(names)} runs")
