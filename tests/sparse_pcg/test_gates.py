"""Deployments and kill switches: which features are on, what is cut then, and that results stay right."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_pcg
from sparse_pcg.compiled_graph import _copy_graph as copy_graph
from sparse_pcg.compiled_graph import _fake_mode as fake_mode_of
from sparse_pcg.drafting import DraftRunner
from sparse_pcg.gates import ATTENTION, DRAFT, FEATURES, INDEXER, SHORT, Deployment
from sparse_pcg.graph_runner import no_grad, use_context
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, ModelConfig, NextN, preset
from sparse_pcg.rewrite import is_cut, overload_of, rewrite
from tests.sparse_pcg.test_runner import batch_of, compare
from tests.sparse_pcg.toys import same

SMALL = replace(preset("tiny"), num_layers=3, index_topk=16)
LEAST = replace(SMALL, num_layers=1)
KILLED = {
    "SPARSE_PCG_ATTN_IN_GRAPH": {ATTENTION, INDEXER, SHORT},
    "SPARSE_PCG_INDEXER_PREP_IN_GRAPH": {INDEXER, SHORT},
    "SPARSE_PCG_DRAFT_IN_GRAPH": {DRAFT},
    "SPARSE_PCG_SHORT_GRAPHS": {SHORT},
}

pytestmark = pytest.mark.usefixtures("fresh")


def build(
    config: ModelConfig = SMALL, deployment: Deployment | None = None, draft: bool = False, **options: Any
) -> Any:
    """A runner and its pools; with ``draft`` the draft's runner too."""
    model = DSAModel(config, dtype=torch.float32, seed=3)
    layers = config.num_layers
    kv = PagedKV(layers + 1, 24, index_layers=(*config.index_layers, layers), dtype=torch.float32)
    chosen = sparse_pcg.Options(**{"capture_sizes": (8,), "compiler": "eager", **options})
    runner = sparse_pcg.PrefillRunner(model, kv, chosen, deployment)
    return (runner, kv, DraftRunner(NextN(model), kv, runner)) if draft else (runner, kv)


def off(runner: Any) -> dict[str, str]:
    return {gate.feature: gate.reason for gate in runner.gates if not gate.on}


def cuts_of(runner: Any, gm: torch.fx.GraphModule, fake_mode: FakeTensorMode, whole: frozenset[str]) -> list[str]:
    """The cuts of a traced model that is rewritten with these composites whole; nothing is compiled or run."""
    context = runner._context(runner.metadata)
    context.whole = whole
    own = copy_graph(gm)
    with use_context(context):
        rewrite(own, fake_mode)
    cuts = [overload_of(n) for n in own.graph.nodes if is_cut(n, frozenset())]
    return [op._schema.name.removeprefix("sparse_pcg::") for op in cuts]


def by_dynamo(runner: Any, deployments: Sequence[frozenset[str]]) -> list[list[str]]:
    """The cuts in what Dynamo traces."""
    found: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Any:
        found.extend(cuts_of(runner, gm, fake_mode_of(gm), whole) for whole in deployments)
        return lambda *args: (None,)

    rows = runner._row_arguments(runner.metadata, 2, {})
    with no_grad(), use_context(runner._context(runner.metadata)):
        torch.compile(runner.model, backend=backend, fullgraph=True)(**rows)
    return found


def by_symbols(runner: Any, deployments: Sequence[frozenset[str]]) -> list[list[str]]:
    """The cuts in what torch.fx traces by itself: the same calls, in a fraction of the time."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = runner.model

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_lens: torch.Tensor) -> Any:
            return self.model(input_ids, positions, kv_lens)

    class Examples(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            n.meta["example_value"] = super().run_node(n)
            return n.meta["example_value"]

    rows = runner._row_arguments(runner.metadata, 2, {})
    with no_grad(), use_context(runner._context(runner.metadata)):
        gm = torch.fx.symbolic_trace(Rows())
        Examples(gm).run(*[rows[n.target] for n in gm.graph.nodes if n.op == "placeholder"])
    return [cuts_of(runner, gm, FakeTensorMode(), whole) for whole in deployments]


def shrunk(name: str) -> ModelConfig:
    """A published model at full depth, as narrow as it can be, with dense MLPs: experts take long to trace."""
    whole = preset(name)
    return replace(
        whole,
        first_k_dense=whole.num_layers,
        vocab_size=16,
        hidden_size=16,
        num_heads=1,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_n_heads=1,
        index_topk=4,
        intermediate_size=16,
        moe_intermediate_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        max_positions=64,
    )


@pytest.mark.parametrize("traced", [by_symbols, pytest.param(by_dynamo, marks=pytest.mark.heavy)])
@pytest.mark.parametrize(("name", "ours", "layers"), [("glm5_2", 21, 78), ("deepseek_v32", 61, 61)])
def test_cuts_of_the_published_models(
    name: str, ours: int, layers: int, traced: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 and 61 at full depth; what engines cut today (99 and 122) with the kill switch of attention off."""
    monkeypatch.setenv("SPARSE_PCG_ATTN_IN_GRAPH", "0")
    runner = build(shrunk(name))[0]
    captured, engine = traced(runner, (frozenset(), runner.gates.whole))
    assert captured == ["indexer_topk"] * ours
    assert engine.count("indexer_prefill") == ours and engine.count("mla_attention") == layers
    assert len(engine) == ours + layers


def test_all_are_on_by_default() -> None:
    runner, _, draft = build(draft=True)
    for served in (runner, draft):
        assert tuple(g.feature for g in served.gates) == FEATURES
        assert all(g.on and g.reason == "" for g in served.gates)
        assert served.gates.whole == frozenset()


@pytest.mark.parametrize("field", [f.name for f in fields(Deployment) if f.name != "pp"])
def test_each_deployment_turns_all_off_and_says_why(field: str, caplog: pytest.LogCaptureFixture) -> None:
    value = {"layer_kv_loader": "a loader", "dcp": 2, "prefill_cp": 4, "kpool": 8}.get(field, True)
    with caplog.at_level(logging.WARNING, logger="sparse_pcg"):
        runner, _, draft = build(deployment=Deployment(**{field: value}), draft=True)
        build(deployment=Deployment(**{field: value}))
    for served in (runner, draft):
        assert set(off(served)) == set(FEATURES)
        assert len({reason.split(";")[0] for reason in off(served).values()}) == 1
    said = [r.getMessage() for r in caplog.records if "is off" in r.getMessage()]
    assert len(said) == len(set(said)) == len(FEATURES)  # each once, however many runners
    names = {"layer_kv_loader": "a loader", "dcp": "decode context", "dp_attention": "data-parallel"}
    assert all(names.get(field, "") in message for message in said)


def test_pipeline_stages_turn_the_draft_off_alone() -> None:
    runner, _ = build(deployment=Deployment(pp=2))
    assert set(off(runner)) == {DRAFT} and "2 stages" in off(runner)[DRAFT]


@pytest.mark.parametrize("switch", KILLED)
def test_each_kill_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "off")
    runner, kv, draft = build(LEAST, draft=True)
    assert set(off(runner)) == KILLED[switch] == set(off(draft))
    named = switch.removeprefix("SPARSE_PCG_").lower()
    assert off(runner)[named].startswith(f"{switch}=off")
    runner.capture(progress=False)
    counted = {f"gate:{feature}": 1 for feature in KILLED[switch] - {DRAFT}}
    with kv.request() as request, sparse_pcg.stats().expect(fallbacks=counted, replays=1):
        out = compare(runner, kv, batch_of([(request, 8)]))  # bitwise as uncaptured, close to eager
        assert out.variant == ("cut" if SHORT in KILLED[switch] else "short")
    report = sparse_pcg.explain(runner)
    composites = {c.op.removeprefix("sparse_pcg::") for c in report.cuts}
    expected = {"indexer_topk"} if INDEXER not in KILLED[switch] else {"indexer_prefill"}
    assert composites == expected | ({"mla_attention"} if ATTENTION in KILLED[switch] else set())


def test_the_draft_runs_uncaptured_where_it_is_off() -> None:
    runner, kv, draft = build(LEAST, Deployment(pp=2), draft=True)
    runner.capture(progress=False)
    with sparse_pcg.stats().expect(captures=0):
        assert draft.capture(progress=False) == []
    with kv.request() as request:
        batch = batch_of([(request, 8)])
        out = runner.forward(batch)
        tails, seeds = out.logits.argmax(1), torch.empty(2, 1, 16, dtype=torch.int32)
        with sparse_pcg.stats().expect(fallbacks={f"gate:{DRAFT}": 1}, replays=0):
            got = draft.forward(batch, out.hidden, tails, seeds[0])
        want = draft.forward(batch, out.hidden, tails, seeds[1], "uncaptured")
        assert same([got.hidden, seeds[0]], [want.hidden, seeds[1]])


def test_results_do_not_depend_on_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every op run as PyTorch runs it, whole composites and their parts give the same bytes."""
    config = replace(SMALL, num_layers=2)  # a dense layer and one with experts
    with_all, kv_a = build(config)
    monkeypatch.setenv("SPARSE_PCG_ATTN_IN_GRAPH", "0")
    without, kv_b = build(config)
    for runner in (with_all, without):
        runner.capture(progress=False)
    with kv_a.request() as a, kv_b.request() as b:
        for seed, rows in enumerate((5, 8, 7, 8)):
            one = with_all.forward(batch_of([(a, rows)], seed))
            two = without.forward(batch_of([(b, rows)], seed))
            assert two.variant == "cut" and same([one.hidden, one.logits], [two.hidden, two.logits])


def test_sglangs_switches_count_under_sglang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    name = "SGLANG_ENABLE_NEXTN_DRAFT_PREFILL_CUDA_GRAPH"
    monkeypatch.setenv(name, "false")
    assert off(build()[0]) == {}
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    assert off(build()[0]) == {DRAFT: f"{name}=false"}
    monkeypatch.setenv("SGLANG_ENABLE_DSA_PREFILL_INDEXER_PREP_IN_CUDA_GRAPH", "0")
    assert set(off(build()[0])) == {DRAFT, INDEXER, SHORT}
    monkeypatch.setenv("SGLANG_ENABLE_DSA_PREFILL_ATTN_IN_CUDA_GRAPH", "no")
    assert set(off(build()[0])) == set(FEATURES)


def test_options_turn_features_off_without_counting() -> None:
    runner, kv = build(LEAST, graphs="off")
    assert set(off(runner)) == set(FEATURES) and "graphs='off'" in off(runner)[ATTENTION]
    with kv.request() as request, sparse_pcg.stats().expect(fallbacks={}):
        runner.forward(batch_of([(request, 8)]))
    runner, kv = build(LEAST, short_graphs=False)
    assert set(off(runner)) == {SHORT}
    runner.capture(progress=False)
    with kv.request() as request, sparse_pcg.stats().expect(fallbacks={}, replays=1):
        runner.forward(batch_of([(request, 8)]))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dcp": 0}, "deployment: dcp must be an int of at least 1, got 0"),
        ({"pp": True}, "deployment: pp must be an int"),
        ({"hisparse": 1}, "deployment: hisparse must be True or False, got 1"),
        ({"layer_kv_loader": True}, "deployment: layer_kv_loader must be a name or None, got True"),
        ({"layer_kv_loader": ""}, "deployment: layer_kv_loader"),
    ],
)
def test_bad_deployments(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Deployment(**given)


def test_a_switch_that_says_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_PCG_SHORT_GRAPHS", "maybe")
    with pytest.raises(ValueError, match=r"SPARSE_PCG_SHORT_GRAPHS: must be one of .* got 'maybe'"):
        build()
