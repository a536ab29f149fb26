"""Hundreds of random batches through target and draft, with and without pages that go to the host and come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import sparse_pcg
from custom_ops.batch_metadata import PAGE
from sparse_pcg.kv import HostKV
from tests.sparse_pcg.host_pools import copy_when_awaited
from tests.sparse_pcg.sequences import Driver, Subject
from tests.sparse_pcg.test_drafting import CONFIG, DEVICE, SIZES, Pair, build

BATCHES = 250  # of each of the two tests
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@pytest.fixture(scope="module")
def scarce(fresh_module: None) -> Pair:
    """With fewer pages than the requests want."""
    return captured(9)


def captured(pages: int) -> Pair:
    pair = build(pages=pages, dtype=DTYPE)
    pair.draft.capture(progress=False)
    return pair


def subject(pair: Pair, host_pages: int = 0) -> Subject:
    """Target and draft as one subject: hidden states and logits of both, and the positions in the seed.

    Where the driver asks for an uncaptured forward, every other one runs with breaks.
    """
    plain = iter(("uncaptured", "breaks") * 10_000)

    def forward(batch: sparse_pcg.Batch, mode: str) -> Sequence[torch.Tensor]:
        mode = next(plain) if mode == "uncaptured" else mode
        pair.draft.further_rows["target_hidden"].fill_(float("nan"))
        out = pair.target.forward(batch, mode)
        tails = out.logits.argmax(1)
        tails[::2] = batch.input_ids[: len(tails[::2])]  # of a chunk that is not its prompt's last
        drafted, seed = pair.extend(batch, out.hidden, tails, mode)
        return out.hidden, out.logits, drafted.hidden, drafted.logits, positions(seed, batch.page_table)

    host = HostKV(pair.kv, host_pages) if host_pages else None
    runners = (pair.target, pair.draft)
    return Subject(pair.kv, forward, CONFIG.vocab_size, SIZES[-1], runners, host)


def positions(seed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The slots of each request as positions, which do not depend on where its pages lie; -1 stays."""
    owner = (seed.unsqueeze(2) // PAGE == table.unsqueeze(1)).int().argmax(2)
    return torch.where(seed < 0, seed, owner * PAGE + seed % PAGE)


def run(driver: Driver) -> float:
    """Replays per batch; nothing is compiled or captured on the way."""
    before = sparse_pcg.stats()
    while driver.counts["batches"] < BATCHES:
        driver.run()
    driver.close()
    after = sparse_pcg.stats()
    assert (after.captures, after.graphs, after.unique_pieces) == (before.captures, before.graphs, before.unique_pieces)
    return (after.replays - before.replays) / driver.counts["batches"]


def test_replay_equals_uncaptured_and_breaks(scarce: Pair) -> None:
    driver = Driver(subject(scarce), seed=4)
    assert run(driver) > 1.4  # the target's and the draft's
    for happened in ("prefix cached", "chunks", "preempted", "pages reused"):
        assert driver.counts[happened] >= 20, driver.counts


def test_pages_that_came_back_equal_those_that_stayed(scarce: Pair) -> None:
    ours, twin = subject(scarce, host_pages=12), subject(captured(64))
    copy_when_awaited(ours.host)
    driver = Driver(ours, seed=7, twin=twin)
    assert run(driver) > 0.6
    for happened in ("evicted", "loaded", "prefix cached", "pages reused"):
        assert driver.counts[happened] >= 20, driver.counts
