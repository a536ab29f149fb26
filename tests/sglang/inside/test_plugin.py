"""How SGLang loads the plug-in, what turns it off, and what a server's arguments leave on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_pcg
import sparse_pcg.integrations.sglang as plugin
from sparse_pcg.gates import ATTENTION, DRAFT, INDEXER, SHORT
from sparse_pcg.integrations.sglang.deployment import deployment_of

from .harness import (
    BATCHES,
    BREAKABLE,
    CHOICE,
    FLAGS,
    RELEASE,
    SAID,
    Server,
    equal,
    expected,
    host,
    kernels,
    make_body,
    served,
)

PROJECT = (Path(__file__).parents[3] / "pyproject.toml").read_text()


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's loader with the entry point that the project declares."""
    plugins = kernels.srt("plugins")
    declared = PROJECT.split('[project.entry-points."sglang.srt.plugins"]')[1].split("\n\n")[0]
    name, value = (part.strip().strip('"') for part in declared.strip().split("=", 1))
    entry = EntryPoint(name, value, plugins.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delenv("SPARSE_PCG_SGLANG", raising=False)
    own = getattr(*CHOICE)
    yield plugins.load_plugins
    setattr(*CHOICE, own)
    kernels.srt("plugins.hook_registry").HookRegistry.reset()


@pytest.mark.parametrize("off", [("SPARSE_PCG_SGLANG", "0"), ("SGLANG_PLUGINS", "another")])
def test_turned_off_sglang_is_as_it_was(loading: Any, monkeypatch: pytest.MonkeyPatch, off: tuple[str, str]) -> None:
    before = getattr(*CHOICE)
    monkeypatch.setenv(*off)
    loading()
    assert getattr(*CHOICE) is before


@pytest.mark.parametrize("flag", FLAGS[:1])
def test_loaded_it_serves_sglangs_own_flag(loading: Any, flag: str) -> None:
    loading()
    server = Server(make_body(), flag, True)  # installs the hooks on the indexer
    chosen = Server(make_body(), flag, False).backend if kernels.ONE_RUNNER else getattr(*CHOICE)(server.runner)
    assert type(chosen).__name__.startswith("SparsePCG")
    if kernels.ONE_RUNNER:
        return
    from sparse_pcg.integrations.sglang.hooks import choose_backend

    server.runner.prefill_backend_name = "full"
    assert choose_backend(RELEASE, lambda runner: "its own", server.runner) == "its own"


@pytest.mark.parametrize("version", ["0.5.12", "0.5.24", "0.6.0", "main"])
def test_a_release_it_does_not_know(
    loading: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    before = getattr(*CHOICE)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with caplog.at_level(logging.WARNING, "sparse_pcg"):
        loading()
    assert getattr(*CHOICE) is before
    assert [version in r.getMessage() for r in caplog.records if r.name == "sparse_pcg"] == [True]


@pytest.mark.parametrize("version", ["0.5.13.post1", "0.5.14", "0.5.17.post1", "0.5.19", "0.5.23"])
def test_known_releases(version: str) -> None:
    assert plugin.is_known(version)


ALL = {ATTENTION, INDEXER, SHORT}
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"dcp_size": 2}, "decode context"),
    ({"attn_cp_size": 2}, "prefill context"),
    ({"enable_prefill_cp": True}, "prefill context"),
    ({"enable_hisparse": True}, "hisparse"),
    ({"enable_two_batch_overlap": True}, "two-batch"),
    ({"enable_lora": True}, "LoRA"),
    ({"enable_lmcache": True}, "enable_lmcache"),
    ({"radix_cache_backend": "other"}, "radix_cache_backend"),
    ({"enable_return_indexer_topk": True}, "returned to the client"),
    ({"enable_dp_attention": True}, "data-parallel"),
]


@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS, ids=[next(iter(a)) for a, _ in ARGUMENTS])
def test_server_arguments_that_rule_capture_out(arguments: dict[str, Any], reason: str) -> None:
    flag = FLAGS[0]
    runner = host.Runner(make_body(), None, flag, None)
    vars(runner.model_runner.server_args).update(arguments)
    serving = _serving(runner)
    assert not (serving.attention or serving.indexer or serving.short)
    assert all(reason in serving.reasons[feature] for feature in ALL)


def _serving(runner: Any) -> Any:
    from sparse_pcg.integrations.sglang.deployment import Serving

    return Serving(runner, RELEASE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dsa_prefill_impl": "fa3"}, "as long as the bucket"),
        ({"dsa_kv_cache_store_fp8": True}, "fp8 cache"),
        ({"enable_auto_select_prefill_impl": True}, "as long as the bucket"),
        ({"use_fused_topk": False}, "not fused"),
        ({"hisparse_coordinator": object()}, "hisparse"),
        ({"_kv_shard_pool": object()}, "page-sharded"),
        ({"dsa_index_kpool": 4}, "pooled indexer keys"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_backends_that_rule_capture_out(change: dict[str, Any], reason: str) -> None:
    runner = host.Runner(make_body(), None, FLAGS[0], None)
    vars(runner.attn_backend).update(change)
    assert reason in _serving(runner).reasons[ATTENTION]


@pytest.mark.skipif(hasattr(host.make_backend(kernels.Pool(1), None), "use_fused_topk"), reason="the backend keeps it")
def test_top_k_that_the_environment_leaves_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = host.Runner(make_body(), None, FLAGS[0], None)
    assert ATTENTION not in _serving(runner).reasons
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    assert "not fused" in _serving(runner).reasons[ATTENTION]


@pytest.mark.skipif(kernels.ONE_RUNNER, reason="no backend is chosen in this release")
@pytest.mark.parametrize("flag", FLAGS)
def test_a_model_without_sparse_attention_is_left_to_sglang(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    from sparse_pcg.integrations.sglang.hooks import choose_backend

    runner = host.Runner(make_body(), None, flag, None)
    runner.model_runner.attn_backend = SimpleNamespace(device="cpu")
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        assert choose_backend(RELEASE, lambda given: "its own", runner) == "its own"
    assert ["SGLang's own graphs" in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("value", ["1", "y"])
def test_a_top_k_that_is_broadcast(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SGLANG_DSA_TOPK_BROADCAST", value)
    assert "BROADCAST" in _serving(host.Runner(make_body(), None, FLAGS[0], None)).reasons[ATTENTION]


def test_the_log_has_the_cuts_of_both_variants(caplog: pytest.LogCaptureFixture) -> None:
    serving = _serving(host.Runner(make_body(), None, FLAGS[0], None))
    plan = {cuts: SimpleNamespace(cuts=cuts) for cuts in (2, 9, 7)}
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        serving.report(FLAGS[0], {16: plan[9], 32: plan[9]}, [plan[7], plan[7]])
    assert "2 buckets 16..32, cuts per prefill 9, 2 short graphs with 7 cuts" in caplog.records[-1].getMessage()


def test_a_draft_that_is_no_nextn_layer_is_left_to_sglang() -> None:
    runner = host.Runner(make_body(), None, FLAGS[0], None)
    runner.model_runner.is_draft_worker = True
    assert "no NextN layer" in _serving(runner).reasons[ATTENTION]


def test_pipeline_stages_rule_only_the_draft_out() -> None:
    runner = host.Runner(make_body(), None, FLAGS[0], None)
    runner.model_runner.server_args.pp_size = 4
    assert set(_serving(runner).reasons) == {DRAFT}
    assert deployment_of(runner.model_runner).pp == 4


KILLED = {
    "SPARSE_PCG_ATTN_IN_GRAPH": ALL,
    "SGLANG_ENABLE_DSA_PREFILL_ATTN_IN_CUDA_GRAPH": ALL,
    "SPARSE_PCG_INDEXER_PREP_IN_GRAPH": {INDEXER, SHORT},
    "SGLANG_ENABLE_DSA_PREFILL_INDEXER_PREP_IN_CUDA_GRAPH": {INDEXER, SHORT},
    "SPARSE_PCG_SHORT_GRAPHS": {SHORT},
}


@pytest.mark.parametrize("name", KILLED)
def test_kill_switches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    sparse_pcg.reset()
    runner = host.Runner(make_body(), None, FLAGS[0], None)
    serving = _serving(runner)
    assert set(serving.reasons) == KILLED[name]
    assert all(sparse_pcg.stats().fallbacks[f"gate:{feature}"] >= 1 for feature in KILLED[name])


@pytest.mark.parametrize("flag", FLAGS[:1])
@pytest.mark.parametrize(
    ("name", "cuts"),
    [("SPARSE_PCG_INDEXER_PREP_IN_GRAPH", 2), ("SPARSE_PCG_SHORT_GRAPHS", 2)],
    ids=["indexer", "short"],
)
def test_with_a_feature_off_outputs_stay(monkeypatch: pytest.MonkeyPatch, flag: str, name: str, cuts: int) -> None:
    body = make_body()
    wanted = expected(body, flag, BATCHES[:5])
    monkeypatch.setenv(name, "0")
    ours = Server(body, flag, True)
    equal(served(ours, BATCHES[:5]), wanted)
    assert all(set(kept) == {"cut"} and kept["cut"].plan.cuts == 2 for kept in ours.graphs.values())


@pytest.mark.parametrize("flag", FLAGS[:1])
def test_with_attention_off_sglangs_breaks_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flag: str
) -> None:
    body = make_body()
    wanted = expected(body, flag, BATCHES[:5])
    monkeypatch.setenv("SPARSE_PCG_ATTN_IN_GRAPH", "0")
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        ours = Server(body, flag, True)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"sparse_pcg: SGLang {RELEASE}")]
    assert len(said) == 1 and "SPARSE_PCG_ATTN_IN_GRAPH" in said[0] and "flashmla_sparse in the graph" not in said[0]
    assert type(ours.backend).__name__.startswith("SparsePCG") == (flag != BREAKABLE)
    equal(served(ours, BATCHES[:5]), wanted)


@pytest.mark.skipif(BREAKABLE not in FLAGS, reason="this release has no breakable graphs for sparse attention")
def test_debugged_graphs_are_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    from sparse_pcg.integrations.sglang.hooks import choose_backend

    runner = host.Runner(make_body(), None, BREAKABLE, None)
    runner.model_runner.server_args.debug_cuda_graph = True
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        assert choose_backend(RELEASE, lambda given: "its own", runner) == "its own"
    assert "SGLang's own graphs; debug_cuda_graph" in caplog.records[-1].getMessage()


@pytest.mark.skipif(BREAKABLE in FLAGS, reason="breakable graphs serve sparse attention in this release")
def test_breakable_graphs_of_releases_before_they_served_sparse_attention() -> None:
    from sparse_pcg.integrations.sglang.hooks import choose_backend

    runner = host.Runner(make_body(), None, BREAKABLE, None)
    assert choose_backend(RELEASE, lambda given: "its own", runner) == "its own"


@pytest.mark.parametrize("flag", FLAGS[:1])
def test_pending_loads_are_waited_for_in_full(flag: str) -> None:
    server = Server(make_body(), flag, True)
    waited: list[int] = []
    counter = SimpleNamespace(consumer_index=0, num_layers=7, wait_until=waited.append)
    server.runner.pool.layer_transfer_counter = counter
    for batch in BATCHES[:3]:
        server.prefill(*batch)
    assert waited == [6, 6, 6]  # before each forward, its short ones too
    counter.consumer_index = -1
    server.prefill(*BATCHES[0])
    assert waited == [6, 6, 6]


@pytest.mark.parametrize("flag", FLAGS)
def test_one_line_says_that_it_is_on(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        Server(make_body(), flag, True)
    lines = [r.getMessage() for r in caplog.records if "buckets" in r.getMessage()]
    assert len(lines) == 1
    said = f"SGLang {RELEASE} {SAID.get(flag, flag)}: 2 buckets 16..32, cuts per prefill 2, 2 short graphs with 0 cuts"
    assert said in lines[0]


def test_the_floor_counts_with_the_padding_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    runner = host.Runner(make_body(), None, FLAGS[0], None)
    runner.attn_backend.dsa_prefill_impl = "trtllm"
    serving = _serving(runner)
    assert serving._floor([48, 64, 80, 96]) == 96  # 65 rows may be in 80
    assert serving.serves(8192) and not serving.serves(8704)  # SGLang has no counters for more
    # Where a bucket takes half its rows and more, 160 holds 80; elsewhere 17 may be in it.
    assert serving._floor([16, 160]) == (161 if RELEASE in ("0.5.13.post1", "0.5.14") else 160)


def test_rows_that_a_batch_sees() -> None:
    from sparse_pcg.integrations.sglang.rows import Rows

    table = torch.arange(64, dtype=torch.int32).view(4, 16) + 100
    rows = Rows(8, 4, table)
    batch = SimpleNamespace(
        extend_seq_lens=torch.tensor([3, 2]), seq_lens=torch.tensor([3, 9]), req_pool_indices=torch.tensor([2, 0])
    )
    rows.fill(batch, 8)
    assert rows.select_lens.tolist() == [1, 2, 3, 4, 4, 1, 1, 1]
    assert rows.row_pool_index.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    chosen = torch.full((8, 4), 7, dtype=torch.int32)
    rows.select_all(chosen)
    assert chosen[2].tolist() == [132, 133, 134, -1]
    assert chosen[6].tolist() == [0, -1, -1, -1]
