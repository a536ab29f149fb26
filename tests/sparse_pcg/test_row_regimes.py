"""Bucket floors: an op whose reduction order depends on the number of rows is a cut below the floor, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sparse_pcg
from custom_ops._register import OPS, Provider, define
from sparse_pcg import graph_runner
from sparse_pcg.buckets import default_schedule, smallest_batch
from sparse_pcg.kv import PagedKV, page_table
from sparse_pcg.served import EMULATED_SMS
from tests.sparse_pcg.toys import same

SMS, WIDTH, VOCAB = EMULATED_SMS, 64, 50
SIZES = default_schedule(128)
FLOOR = 96


def splits(rows: int) -> int:
    """Into how many parts the sum is split, so that the multiprocessors have work: one as soon as rows suffice."""
    return next(parts for parts in (8, 4, 2, 1) if parts == 1 or rows * parts <= SMS)


def split_k_body(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x @ weight, summed part by part and then over the parts; a row's order depends on the row count alone."""
    parts = splits(x.shape[0])
    sums = [torch.zeros_like(out) for _ in range(parts)]
    for k in range(x.shape[1]):
        sums[k * parts // x.shape[1]] += x[:, k : k + 1] * weight[k]
    out.zero_()
    for part in sums:
        out += part


SPLIT_K = define(
    "toy_split_k(Tensor x, Tensor weight, Tensor(a!) out) -> ()",
    reference=split_k_body,
    fake=lambda x, weight, out: None,
    providers={
        "absent": Provider(split_k_body, missing=lambda: "not here", row_regime=lambda sms: 10 * sms),
        "present": Provider(split_k_body, row_regime=lambda sms: sms // 2),
    },
    rows=("x", "out"),
)
del OPS[SPLIT_K.name]  # there for the tests below alone


class SplitK(nn.Module):
    """Embeds, mixes through split-K sums between row-wise ops; one op is a cut everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(index_topk=16, vocab_size=VOCAB, hidden_size=WIDTH)
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=generator))
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed[input_ids] + torch.sin(positions.unsqueeze(1) * 1.0)
        y = torch.empty_like(x)
        torch.ops.sparse_pcg.toy_split_k(x, self.first, y)
        x = torch.ops.toy.scaled(torch.tanh(y))
        y = torch.empty_like(x)
        torch.ops.sparse_pcg.toy_split_k(x, self.second, y)
        return x + y

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :VOCAB] * 1.0


def build(sizes: tuple[int, ...] = SIZES) -> sparse_pcg.PrefillRunner:
    kv = PagedKV(1, 8, index_layers=(), dtype=torch.float32)
    options = sparse_pcg.Options(capture_sizes=sizes, compiler="eager")
    return sparse_pcg.PrefillRunner(SplitK(), kv, options)


@pytest.fixture(autouse=True)
def _split_k(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, SPLIT_K.name, SPLIT_K)


def forward(runner: sparse_pcg.PrefillRunner, rows: int, mode: str) -> sparse_pcg.PrefillOutput:
    with runner.kv.request() as request:
        request.extend(rows)
        ids = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))
        return runner.forward(sparse_pcg.Batch(ids, [rows], [0], page_table([request])), mode)


def differing(runner: sparse_pcg.PrefillRunner) -> set[int]:
    """The numbers of rows for which a replay gives other bits than breaks do; every bucket's fewest and most."""
    found = set()
    for bucket in runner.sizes:
        for rows in {smallest_batch(bucket, runner.sizes), bucket}:
            replay, breaks = forward(runner, rows, "replay"), forward(runner, rows, "breaks")
            assert replay.bucket == bucket and same(replay.hidden, forward(runner, rows, "uncaptured").hidden)
            torch.testing.assert_close(replay.hidden, breaks.hidden, rtol=1e-3, atol=1e-3)
            if not same([replay.hidden, replay.logits], [breaks.hidden, breaks.logits]):
                found.add(rows)
    return found


def cuts(runner: sparse_pcg.PrefillRunner) -> dict[int, int]:
    return {size: runner._buckets[size].graph.cut_count for size in runner.sizes}


def test_below_the_floor_the_op_is_a_cut_and_every_replay_equals_breaks() -> None:
    runner = build()
    runner.capture(progress=False)
    assert runner.floor == FLOOR
    assert cuts(runner) == {size: 1 if size >= FLOOR else 3 for size in SIZES}
    assert {v for size in SIZES for v in runner.variants(size)} == {"cut"}
    with sparse_pcg.stats().expect(fallbacks={}, captures=0):
        assert differing(runner) == set()
    verified = runner.verify()
    assert verified.ok and {c.bucket for c in verified.checks} == set(SIZES), str(verified)


def test_without_a_floor_padding_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for a floor: exactly where padding changes how the sum is split, and below the floor only."""
    monkeypatch.setattr(graph_runner, "bucket_floor", lambda sizes, regimes: sizes[0])
    runner = build()
    runner.capture(progress=False)
    assert set(cuts(runner).values()) == {1}
    batches = {(smallest_batch(bucket, SIZES), bucket) for bucket in SIZES}
    expected = {few for few, bucket in batches if splits(few) != splits(bucket)}
    assert differing(runner) == expected and expected and max(expected) < FLOOR
    wrong = {c.bucket for c in runner.verify().checks if not c.bitwise}
    assert wrong == {bucket for few, bucket in batches if few in expected}


def test_where_no_bucket_is_large_enough_all_are_cut() -> None:
    runner = build((8, 16, 64))
    runner.capture(progress=False)
    assert runner.floor is None and set(cuts(runner).values()) == {3}
    assert differing(runner) == set()


def test_a_regime_counts_where_its_provider_can_run() -> None:
    assert SPLIT_K.regime(SMS) == SMS // 2
    assert SPLIT_K.regime(160) == 80
    assert OPS["topk_slots"].regime(SMS) == 0


def test_no_valid_row_depends_on_the_others_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a break runs it, an op sees the valid rows alone; the others of what it writes are zero."""
    runner = build((64,))
    runner.capture(progress=False)
    seen: list[Any] = []

    def watched(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        seen.append((x.shape[0], out.shape[0], out._base is None or bool((out._base[x.shape[0] :] == 0).all())))
        split_k_body(x, weight, out)

    monkeypatch.setitem(SPLIT_K.providers, "reference", Provider(watched))
    forward(runner, 40, "replay")
    forward(runner, 40, "breaks")
    assert [s[:2] for s in seen] == [(40, 40)] * 4 and all(zeroed for *_, zeroed in seen)
