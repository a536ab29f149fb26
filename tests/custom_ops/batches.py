"""Batches and caches for the tests of the ops that read the forward context."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from custom_ops._register import OPS
from custom_ops.batch_metadata import BatchMetadata
from tests.custom_ops import strategies as s


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=s.DEVICE)


def batch(
    prefix: Sequence[int], new: Sequence[int], rows: int, index_topk: int = 16, pool_pages: int = 40
) -> BatchMetadata:
    """Metadata of one batch in buffers of ``rows`` rows; each request has pages of its own, none page 0.

    Page table entries beyond a request's pages point outside any pool.
    """
    metadata = BatchMetadata.allocate(rows, len(prefix) + 2, 6, index_topk, s.DEVICE)
    pages = [-(-(p + n) // 64) for p, n in zip(prefix, new, strict=True)]
    free = iter(s.distinct(pool_pages, pool_pages - 1, 5).tolist())
    table = torch.full((len(prefix), max([*pages, 1])), 2**25, dtype=torch.int32)
    for request, count in enumerate(pages):
        table[request, :count] = torch.tensor([next(free) for _ in range(count)], dtype=torch.int32)
    m = metadata
    OPS["fill_batch_metadata"].overload(
        int32(prefix), int32(new), table.to(s.DEVICE), m.positions, m.slots, m.kv_lens, m.select_lens,
        m.request_of_row, m.page_table, m.num_rows_device, index_topk,
    )  # fmt: skip
    metadata.num_rows = sum(new)
    metadata.num_requests = len(prefix)
    metadata.max_kv_len = max([p + n for p, n in zip(prefix, new, strict=True) if n], default=0)
    return metadata


def index_pool(pages: int = 40, seed: int = 0) -> torch.Tensor:
    """An index-K cache [pages, 8448] of normal e4m3 keys and scales around 1."""
    keys = s.randn((pages, 64 * 128), seed=seed).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (s.randn((pages, 64), seed=seed + 1).abs() + 0.5).view(torch.uint8)
    return torch.cat((keys, scales), 1).contiguous()
