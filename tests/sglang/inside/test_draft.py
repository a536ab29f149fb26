"""The NextN draft's prefill in SGLang's own runner: equal to SGLang's eager draft, captured, its seed written live."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_pcg
from sparse_pcg.gates import DRAFT

from .harness import BATCHES, BREAKABLE, FLAGS, RELEASE, STEPS, Server, equal, expected, kernels, make_body, served

if BREAKABLE not in FLAGS:
    pytest.skip("this release has no breakable graphs for sparse attention", allow_module_level=True)

from . import drafts
from .drafts import Draft, make_model


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Logits, hidden states, seed and both caches, byte for byte."""
    for name, mine, theirs in zip(("logits", "hidden", "seed", "latent", "index"), found, wanted, strict=True):
        assert torch.equal(mine, theirs), name


def captured(model: Any, **arguments: Any) -> Draft:
    draft = Draft(model, **arguments)
    assert draft.capture() is not None
    return draft


@pytest.mark.parametrize("layer_id", [0, 2])
def test_a_replayed_draft_equals_sglangs_eager_one(layer_id: int) -> None:
    model = make_model(layer_id)
    eager, ours = Draft(model), captured(model)
    variants = ours.graphs.backend.variants
    assert set(variants.graphs) == set(kernels.BUCKETS)
    for kept in variants.graphs.values():
        assert {variant: recorded.plan.cuts for variant, recorded in kept.items()} == {"cut": 1, "short": 0}
    for uncaptured in (False, True):
        ours.graphs.backend.serving.uncaptured = uncaptured  # the same kernels on the same buffers, without graphs
        replays = sparse_pcg.stats().replays
        steps = STEPS[:4] if uncaptured or layer_id else STEPS
        for new, prefix, seed in steps:
            wanted = eager.extend(eager.batch(new, prefix, seed))
            same(ours.extend(ours.batch(new, prefix, seed)), wanted)
            assert ours.replayed and not eager.replayed
            longest = max(n + p for n, p in zip(new, prefix, strict=True))
            assert variants.chosen == ("short" if longest <= kernels.TOPK else "cut")
        assert sparse_pcg.stats().replays - replays == (0 if uncaptured else len(steps))


def test_a_step_that_wants_no_seed() -> None:
    model = make_model()
    eager, ours = Draft(model), captured(model)
    for step in STEPS[:3]:
        batches = eager.batch(*step), ours.batch(*step)
        for batch in batches:
            batch.spec_info.dsa_seed_topk_capture = None
        wanted, found = eager.extend(batches[0]), ours.extend(batches[1])
        assert found[2] is None
        assert all(torch.equal(found[i], wanted[i]) for i in (0, 1, 3, 4))


def test_the_seed_of_a_bucket_that_keeps_sglangs_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_pcg.integrations.sglang.deployment import Serving

    monkeypatch.setattr(Serving, "_floor", lambda self, buckets: 32)
    model = make_model()
    eager, ours = Draft(model), captured(model)
    assert set(ours.graphs.backend.variants.graphs) == {32}
    for step in STEPS[:6]:
        same(ours.extend(ours.batch(*step)), eager.extend(eager.batch(*step)))
        assert ours.replayed


def test_what_is_no_prefill_of_tokens_stays_uncaptured() -> None:
    model = make_model()
    ours = captured(model)
    assert ours.graphs.can_run_graph(ours.batch(*STEPS[0]))
    before = sparse_pcg.stats().fallbacks.get("multimodal", 0)
    image = SimpleNamespace(
        contains_image_inputs=lambda: True, contains_audio_inputs=lambda: False, contains_video_inputs=lambda: False
    )
    embeds = torch.zeros(8, kernels.HIDDEN)
    for given in ({"input_embeds": embeds}, {"mm_input_embeds": embeds}, {"mm_inputs": [image]}):
        assert not ours.graphs.can_run_graph(ours.batch(*STEPS[0], **given))
    assert sparse_pcg.stats().fallbacks["multimodal"] == before + 3
    mode = drafts.BATCH.ForwardMode.DRAFT_EXTEND_V2  # a step of the draft's decoding, where its own graphs cannot run
    assert not ours.graphs.can_run_graph(ours.batch(*STEPS[0], forward_mode=mode))


def test_pending_loads_are_waited_for_in_full() -> None:
    ours = captured(make_model())
    waited: list[int] = []
    ours.pool.layer_transfer_counter = SimpleNamespace(consumer_index=0, num_layers=7, wait_until=waited.append)
    for step in STEPS[:4]:
        ours.extend(ours.batch(*step))
    assert waited == [6] * 4


def test_a_target_and_its_draft_in_one_process() -> None:
    body = make_body()
    wanted = expected(body, BREAKABLE, BATCHES[:6])
    model = make_model()
    eager, target, ours = Draft(model), Server(body, BREAKABLE, True), captured(model)
    found = []
    for batch, step in zip(BATCHES[:6], STEPS, strict=False):
        found.extend(served(target, [batch]))
        same(ours.extend(ours.batch(*step)), eager.extend(eager.batch(*step)))
    equal(found, wanted)


POOL = kernels.srt("model_executor.runner_utils.pool") if RELEASE == "0.5.23" else None


@pytest.mark.skipif(POOL is None, reason="nobody borrows from the graph pool in this release")
def test_replays_are_in_sglangs_scope_of_its_graph_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr(POOL, "graph_pool_replay_scope", lambda: nullcontext(entered.append(1)))
    ours = captured(make_model())
    for step in STEPS[:3]:
        ours.extend(ours.batch(*step))
    assert len(entered) == 3


REFUSED = [
    ({"pp_size": 2}, {}, "pipeline"),
    ({"enable_dp_attention": True}, {}, "data-parallel"),
    ({"attn_cp_size": 2}, {}, "prefill context"),
    ({"debug_cuda_graph": True}, {}, "debug_cuda_graph"),
    ({}, {"SPARSE_PCG_DRAFT_IN_GRAPH": "0"}, "SPARSE_PCG_DRAFT_IN_GRAPH"),
    ({}, {"SGLANG_ENABLE_NEXTN_DRAFT_PREFILL_CUDA_GRAPH": "0"}, "SGLANG_ENABLE_NEXTN"),
    ({}, {"SPARSE_PCG_ATTN_IN_GRAPH": "0"}, "SPARSE_PCG_ATTN_IN_GRAPH"),
]


@pytest.mark.parametrize(("arguments", "environment", "reason"), REFUSED, ids=[r[2] for r in REFUSED])
def test_a_draft_that_is_not_captured_runs_as_sglang_runs_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    environment: dict[str, str],
    reason: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    draft = Draft(make_model(), **arguments)
    before = sparse_pcg.stats().fallbacks.get(f"gate:{DRAFT}", 0)
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        assert draft.capture() is None
    lines = [r.getMessage() for r in caplog.records if "uncaptured" in r.getMessage()]
    assert len(lines) == 1 and RELEASE in lines[0] and reason in lines[0]
    assert sparse_pcg.stats().fallbacks[f"gate:{DRAFT}"] == before + 1
    assert not hasattr(draft.model.model, "layers") and draft.config.num_hidden_layers == 9
    draft.extend(draft.batch(*STEPS[0]))


def test_a_capture_that_fails_leaves_the_draft_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    body = make_body()
    target = Server(body, BREAKABLE, True)
    monkeypatch.setattr("sparse_pcg.integrations.sglang.breakable.record_prefill", None)
    draft = Draft(model)
    assert draft.capture() is None
    assert "cannot be captured" in caplog.text
    draft.extend(draft.batch(*STEPS[0]))
    equal(served(target, BATCHES[:3]), expected(body, BREAKABLE, BATCHES[:3]))


def test_sglangs_own_graphs_are_never_built_for_a_draft(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sparse_pcg.integrations.sglang.hooks._maker", lambda *given: None)
    draft = Draft(make_model())
    assert draft.capture() is None  # their replay would leave the seed as it was
    assert "seed unwritten" in caplog.text


@pytest.mark.parametrize("flag", ["full", "tc_piecewise"])
def test_graphs_of_another_kind_are_never_built_for_a_draft(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flag: str
) -> None:
    monkeypatch.setattr("sparse_pcg.integrations.sglang.hooks._flag", lambda runner: flag)
    draft = Draft(make_model())
    assert draft.capture() is None
    assert "seed unwritten" in caplog.text


def test_a_view_names_no_weight_twice() -> None:
    from sparse_pcg.integrations.sglang.draft import is_one_layer_view, one_layer_view

    draft = Draft(make_model())
    names = [name for name, _ in draft.model.named_parameters(remove_duplicate=False)]
    with one_layer_view(draft.runner):
        assert is_one_layer_view(draft.runner) and draft.config.num_hidden_layers == 1
        assert [name for name, _ in draft.model.named_parameters(remove_duplicate=False)] == names
    assert not is_one_layer_view(draft.runner)


def test_one_line_says_that_the_draft_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        captured(make_model())
    lines = [r.getMessage() for r in caplog.records if "buckets" in r.getMessage()]
    assert len(lines) == 1
    for words in (RELEASE, "breakable draft", "2 buckets 16..32", "cuts per prefill 1", "2 short graphs with 0 cuts"):
        assert words in lines[0]
