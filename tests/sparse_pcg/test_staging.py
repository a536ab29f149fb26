"""Batches on their way into a runner's static buffers: by graphs where there are, through memory used in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparse_pcg
from custom_ops.batch_metadata import BatchMetadata
from sparse_pcg import staging
from sparse_pcg.batch import Batch, check_batch, fill
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from sparse_pcg.staging import Staging

CONFIG = replace(preset("tiny"), num_layers=2, index_topk=16)

pytestmark = pytest.mark.usefixtures("fresh")


def batch_of(seed: int, requests: int = 3, pages: int = 2) -> Batch:
    """Requests of other lengths, pages and ids for every seed; 40 rows at most."""
    draw = torch.Generator().manual_seed(seed)
    new = torch.randint(1, 40 // requests + 1, (requests,), generator=draw).tolist()
    prefix = torch.randint(0, 64 * pages - 40, (requests,), generator=draw).tolist()
    table = (torch.randperm(62, generator=draw)[: requests * pages] + 1).view(requests, pages).int()
    return Batch(torch.randint(CONFIG.vocab_size, (sum(new),), generator=draw), new, prefix, table)


def contents(metadata: BatchMetadata, batch: Batch) -> list[Any]:
    m, requests, pages = metadata, batch.page_table.shape[0], -(-metadata.max_kv_len // 64)  # the pages that are used
    rows = (m.input_ids, m.positions, m.slots, m.kv_lens, m.select_lens, m.request_of_row, m.num_rows_device)
    parts = [t.tolist() for t in (*rows, m.last_rows[:requests], m.page_table[:requests, :pages])]
    return [*parts, m.num_rows, m.num_requests, m.max_kv_len]


def filled(batch: Batch, rows: int, tails: torch.Tensor | None = None) -> list[Any]:
    """What the buffers hold when nothing but this batch has ever come into them."""
    metadata = BatchMetadata.allocate(rows, 8, 2, CONFIG.index_topk, "cpu")
    fill(metadata, batch, check_batch(batch, 64, False), Staging(torch.device("cpu")), tails)
    return contents(metadata, batch)


def test_a_captured_runner_fills_its_buffers_by_graphs_until_they_are_dropped() -> None:
    kv = PagedKV(CONFIG.num_layers, 64, index_layers=CONFIG.index_layers)
    options = sparse_pcg.Options(capture_sizes=(16, 64), compiler="eager")
    runner = sparse_pcg.PrefillRunner(DSAModel(CONFIG), kv, options)
    launched: list[int] = []

    def serve(seed: int) -> None:
        batch = batch_of(seed)
        runner.forward(batch)
        assert contents(runner.metadata, batch) == filled(batch, 64)

    def counted(turn: int, launch: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (launched.append(turn), launch())

    serve(0)  # nothing is captured yet
    runner.capture(progress=False)
    for number, turn in enumerate(runner._staging._turns):
        assert turn.launch is not None
        turn.launch = counted(number, turn.launch)
    for seed in range(1, 8):
        serve(seed)
    assert len(launched) == 7 and set(launched[:4]) == {0, 1, 2, 3}  # each batch in the memory used longest ago
    runner.drop()
    serve(8)
    runner.capture(progress=False)
    serve(9)
    assert len(launched) == 7 and all(turn.launch is not None for turn in runner._staging._turns)


def test_memory_grows_with_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LEAST_WORDS", 16)
    ours, metadata = Staging(torch.device("cpu")), BatchMetadata.allocate(64, 8, 2, CONFIG.index_topk, "cpu")
    for seed, requests in enumerate((1, 2, 8, 1, 4)):
        batch = batch_of(seed, requests)
        tails = torch.arange(requests) + 200 if seed % 2 else None
        fill(metadata, batch, check_batch(batch, 64, False), ours, tails)
        assert contents(metadata, batch) == filled(batch, 64, tails)


def test_types_and_layouts_of_a_batch() -> None:
    batch, tails = batch_of(5), torch.tensor([7, 8, 9])
    want = filled(batch, 64, tails)
    ids = batch.input_ids.repeat_interleave(2)[::2]
    wide = torch.cat((batch.page_table, batch.page_table + 1), 1)
    for table in (wide[:, :2], wide, batch.page_table.t().contiguous().t()):
        given = replace(batch, input_ids=ids, page_table=table)
        metadata = BatchMetadata.allocate(64, 8, 2, CONFIG.index_topk, "cpu")
        fill(metadata, given, check_batch(given, 64, False), Staging(torch.device("cpu")), tails.int())
        assert contents(metadata, batch) == want
