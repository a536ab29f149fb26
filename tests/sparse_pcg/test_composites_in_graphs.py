"""A composite in a plain model: its captured part goes into a piece, only the cut stays out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparse_pcg
from custom_ops import BatchMetadata, ForwardContext, fill_batch_metadata, use_context

ROWS, HEADS, PAGES = 8, 4, 3

pytestmark = pytest.mark.usefixtures("fresh")


def context(prefix: int) -> ForwardContext:
    """One request of 8 new tokens after ``prefix`` cached ones, in pages 2 and 1."""
    metadata = BatchMetadata.allocate(ROWS, 1, 2, 4, "cpu")
    fill_batch_metadata(
        torch.tensor([prefix], dtype=torch.int32),
        torch.tensor([ROWS], dtype=torch.int32),
        torch.tensor([[2, 1]], dtype=torch.int32),
        metadata.positions,
        metadata.slots,
        metadata.kv_lens,
        metadata.select_lens,
        metadata.request_of_row,
        metadata.page_table,
        metadata.num_rows_device,
        metadata.index_topk,
    )
    metadata.num_rows, metadata.num_requests, metadata.max_kv_len = ROWS, 1, prefix + ROWS
    return ForwardContext(metadata, {5: torch.zeros(PAGES, 8448, dtype=torch.uint8)})


def body(key: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    topk = torch.full((key.shape[0], 4), -1, dtype=torch.int32)
    torch.ops.sparse_pcg.k_cache_and_topk_result(5, key * 2, q.to(torch.float8_e4m3fn), weights, topk)
    return topk + 1


def arguments(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (ROWS, 128), (ROWS, HEADS, 128), (ROWS, HEADS)
    key, q, weights = (torch.randn(s, generator=generator) for s in shapes)
    return key.bfloat16(), q, weights


def test_the_k_store_is_in_a_piece_and_the_cut_has_its_line() -> None:
    fn = sparse_pcg.compile(body, capture_sizes=[ROWS], compiler="eager")
    with use_context(context(0)):
        report = sparse_pcg.explain(fn, *arguments(0))
    assert [c.op for c in report.cuts] == ["sparse_pcg::indexer_topk"]
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "k_cache_and_topk_result(5" in text)
    assert f"test_composites_in_graphs.py:{line}" in report.cuts[0].source
    assert "k_cache_and_topk_result" in report.cuts[0].composite
    (store,) = [p for p in report.pieces if "sparse_pcg::index_k_store" in p.ops]
    assert store.kind == "piece" and "sparse_pcg::index_k_store" in str(report)


def test_it_follows_the_batch_of_each_call() -> None:
    """Captured with no prefix, replayed with one, same rows: slots and lengths are those of the call."""
    fn = sparse_pcg.compile(body, capture_sizes=[ROWS], compiler="eager")
    ours, theirs = context(0), context(0)
    for seed, prefix in enumerate([0, 0, 0, 60, 3, 0]):
        now = context(prefix).metadata
        ours.metadata, theirs.metadata = now, now
        with use_context(ours):
            got = fn(*arguments(seed))
        with use_context(theirs):
            want = body(*arguments(seed))
        assert torch.equal(got, want) and torch.equal(ours.index_k[5], theirs.index_k[5])
    assert sparse_pcg.stats().replays > 0


def test_without_a_context_it_stays_whole_and_selects_nothing() -> None:
    fn = sparse_pcg.compile(body, capture_sizes=[ROWS], compiler="eager")
    assert not fn(*arguments(0)).any()
    report = sparse_pcg.explain(fn, *arguments(0))
    assert [c.op for c in report.cuts] == ["sparse_pcg::k_cache_and_topk_result"]
