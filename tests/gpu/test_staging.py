"""The host's part of a batch: how long it takes, and memory that is not written again while the GPU is behind."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest
import torch

import sparse_pcg
from custom_ops.batch_metadata import BatchMetadata
from sparse_pcg.batch import Batch, HostBatch, check_batch, fill
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel
from sparse_pcg.staging import Staging
from tests.sparse_pcg.test_staging import CONFIG, batch_of, contents, filled

pytestmark = pytest.mark.gpu
MILLISECOND = 1_500_000  # cycles, about


@pytest.fixture(scope="module")
def runner(fresh_module: None) -> sparse_pcg.PrefillRunner:
    model = DSAModel(replace(CONFIG, num_layers=1, max_positions=140000), device="cuda")
    options = sparse_pcg.Options(capture_sizes=(512,), compiler="eager")
    runner = sparse_pcg.PrefillRunner(model, PagedKV(1, 2200, device="cuda"), options)
    runner.capture(progress=False)
    assert runner._staging.recorded
    return runner


def snapshot(metadata: BatchMetadata) -> BatchMetadata:
    return replace(metadata, **{n: t.clone() for n, t in vars(metadata).items() if isinstance(t, torch.Tensor)})


@pytest.mark.parametrize("with_graphs", [True, False])
def test_batches_come_in_right_however_far_behind_the_gpu_is(
    runner: sparse_pcg.PrefillRunner, with_graphs: bool
) -> None:
    metadata = runner.metadata if with_graphs else BatchMetadata.allocate(512, 8, 2, CONFIG.index_topk, "cuda")
    staging = runner._staging if with_graphs else Staging(runner.device)
    seen = []
    for seed in range(15):
        batch = batch_of(seed)
        tails = torch.arange(3) + 200 if seed % 3 else None
        given = batch
        if seed % 2:  # read where they are
            given = replace(batch, input_ids=batch.input_ids.cuda(), page_table=batch.page_table.cuda())
            tails = tails.cuda() if tails is not None else None
        torch.cuda._sleep(8 * MILLISECOND)
        fill(metadata, given, check_batch(batch, 2200, False), staging, tails)
        seen.append((batch, tails, snapshot(metadata)))
    for batch, tails, there in seen:
        assert contents(there, batch) == filled(batch, 512, tails.cpu() if tails is not None else None)


def test_the_reference_fills_the_buffers_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_PCG_FILL_BATCH_METADATA", "reference")
    kv = PagedKV(CONFIG.num_layers, 64, index_layers=CONFIG.index_layers, device="cuda")
    options = sparse_pcg.Options(capture_sizes=(16, 32), compiler="eager")
    runner = sparse_pcg.PrefillRunner(DSAModel(CONFIG, device="cuda"), kv, options)
    runner.capture(progress=False)
    assert not runner._staging.recorded  # it is no kernel that reads a header anew
    for seed in range(4):
        batch = batch_of(seed)
        where = "cuda" if seed % 2 else "cpu"
        moved = replace(batch, input_ids=batch.input_ids.to(where), page_table=batch.page_table.to(where))
        with sparse_pcg.stats().expect(replays=1, fallbacks={}):
            runner.forward(moved)
        assert contents(runner.metadata, batch) == filled(batch, 32)


def long_batch(where: str) -> tuple[Batch, HostBatch]:
    """16 requests of 32 new tokens after 128k cached ones."""
    pages = -(-(131072 + 32) // 64)
    table = torch.randint(1, 2200, (16, pages), dtype=torch.int32)
    table[:, -1] = torch.arange(1, 17)
    ids = torch.randint(CONFIG.vocab_size, (512,))
    batch = Batch(ids.to(where), [32] * 16, [131072] * 16, table.to(where))
    return batch, HostBatch(512, [32] * 16, [131072] * 16, 131104)


@pytest.mark.alone
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_host_fills_a_long_batch_within_60_us(runner: sparse_pcg.PrefillRunner, where: str) -> None:
    (batch, host), times = long_batch(where), []
    for _ in range(110):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fill(runner.metadata, batch, host, runner._staging)
        times.append((time.perf_counter() - start) * 1e6)
    m = runner.metadata
    assert m.kv_lens[:512].view(16, 32)[:, -1].tolist() == [131104] * 16
    assert m.page_table[:16, : batch.page_table.shape[1]].equal(batch.page_table.cuda())
    print(f"fill from {where}: median {statistics.median(times[10:]):.1f} us, min {min(times):.1f} us")
    assert statistics.median(times[10:]) <= 60
