"""What no graph may serve: refused by name with nothing written, or counted and served uncaptured; then as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparse_pcg
from tests.sparse_pcg.test_drafting import CONFIG, DEVICE, Pair, build
from tests.sparse_pcg.toys import same


@pytest.fixture(scope="module")
def served(fresh_module: None) -> Pair:
    pair = build(capture_sizes=(8,))
    pair.draft.capture(progress=False)
    return pair


def table(*pages: list[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)


def everything(pair: Pair, batch: sparse_pcg.Batch) -> list[torch.Tensor]:
    """What target and draft give for a batch that both replay."""
    with sparse_pcg.stats().expect(replays=2, fallbacks={}):
        out = pair.target.forward(batch)
        drafted, seed = pair.extend(batch, out.hidden, out.logits.argmax(1))
    return [out.hidden, out.logits, drafted.hidden, drafted.logits, seed]


@pytest.mark.parametrize(
    ("prefix", "pages", "named"),
    [
        ([64, 0], table([1], [2]), "page_table has 1 pages .* request 0, which needs 69 tokens"),
        ([0, 126], table([1, 3], [2, 4]), "page_table has 2 pages .* request 1, which needs 129 tokens"),
        ([0, 0], table([0], [2]), r"page_table\[0\] must name pages 1 to 23 .*dummy slot.* got 0"),
        ([0, 64], table([1, 1], [3, 0]), r"page_table\[1\] must name pages 1 to 23 .* got 0"),
        ([0, 64], table([1, 1], [0, 3]), r"page_table\[1\] must name pages 1 to 23 .* got 0"),  # in its prefix
    ],
)
@pytest.mark.parametrize("mode", ["replay", "uncaptured", "breaks", "eager"])
def test_a_page_table_that_does_not_hold_the_batch(
    served: Pair, prefix: list[int], pages: torch.Tensor, named: str, mode: str
) -> None:
    with served.kv.request() as a, served.kv.request() as b:
        batch = served.batch([(a, 5), (b, 3)])
        want = everything(served, batch)
        pools = [served.kv.latent_pool.clone(), served.kv.index_pool.clone()]
        wrong = replace(batch, prefix_lens=prefix, page_table=pages)  # on the host, where pages are always checked
        seed = served.seed(batch)
        with pytest.raises(ValueError, match=named):
            served.target.forward(wrong, mode)
        with pytest.raises(ValueError, match=named):
            served.draft.forward(wrong, want[0], want[1].argmax(1), seed, mode)
        assert same([served.kv.latent_pool, served.kv.index_pool], pools) and bool((seed == -7).all())
        assert same(everything(served, batch), want)


@pytest.mark.parametrize("mode", ["replay", "uncaptured", "breaks", "eager"])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_seed_buffer_for_another_number_of_requests(served: Pair, requests: int, mode: str) -> None:
    with served.kv.request() as a, served.kv.request() as b:
        batch = served.batch([(a, 5), (b, 3)])
        want = everything(served, batch)
        pools = [served.kv.latent_pool.clone(), served.kv.index_pool.clone()]
        seed = torch.full((requests, CONFIG.index_topk), -7, dtype=torch.int32, device=DEVICE)
        with pytest.raises(ValueError, match=rf"draft: seed_out must be int32 \[2, 16\] .* \[{requests}, 16\]"):
            served.draft.forward(batch, want[0], want[1].argmax(1), seed, mode)
        assert same([served.kv.latent_pool, served.kv.index_pool], pools) and bool((seed == -7).all())
        assert same(everything(served, batch), want)


def test_a_batch_over_the_largest_bucket_is_counted_and_right(served: Pair) -> None:
    with served.kv.request() as a, served.kv.request() as b:
        small, large = served.batch([(a, 5)]), served.batch([(b, 9)], seed=1)
        want = everything(served, small)
        eager = served.target.forward(large, "eager")
        tails = eager.logits.argmax(1)
        drafted_eager, _ = served.extend(large, eager.hidden, tails, "eager")
        with sparse_pcg.stats().expect(replays=0, captures=0, fallbacks={"size": 2}):
            out = served.target.forward(large)
            drafted, seed = served.extend(large, eager.hidden, tails)
        assert (out.bucket, out.variant, drafted.bucket) == (None, None, None)
        torch.testing.assert_close(out.hidden, eager.hidden, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(drafted.hidden, drafted_eager.hidden, rtol=1e-3, atol=1e-4)
        assert seed[0].tolist() == [b.pages[0] * 64 + i for i in range(9)] + [-1] * 7
        assert same(everything(served, small), want)
