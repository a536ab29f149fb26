"""Every bucket of a runner, in an order that shows stale memory, replayed against uncaptured byte by byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import sparse_pcg
from custom_ops.batch_metadata import PAGE
from sparse_pcg.kv import PagedKV, RequestPages, page_table
from sparse_pcg.verification import pages_of
from tests.sparse_pcg.sequences import Subject
from tests.sparse_pcg.toys import same

Make = Callable[[int, bool], sparse_pcg.Batch]


@contextmanager
def requests_with_prefixes(runner: Any, kv: PagedKV, rng: random.Random) -> Iterator[Make]:
    """Gives a function (rows, prefix cached) -> batch of one to three requests.

    With ``prefix cached`` each begins with full pages that were computed before, the first with more than
    ``index_topk`` tokens. The pages of a batch are given back when the next one is made.
    """
    vocab = runner.model.config.vocab_size
    longest = -(-(runner.index_topk + 1) // PAGE) * PAGE
    held: list[RequestPages] = []

    def tokens(count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        return torch.randint(vocab, (count,), generator=generator).to(runner.device)

    def extend(request: RequestPages, count: int) -> None:
        prefix = request.num_tokens
        request.extend(count)
        table = page_table([request], runner.device)
        runner.forward(sparse_pcg.Batch(tokens(count), [count], [prefix], table), "uncaptured")

    def make(rows: int, cached: bool) -> sparse_pcg.Batch:
        while held:
            held.pop().close()
        parts = min(rng.randint(1, 3), rows)
        cuts = sorted(rng.sample(range(1, rows), parts - 1))
        new = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        for i in range(parts):
            shared = (longest if i == 0 else PAGE * rng.randint(0, longest // PAGE)) if cached else 0
            held.append(RequestPages.with_prefix(source, shared))
        prefix = [r.num_tokens for r in held]
        for request, count in zip(held, new, strict=True):
            request.extend(count)
        return sparse_pcg.Batch(tokens(rows), new, prefix, page_table(held, runner.device))

    with kv.request() as source:
        for start in range(0, longest, runner.sizes[-1]):
            extend(source, min(runner.sizes[-1], longest - start))
        try:
            yield make
        finally:
            while held:
                held.pop().close()


def compare_in_order(runner: Any, kv: PagedKV, rng: random.Random) -> set[tuple[int, str]]:
    """Big, small, big, the same small again with new values, for every pair of buckets side by side in the schedule.

    Before each forward the dummy page, the pages that the batch writes, the row buffers and the graphs' memory are
    poisoned. Returns the (bucket, variant) that were replayed.
    """
    subject = Subject.of(runner, kv)
    sizes = runner.bucket_sizes()
    seen: set[tuple[int, str]] = set()
    with requests_with_prefixes(runner, kv, rng) as make:
        for small, big in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
            below = max((s for s in sizes if s < small), default=0)
            few = rng.randint(max(below + 1, 2), small)  # one row would be a graph of its own
            for rows, cached in ((big, True), (few, False), (big, False), (few, True), (few, False)):
                batch = make(rows, cached)
                seen.add(_compare(runner, subject, batch))
    return seen


def _compare(runner: Any, subject: Subject, batch: sparse_pcg.Batch) -> tuple[int, str]:
    table, new, prefix = batch.page_table.tolist(), list(batch.new_lens), list(batch.prefix_lens)
    mine = [
        page
        for row, fresh, before in zip(table, new, prefix, strict=True)
        for page in row[before // PAGE : -(-(before + fresh) // PAGE)]
    ]
    _forget(subject, mine)
    plain = runner.forward(batch, "uncaptured")
    hidden, logits, written = plain.hidden.clone(), plain.logits.clone(), pages_of(runner, mine)
    _forget(subject, mine)
    replay = runner.forward(batch)
    where = f"bucket {replay.bucket}, {replay.variant}, new {new}, prefix {prefix}"
    assert replay.variant is not None, where
    assert same(replay.hidden, hidden) and same(replay.logits, logits), f"results differ: {where}"
    assert not bool(hidden.isnan().any()), f"a pad row or stale memory reached a result: {where}"
    assert same(pages_of(runner, mine), written), f"KV differs: {where}"
    assert replay.bucket is not None
    return replay.bucket, replay.variant


def _forget(subject: Subject, pages: list[int]) -> None:
    """What a batch writes does not show from an earlier run."""
    for pool in subject.pools:
        pool[:, pages] = 0xFF
    subject.poison()
