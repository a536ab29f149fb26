"""The runner on a tiny model: replay against uncaptured bit for bit, against eager within tolerance, in any order."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sparse_pcg
from custom_ops._register import use_provider
from custom_ops.indexer import INDEXER_TOPK
from sparse_pcg.batch import Batch
from sparse_pcg.kv import PagedKV, RequestPages, page_table
from sparse_pcg.models import DSAModel, ModelConfig, preset
from sparse_pcg.runner import PrefillOutput
from sparse_pcg.verification import TOLERANCE
from tests.sparse_pcg.rank_threads import Watched
from tests.sparse_pcg.toys import same

CONFIG = replace(preset("tiny"), num_layers=2, index_topk=16)
LEAST = replace(CONFIG, num_layers=1)
SIZES = (4, 8, 16, 32)


def build(config: ModelConfig = CONFIG, **options: Any) -> tuple[sparse_pcg.PrefillRunner, PagedKV]:
    model = DSAModel(config, dtype=torch.float32, seed=3)
    layers = config.index_layers
    kv = PagedKV(config.num_layers, 24, index_layers=layers, dtype=torch.float32, poison=True)
    chosen = sparse_pcg.Options(**{"capture_sizes": SIZES, "compiler": "eager", **options})
    return sparse_pcg.PrefillRunner(model, kv, chosen), kv


@pytest.fixture(scope="module")
def served(fresh_module: None) -> tuple[sparse_pcg.PrefillRunner, PagedKV]:
    runner, kv = build(debug_checks=True)
    runner.capture(progress=False)
    return runner, kv


def batch_of(requests: list[tuple[RequestPages, int]], seed: int = 0) -> sparse_pcg.Batch:
    """A batch that gives each request so many new tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefix = [r.num_tokens for r, _ in requests]
    for request, new in requests:
        request.extend(new)
    ids = torch.randint(CONFIG.vocab_size, (sum(n for _, n in requests),), generator=generator)
    return sparse_pcg.Batch(ids, [n for _, n in requests], prefix, page_table([r for r, _ in requests]))


def compare(runner: sparse_pcg.PrefillRunner, kv: PagedKV, batch: sparse_pcg.Batch) -> sparse_pcg.PrefillOutput:
    """Replay equals uncaptured in outputs and in every page but the dummy one; eager within tolerance, row by row."""
    eager = runner.forward(batch, "eager")
    plain = runner.forward(batch, "uncaptured")
    pools = [kv.latent_pool[:, 64:].clone(), kv.index_pool[:, 1:].clone()]
    replay = runner.forward(batch)
    assert same(replay.hidden, plain.hidden) and same(replay.logits, plain.logits)
    assert same([kv.latent_pool[:, 64:], kv.index_pool[:, 1:]], pools)
    # The last bit of a matrix product of another size can tip a selection: then one row, and what attends it, is apart.
    far = ~torch.isclose(replay.hidden, eager.hidden, rtol=1e-3, atol=1e-4).all(-1)
    assert far.sum() <= max(1, len(far) // 2), far
    return replay


STEPS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=3), st.booleans()),
    min_size=2,
    max_size=5,
)


TIPPED = [([(0, 9), (2, 10)], False), ([(2, 10)], False), ([(2, 2)], False)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(0, 1 << 20))
@example(TIPPED, 289)
def test_random_batches_with_prefixes_chunks_and_preemption(served: Any, steps: Any, seed: int) -> None:
    runner, kv = served
    with ExitStack() as held:
        lanes = [held.enter_context(kv.request()) for _ in range(4)]
        for step, (parts, preempt) in enumerate(steps):
            chosen = dict(parts)
            batch = batch_of([(lanes[lane], new) for lane, new in chosen.items()], seed + step)
            compare(runner, kv, batch)
            if preempt:  # a request loses its pages (they are poisoned) and others will be given them
                lanes[parts[0][0]].close()
    kv.close()


def test_variant_follows_what_rows_see_not_how_many_there_are(served: Any) -> None:
    runner, kv = served
    with kv.request() as a, kv.request() as b:
        assert compare(runner, kv, batch_of([(a, 16)])).variant == "short"
        assert compare(runner, kv, batch_of([(a, 4)])).variant == "cut"  # 4 rows, 20 tokens seen
        assert compare(runner, kv, batch_of([(b, 4)])).variant == "short"
        assert compare(runner, kv, batch_of([(b, 4), (a, 4)])).variant == "cut"  # one of two is long


def test_short_equals_cut_bit_for_bit(served: Any) -> None:
    runner, kv = served
    for rows in (3, 8, 13, 16):
        with kv.request() as request:
            batch = batch_of([(request, rows)], seed=rows)
            short = runner.forward(batch)
            assert short.variant == "short"
            bucket = runner._buckets[short.bucket]  # type: ignore[index]
            held = bucket.plans.pop("short")
            try:
                cut = runner.forward(batch)
            finally:
                bucket.plans["short"] = held
            assert cut.variant == "cut" and same(cut.hidden, short.hidden) and same(cut.logits, short.logits)


def test_pad_rows_reach_nothing(served: Any) -> None:
    """The same batch again after a larger one has left its values in the tails and in the dummy page."""
    runner, kv = served
    with kv.request() as a, kv.request() as b:
        batch = batch_of([(a, 5)], seed=1)
        want = compare(runner, kv, batch)
        kv.latent_pool[:, :64] = 1e4
        runner.forward(batch_of([(b, 31)], seed=2))
        again = runner.forward(batch)
        assert same(again.hidden, want.hidden)


def test_serving_neither_compiles_nor_captures(served: Any) -> None:
    runner, kv = served
    with sparse_pcg.stats().expect(graphs=0, unique_pieces=0, captures=0, replays=3, fallbacks={"size": 2}):
        for rows in (5, 20, 8, 1, 40):
            with kv.request() as request:
                runner.forward(batch_of([(request, rows)], seed=rows))


@pytest.mark.parametrize("rows", [1, 33, 70])
def test_rows_that_no_bucket_serves_run_uncaptured_and_right(served: Any, rows: int) -> None:
    runner, kv = served
    with kv.request() as request:
        batch = batch_of([(request, rows)], seed=rows)
        eager = runner.forward(batch, "eager")
        out = runner.forward(batch)
        assert out.variant is None
        torch.testing.assert_close(out.hidden, eager.hidden, rtol=1e-3, atol=1e-4)


def test_a_batch_of_nothing(served: Any) -> None:
    runner, _ = served
    none = torch.zeros(0, dtype=torch.int64)
    out = runner.forward(sparse_pcg.Batch(none, [], [], torch.zeros(0, 0, dtype=torch.int32)))
    assert out.logits.shape == (0, CONFIG.vocab_size) and out.hidden.shape == (0, CONFIG.hidden_size)


def test_embeddings_run_uncaptured_and_are_counted(served: Any) -> None:
    runner, kv = served
    with kv.request() as request:
        batch = batch_of([(request, 8)])
        want = runner.forward(batch, "eager")
        embeds = torch.nn.functional.embedding(batch.input_ids, runner.model.embed_tokens)
        with sparse_pcg.stats().expect(fallbacks={"multimodal": 1}):
            out = runner.forward(replace(batch, input_embeds=embeds))
        torch.testing.assert_close(out.hidden, want.hidden, rtol=1e-3, atol=1e-4)


def test_what_the_model_runs_of_itself_is_watched_too(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, kv = served
    ranks = Watched()
    monkeypatch.setattr(runner, "_ranks", lambda: ranks)
    monkeypatch.setattr(ranks, "same", lambda what, facts: None, raising=False)  # what debug_checks compares
    forward = runner.model.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        assert ranks.inside
        return forward(*args, **kwargs)

    with kv.request() as request:
        batch = batch_of([(request, 8)])
        embeds = torch.nn.functional.embedding(batch.input_ids, runner.model.embed_tokens)
        monkeypatch.setattr(runner.model, "forward", inside)
        runner.forward(batch, "eager")
        runner.forward(replace(batch, input_embeds=embeds))
    assert ranks.runs == [("an eager run", torch.device("cpu"))] * 2 and not ranks.inside


def test_a_replay_asks_once_who_serves_its_cuts(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, kv = served
    monkeypatch.setattr(runner, "options", replace(runner.options, debug_checks=False))
    choose, asked = INDEXER_TOPK.choose, []
    monkeypatch.setattr(INDEXER_TOPK, "choose", lambda *args: asked.append(choose(*args)) or asked[-1])
    with kv.request() as request:
        batch = batch_of([(request, 30)])
        want = runner.forward(batch, "uncaptured")
        cuts = len(asked)
        assert cuts > 1
        replay = runner.forward(batch)
        assert replay.variant == "cut" and len(asked) == cuts + 1
        assert same([replay.hidden, replay.logits], [want.hidden, want.logits])
        with use_provider("indexer_topk", "triton"):
            runner.forward(batch)
        assert asked[cuts:] == ["reference", "triton"]


class TestBadBatches:
    """A clear error that names the field; nothing written; the runner goes on."""

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"new_lens": [5]}, "new_lens"),
            ({"new_lens": [0, 8]}, r"new_lens\[0\]"),
            ({"new_lens": [4, 4]}, "page_table|prefix_lens"),
            ({"prefix_lens": [-1]}, r"prefix_lens\[0\]"),
            ({"prefix_lens": [60]}, "page_table has 1 pages"),
            ({"prefix_lens": [0, 0]}, "prefix_lens"),
            ({"prefix_lens": [9000], "page_table": torch.tensor([[1] * 140 + [2]]).int()}, "positions"),
            ({"input_ids": torch.zeros(8, dtype=torch.int32)}, "input_ids"),
            ({"page_table": torch.zeros(1, 1, dtype=torch.int32)}, "page 0"),
            ({"page_table": torch.full((1, 1), 24, dtype=torch.int32)}, "1 to 23"),
            ({"page_table": torch.zeros(1, 1, dtype=torch.int64)}, "page_table"),
            ({"new_lens": [8.0]}, r"batch: new_lens\[0\] must be an int, got 8.0"),
            ({"new_lens": torch.tensor([8.0])}, r"batch: new_lens must be .* got torch.float32 \[1\]"),
            ({"new_lens": torch.tensor([[8]])}, r"batch: new_lens must be .* got torch.int64 \[1, 1\]"),
            ({"new_lens": torch.tensor([True])}, r"batch: new_lens must be .* got torch.bool \[1\]"),
            ({"new_lens": 8}, "batch: new_lens must be .* got int"),
            ({"new_lens": None}, "batch: new_lens must be .* got NoneType"),
            ({"prefix_lens": [0.5]}, r"batch: prefix_lens\[0\] must be an int, got 0.5"),
            ({"prefix_lens": torch.tensor(0)}, r"batch: prefix_lens must be .* got torch.int64 \[\]"),
            ({"prefix_lens": 0}, "batch: prefix_lens must be .* got int"),
            ({"input_ids": [0] * 8}, "batch: input_ids must be .* got list"),
            ({"page_table": None}, "batch: page_table must be .* got NoneType"),
            ({"page_table": [[1]]}, "batch: page_table must be .* got list"),
            ({"input_embeds": torch.zeros(8)}, r"batch: input_embeds must be .* got torch.float32 \[8\]"),
            ({"input_embeds": torch.zeros(8, 1, 4)}, r"batch: input_embeds must be .* got torch.float32 \[8, 1, 4\]"),
            ({"input_embeds": torch.zeros(7, 4)}, r"batch: input_embeds must be .* got torch.float32 \[7, 4\]"),
            ({"input_embeds": torch.zeros(8, 4).long()}, "batch: input_embeds must be .* got torch.int64"),
            ({"input_embeds": [0.0]}, "batch: input_embeds must be .* got list"),
        ],
    )
    def test_it_is_named(self, served: Any, change: dict[str, Any], named: str) -> None:
        runner, kv = served
        with kv.request() as request:
            batch = batch_of([(request, 8)])
            want = runner.forward(batch).hidden
            pools = kv.latent_pool.clone(), kv.index_pool.clone()
            with pytest.raises(ValueError, match=named):
                runner.forward(replace(batch, **change))
            assert same([kv.latent_pool, kv.index_pool], list(pools))
            assert same(runner.forward(batch).hidden, want)

    @pytest.mark.parametrize(
        ("prefix", "new", "table", "page"),
        [
            ([0, 0], [4, 4], [[3], [3]], 3),  # both write it
            ([64, 70], [4, 4], [[5, 6], [5, 6]], 6),  # the shared prefix page is fine, the one after it is not
            ([0, 64], [4, 4], [[7], [7, 8]], 7),  # one writes what the other reads
            ([64], [4], [[9, 9]], 9),  # a request over its own prefix
        ],
    )
    def test_a_written_page_belongs_to_one_request(
        self, served: Any, prefix: list[int], new: list[int], table: list[list[int]], page: int
    ) -> None:
        runner, kv = served
        width = max(map(len, table))
        pages = torch.tensor([row + [page] * (width - len(row)) for row in table], dtype=torch.int32)
        pools = kv.latent_pool.clone(), kv.index_pool.clone()
        with pytest.raises(ValueError, match=rf"batch: page_table\[\d\].* page {page} "):
            runner.forward(sparse_pcg.Batch(torch.zeros(sum(new), dtype=torch.int64), new, prefix, pages))
        assert same([kv.latent_pool, kv.index_pool], list(pools))

    def test_full_prefix_pages_and_unused_entries_may_be_shared(self, served: Any) -> None:
        runner, kv = served
        with kv.request() as shared, kv.request() as a, kv.request() as b:
            runner.forward(batch_of([(shared, 64)]))
            a.extend(4)
            b.extend(4)
            rows = [[shared.pages[0], mine, *a.pages] for mine in (a.pages[0], b.pages[0])]
            batch = sparse_pcg.Batch(
                torch.arange(8), torch.tensor([4, 4]), (64, 64), torch.tensor(rows, dtype=torch.int32)
            )
            compare(runner, kv, batch)

    def test_an_unknown_mode(self, served: Any) -> None:
        runner, kv = served
        with kv.request() as request, pytest.raises(ValueError, match="mode"):
            runner.forward(batch_of([(request, 8)]), "fast")


def test_a_required_parameter_without_a_buffer_is_named() -> None:
    class Strange(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
            return input_ids * temperature

    _, kv = build()
    with pytest.raises(ValueError, match="temperature"):
        sparse_pcg.PrefillRunner(Strange(), kv)


@pytest.mark.usefixtures("fresh")
class TestOwnRunner:
    """What changes the state of a runner gets one of its own."""

    def test_weights_that_moved_on_another_rank(self) -> None:
        """Whether to capture anew is decided together: it takes all ranks."""
        runner, _ = build(LEAST, capture_sizes=(8,))
        runner.capture(progress=False)
        asked: list[Any] = []

        class Others:
            found: str | None = "rank 1: norm"

            def vote(self, what: str, mine: str | None) -> str | None:
                asked.append((what, mine))
                return self.found

        runner.graphs()[0].ranks = others = Others()  # type: ignore[assignment]
        with sparse_pcg.stats().expect(captures=1 + runner.graphs()[0].piece_count):
            runner.refresh()
        others.found = None
        with sparse_pcg.stats().expect(captures=0):
            runner.refresh()
        assert asked == [("refresh()", None)] * 2

    def test_moved_weights(self) -> None:
        runner, kv = build(LEAST, capture_sizes=(8,), debug_checks=True)
        runner.capture(progress=False)
        with kv.request() as request:
            batch = batch_of([(request, 8)])
            runner.forward(batch)
            runner.model.norm.data = runner.model.norm.data * 2
            with sparse_pcg.stats().expect(fallbacks={"moved_static": 1}, captures=0):
                moved = runner.forward(batch)
            torch.testing.assert_close(moved.hidden, runner.forward(batch, "eager").hidden, rtol=1e-3, atol=1e-4)
            runner.refresh()
            with sparse_pcg.stats().expect(fallbacks={}, replays=1):
                compare(runner, kv, batch)
            runner.model.norm = torch.nn.Parameter(runner.model.norm.data * 3, requires_grad=False)
            runner.refresh()
            compare(runner, kv, batch)

    def test_reset_gives_everything_back_and_the_runner_goes_on(self) -> None:
        runner, kv = build(LEAST, capture_sizes=(8,))
        runner.capture(progress=False)
        request = kv.request()
        batch = batch_of([(request, 8)])
        compare(runner, kv, batch)
        sparse_pcg.reset()
        assert sparse_pcg.stats().pool_bytes == 0
        with sparse_pcg.stats().expect(fallbacks={"size": 1}, replays=0):
            compare(runner, kv, batch)
        runner.capture(progress=False)
        with sparse_pcg.stats().expect(replays=1):
            compare(runner, kv, batch)
        alive = weakref.ref(runner.model)
        del runner
        torch._dynamo.reset()
        gc.collect()
        assert alive() is None

    def test_runners_of_one_model_class_share_nothing(self) -> None:
        """Another pool size and layout, and both served at once from threads of their own."""
        one, kv_one = build(LEAST, capture_sizes=(8,))
        model = DSAModel(LEAST, dtype=torch.float32, seed=4)
        kv_two = PagedKV(1, 12, "fp8_packed", index_layers=(0,))
        two = sparse_pcg.PrefillRunner(model, kv_two, one.options)
        one.capture(progress=False)
        two.capture(progress=False)
        assert not {id(g) for g in one.graphs()} & {id(g) for g in two.graphs()}
        differ: list[int] = []

        def serve(runner: sparse_pcg.PrefillRunner, kv: PagedKV, seed: int) -> None:
            with kv.request() as request:
                batch = batch_of([(request, 8)], seed)
                want = runner.forward(batch, "uncaptured").hidden
                differ.extend(seed for _ in range(25) if not same(runner.forward(batch).hidden, want))

        threads = [threading.Thread(target=serve, args=a) for a in ((one, kv_one, 1), (two, kv_two, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not differ

    def test_two_runners_with_the_same_layer_ids(self) -> None:
        one, kv_one = build(LEAST, capture_sizes=(8,))
        two, kv_two = build(LEAST, capture_sizes=(8,))
        two.model.norm.data.mul_(2)
        one.capture(progress=False)
        two.capture(progress=False)
        with kv_one.request() as a, kv_two.request() as b:
            batch_one, batch_two = batch_of([(a, 7)], seed=1), batch_of([(b, 8)], seed=2)
            want = one.forward(batch_one).hidden, two.forward(batch_two).hidden
            compare(one, kv_one, batch_one)
            compare(two, kv_two, batch_two)
            assert same(one.forward(batch_one).hidden, want[0]) and same(two.forward(batch_two).hidden, want[1])

    def test_verify_says_what_holds_and_what_does_not(self) -> None:
        runner, kv = build(LEAST, capture_sizes=(8, 16))
        runner.capture(progress=False)
        verified = runner.verify()
        assert verified.ok and {c.bucket for c in verified.checks} == {8, 16}
        assert {c.variant for c in verified.checks} == {"cut", "short"}
        kv.close()  # verify gave its pages back
        plan = runner._buckets[8].plans["short"]
        plan.add(lambda: plan.outputs[0].add_(1e-3), "a fault")
        broken = runner.verify()
        assert not broken.ok and [c.bucket for c in broken.checks if not c.bitwise] == [8] * len(
            [c for c in broken.checks if c.bucket == 8 and c.variant == "short"]
        )

    def test_verify_asks_how_far_eager_itself_sways(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One row, as of the smallest batch, may well be one in which a last bit tips a choice."""
        runner, _ = build(LEAST, capture_sizes=(8,))
        runner.capture(progress=False)
        weights = [p.clone() for p in runner.model.parameters()]
        assert {c.undecided for c in runner.verify().checks} == {None}
        serve = runner.serve_checked

        def rounded(batch: Batch, mode: str) -> PrefillOutput:
            out = serve(batch, mode)
            return out if mode != "eager" else replace(out, hidden=out.hidden * (1 + 2e-7))

        monkeypatch.setattr(runner, "serve_checked", rounded)
        monkeypatch.setitem(TOLERANCE, torch.float32, 1e-9)  # as if every row were undecided
        verified = runner.verify()
        assert verified.ok and {c.undecided for c in verified.checks} == {1.0}
        assert "eager itself is undecided in 100% of the rows" in str(verified)
        assert all(map(same, weights, runner.model.parameters()))
        monkeypatch.setattr("sparse_pcg.verification.eager_sway", Mock(side_effect=torch.OutOfMemoryError))
        assert not runner.verify().ok

    def test_explain_shows_the_k_store_inside_a_piece_and_the_line_of_each_cut(self) -> None:
        runner, _ = build(capture_sizes=(8,))
        runner.capture(progress=False)
        report = sparse_pcg.explain(runner)
        indexed = [i for i in range(CONFIG.num_layers) if CONFIG.has_indexer(i)]
        assert len(report.cuts) == len(indexed)
        assert all(
            "indexer_topk" in c.op and "indexers.py:" in c.source and "indexer_prefill" in c.composite
            for c in report.cuts
        )
        stores = [p for p in report.pieces if "sparse_pcg::index_k_prepare_store" in p.ops]
        assert len(stores) == len(indexed) and all(p.kind == "piece" for p in stores)
        text = str(report)
        assert "index_k_prepare_store" in text and "indexers.py:" in text and "8 rows" in text
        assert report.to_dict()["cuts"][0]["op"] == "sparse_pcg::indexer_topk"
