"""The draft's runner: replay against uncaptured, breaks and eager; the seed of the index share; what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import sparse_pcg
from sparse_pcg.drafting import DraftRunner
from sparse_pcg.kv import PagedKV, RequestPages, page_table
from sparse_pcg.models import DSAModel, NextN, preset
from tests.sparse_pcg.toys import same

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = replace(preset("tiny"), num_layers=2, index_topk=16)
SIZES = (4, 8, 16, 32)


@dataclass
class Pair:
    """A target, its draft and their pools (one set of pages, one layer more than the target has)."""

    target: sparse_pcg.PrefillRunner
    draft: DraftRunner
    kv: PagedKV

    def batch(self, parts: list[tuple[RequestPages, int]], seed: int = 0) -> sparse_pcg.Batch:
        generator = torch.Generator().manual_seed(seed)
        prefix = [r.num_tokens for r, _ in parts]
        for request, new in parts:
            request.extend(new)
        ids = torch.randint(CONFIG.vocab_size, (sum(n for _, n in parts),), generator=generator)
        table = page_table([r for r, _ in parts], DEVICE)
        return sparse_pcg.Batch(ids.to(DEVICE), [n for _, n in parts], prefix, table)

    def seed(self, batch: sparse_pcg.Batch) -> torch.Tensor:
        return torch.full((len(batch.new_lens), CONFIG.index_topk), -7, dtype=torch.int32, device=DEVICE)

    def extend(
        self, batch: sparse_pcg.Batch, hidden: torch.Tensor, tails: torch.Tensor, mode: str = "replay"
    ) -> tuple[sparse_pcg.PrefillOutput, torch.Tensor]:
        seed = self.seed(batch)
        return self.draft.forward(batch, hidden, tails, seed, mode), seed


def build(
    draft_options: sparse_pcg.Options | None = None,
    pages: int = 24,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Pair:
    model = DSAModel(CONFIG, dtype=dtype, device=DEVICE, seed=3)
    layers = CONFIG.num_layers
    kv = PagedKV(
        layers + 1, pages, index_layers=(*CONFIG.index_layers, layers), dtype=dtype, device=DEVICE, poison=True
    )
    chosen = sparse_pcg.Options(**{"capture_sizes": SIZES, "compiler": "eager", **options})
    target = sparse_pcg.PrefillRunner(model, kv, chosen)
    return Pair(target, DraftRunner(NextN(model, seed=5), kv, target, draft_options), kv)


@pytest.fixture(scope="module")
def served(fresh_module: None) -> Pair:
    pair = build(debug_checks=True)
    pair.draft.capture(progress=False)
    return pair


def compare(pair: Pair, batch: sparse_pcg.Batch) -> tuple[sparse_pcg.PrefillOutput, torch.Tensor]:
    """The draft on what the target gave: all modes agree, in results, seed and the pages that they write."""
    out = pair.target.forward(batch)
    tails = out.logits.argmax(1)
    eager, eager_seed = pair.extend(batch, out.hidden, tails, "eager")
    breaks, breaks_seed = pair.extend(batch, out.hidden, tails, "breaks")
    plain, plain_seed = pair.extend(batch, out.hidden, tails, "uncaptured")
    pools = [pair.kv.latent_pool[:, 64:].clone(), pair.kv.index_pool[:, 1:].clone()]
    replay, seed = pair.extend(batch, out.hidden, tails)
    for other in (plain, breaks):
        assert same([replay.hidden, replay.logits], [other.hidden, other.logits])
    assert same([plain_seed, breaks_seed], [seed, seed])
    assert same([pair.kv.latent_pool[:, 64:], pair.kv.index_pool[:, 1:]], pools)
    torch.testing.assert_close(replay.hidden, eager.hidden, rtol=1e-3, atol=1e-4)
    assert float((eager_seed == seed).float().mean()) > 0.9
    return replay, seed


def slots_of(request: RequestPages, positions: range) -> list[int]:
    return [request.pages[p // 64] * 64 + p % 64 for p in positions]


def test_short_and_cut_with_the_variant_that_kv_lengths_say(served: Pair) -> None:
    with served.kv.request() as a, served.kv.request() as b:
        out, seed = compare(served, served.batch([(a, 10), (b, 3)]))
        assert (out.bucket, out.variant) == (16, "short")
        assert seed[0].tolist() == slots_of(a, range(10)) + [-1] * 6
        assert seed[1].tolist() == slots_of(b, range(3)) + [-1] * 13
        out, seed = compare(served, served.batch([(b, 2), (a, 11)], seed=1))
        assert (out.bucket, out.variant) == (16, "cut")
        assert seed[0].tolist() == slots_of(b, range(5)) + [-1] * 11
        assert len(set(seed[1].tolist())) == 16 and set(seed[1].tolist()) <= set(slots_of(a, range(21)))


def test_the_seed_is_right_for_two_layouts_of_the_same_rows(served: Pair) -> None:
    """One graph, the same number of rows, last rows elsewhere: the copy follows the batch of each step."""
    requests = [served.kv.request() for _ in range(5)]
    graphs = set()
    for parts in ([(0, 20), (1, 8)], [(2, 3), (3, 24), (4, 1)], [(0, 5), (1, 23)]):
        batch = served.batch([(requests[i], n) for i, n in parts], seed=parts[0][1])
        out, seed = compare(served, batch)
        graphs.add((out.bucket, out.variant))
        for row, (i, _) in zip(seed.tolist(), parts, strict=True):
            chosen = [s for s in row if s >= 0]
            seen = slots_of(requests[i], range(requests[i].num_tokens))
            assert len(chosen) == min(16, len(seen)) and set(chosen) <= set(seen)
            assert len(seen) > 16 or chosen == seen
    assert graphs == {(32, "cut")}
    for request in requests:
        request.close()


def test_rows_take_the_token_after_their_own(served: Pair) -> None:
    """By hand: the same module on rows laid out in plain Python."""
    with served.kv.request() as a, served.kv.request() as b:
        batch = served.batch([(a, 5), (b, 3)])
        hidden = torch.randn(8, CONFIG.hidden_size, device=DEVICE)
        tails = torch.tensor([201, 202], dtype=torch.int32)
        got, _ = served.extend(batch, hidden, tails)
        ids = batch.input_ids.tolist()
        shifted = torch.tensor([*ids[1:5], 201, *ids[6:8], 202], device=DEVICE)
        model = served.draft.model
        context = served.draft._context(served.draft.metadata)
        m = served.draft.metadata
        with torch.no_grad(), sparse_pcg_context(context):
            want, _ = model(shifted, m.positions[:8], m.kv_lens[:8], hidden)
        torch.testing.assert_close(got.hidden, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.logits, model.head(want[[4, 7]]), rtol=1e-4, atol=1e-4)
        assert m.input_ids[:9].tolist()[:8] == shifted.tolist()


def sparse_pcg_context(context: Any) -> Any:
    from custom_ops import use_context

    return use_context(context)


def test_it_lies_in_the_targets_pool_and_publishes_nothing_unasked(served: Pair) -> None:
    assert served.draft.pool_bytes == 0 and served.target.pool_bytes > 0
    owner = served.target.graphs()[0]
    assert all(g._pool is owner._pool for g in served.draft.graphs())
    with served.kv.request() as request:
        batch = served.batch([(request, 8)])
        out = served.target.forward(batch)
        with sparse_pcg.stats().expect(replays=1, fallbacks={}):
            served.draft.forward(batch, out.hidden, out.logits.argmax(1))
        assert served.draft._seed is None


def test_a_replay_of_the_target_between_leaves_the_draft_right(served: Pair) -> None:
    """They write the same memory: neither may rely on what it left there."""
    with served.kv.request() as a, served.kv.request() as b:
        first, second = served.batch([(a, 13)], seed=1), served.batch([(b, 30)], seed=2)
        out = served.target.forward(first)
        tails = out.logits.argmax(1)
        want, want_seed = served.extend(first, out.hidden, tails)
        served.target.forward(second)
        again, seed = served.extend(first, out.hidden, tails)
        assert same([again.hidden, again.logits, seed], [want.hidden, want.logits, want_seed])
        assert same(served.target.forward(first).hidden, out.hidden)


def test_embeddings_run_uncaptured_with_embedded_tails(served: Pair) -> None:
    with served.kv.request() as a, served.kv.request() as b:
        batch = served.batch([(a, 6), (b, 2)])
        hidden, tails = torch.randn(8, CONFIG.hidden_size, device=DEVICE), torch.tensor([7, 9], device=DEVICE)
        want, want_seed = served.extend(batch, hidden, tails, "eager")
        embeds = served.draft.model.embed_tokens[batch.input_ids]
        with sparse_pcg.stats().expect(fallbacks={"multimodal": 1}, replays=0):
            got, seed = served.extend(replace(batch, input_embeds=embeds), hidden, tails)
        assert got.variant is None and same(seed, want_seed)
        torch.testing.assert_close(got.hidden, want.hidden, rtol=1e-5, atol=1e-6)


def test_rows_that_no_bucket_serves(served: Pair) -> None:
    with served.kv.request() as request:
        batch = served.batch([(request, 70)])
        hidden, tails = torch.randn(70, CONFIG.hidden_size, device=DEVICE), torch.tensor([1], device=DEVICE)
        want, want_seed = served.extend(batch, hidden, tails, "eager")
        with sparse_pcg.stats().expect(fallbacks={"size": 1}):
            got, seed = served.extend(batch, hidden, tails)
        torch.testing.assert_close(got.hidden, want.hidden, rtol=1e-3, atol=1e-4)
        assert float((seed == want_seed).float().mean()) > 0.9 and not (seed == -7).any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed_out": torch.zeros(3, 16, dtype=torch.int32)}, r"seed_out must be int32 \[2, 16\]"),
        ({"seed_out": torch.zeros(2, 15, dtype=torch.int32)}, r"seed_out must be int32 \[2, 16\]"),
        ({"seed_out": torch.zeros(2, 16)}, "seed_out must be int32"),
        ({"hidden": torch.zeros(7, 128)}, r"hidden must be .* \[8, 128\]"),
        ({"hidden": torch.zeros(8, 128).long()}, "hidden must be .* got torch.int64"),
        ({"tail_ids": torch.zeros(8).long()}, r"tail_ids must be .* \[2\]"),
        ({"tail_ids": [1, 2]}, r"tail_ids must be .* got \[1, 2\]"),
        ({"mode": "fast"}, "mode"),
    ],
)
def test_what_it_refuses(served: Pair, change: dict[str, Any], named: str) -> None:
    with served.kv.request() as a, served.kv.request() as b:
        batch = served.batch([(a, 5), (b, 3)])
        arguments = {
            "hidden": torch.zeros(8, 128, device=DEVICE), "tail_ids": torch.zeros(2, dtype=torch.int64),
            "seed_out": served.seed(batch),
        }  # fmt: skip
        want = served.draft.forward(batch, **arguments).hidden
        pools = served.kv.latent_pool.clone(), served.kv.index_pool.clone()
        changed = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
        with pytest.raises(ValueError, match=named):
            served.draft.forward(batch, **(arguments | changed))
        assert same([served.kv.latent_pool, served.kv.index_pool], list(pools))
        assert same(served.draft.forward(batch, **arguments).hidden, want)


@pytest.mark.usefixtures("fresh")
class TestOwnPair:
    """What changes the state gets runners of its own."""

    def test_verify_covers_the_draft(self) -> None:
        pair = build(capture_sizes=(8, 16))
        pair.draft.capture(progress=False)
        verified = pair.draft.verify()
        assert verified.ok, str(verified)
        assert {(c.bucket, c.variant) for c in verified.checks} == {(b, v) for b in (8, 16) for v in ("cut", "short")}
        pair.kv.close()

    def test_moved_weights_of_the_target_drop_and_renew_both(self) -> None:
        pair = build(capture_sizes=(8,))
        pair.draft.capture(progress=False)
        with pair.kv.request() as request:
            batch = pair.batch([(request, 8)])
            compare(pair, batch)
            pair.target.model.norm.data = pair.target.model.norm.data * 2
            pair.target.refresh()
            with sparse_pcg.stats().expect(fallbacks={}):
                assert compare(pair, batch)[0].variant == "short"
            sparse_pcg.reset()
            with sparse_pcg.stats().expect(replays=0, fallbacks={"size": 2}):
                assert compare(pair, batch)[0].variant is None

    def test_compiled_pieces(self) -> None:
        sizes = (16,)
        pair = build(sparse_pcg.Options(capture_sizes=sizes, compiler="inductor"), capture_sizes=sizes)
        pair.draft.capture(progress=False)
        with pair.kv.request() as request:
            for seed, (rows, variant) in enumerate([(12, "short"), (12, "cut")]):
                assert compare(pair, pair.batch([(request, rows)], seed))[0].variant == variant
