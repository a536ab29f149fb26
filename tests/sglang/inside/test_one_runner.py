"""Where SGLang's whole prefill runner is ours: its batches, its pools, an error in a replay, what is left to SGLang."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import sparse_pcg
from sparse_pcg.counters import LIVE

from . import fake_graphs
from .harness import BATCHES, EDGES, PIECEWISE, RELEASE, Server, equal, expected, kernels, make_body, served

if not kernels.ONE_RUNNER:
    pytest.skip("this release has graph backends", allow_module_level=True)

from sparse_pcg.integrations.sglang import compiled_prefill, hooks, piecewise_runner
from sparse_pcg.integrations.sglang.deployment import Serving
from sparse_pcg.integrations.sglang.segments import RecordedPrefill

BATCH = kernels.srt("model_executor.forward_batch_info")
CONTEXT = kernels.srt("compilation.piecewise_context_manager")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"sparse_pcg: SGLang {RELEASE}")]


def test_batches_that_sglang_mixes_with_decodes() -> None:
    def mixed(server: Server) -> list[Any]:
        mode = BATCH.ForwardMode.MIXED
        server.runner.given.update(forward_mode=mode, global_forward_mode=mode)
        return served(server, EDGES)

    body = make_body()
    wanted = mixed(Server(body, PIECEWISE, False))
    equal(mixed(Server(body, PIECEWISE, True)), wanted)


def test_captures_go_to_the_pool_that_was_given() -> None:
    captured = len(fake_graphs.CAPTURES)
    ours = Server(make_body(), PIECEWISE, True)
    pools = {graph.pool for graph in fake_graphs.CAPTURES[captured:]}
    assert pools == {ours.served._pool}  # the runner replaces SGLang's own handle before it captures
    assert kernels.srt("model_executor.piecewise_cuda_graph_runner").get_global_graph_memory_pool() not in pools


def test_an_error_in_a_replay_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    body = make_body()
    wanted = expected(body, PIECEWISE, EDGES)
    ours = Server(body, PIECEWISE, True)
    backend, forward = ours.runner.attn_backend, ours.runner.body.forward

    def fails(*args: Any) -> None:
        raise RuntimeError("no such layer")

    for owner, name in ((type(backend), "get_indexer_metadata"), (ours.served.serving, "wait_for_loads")):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no such layer"):
            patch.setattr(owner, name, fails)
            ours.prefill([10, 9], [3, 20], 4)
        assert ours.runner.body.forward == forward
        assert "init_forward_metadata" not in vars(backend)
        assert not CONTEXT.is_in_piecewise_cuda_graph() and CONTEXT.get_forward_context() is None
    for pool in (ours.runner.pool.latent, ours.runner.pool.index):
        pool.zero_()
    equal(served(ours, EDGES), wanted)


@pytest.mark.parametrize("floor", [32, 999])
def test_buckets_below_the_floor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, floor: int) -> None:
    body = make_body()
    wanted = expected(body, PIECEWISE, EDGES)
    monkeypatch.setattr(Serving, "_floor", lambda self, buckets: floor)
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        ours = Server(body, PIECEWISE, True)
    said = "1 buckets 32..32, cuts per prefill 2" if floor == 32 else "2 buckets 16..32, cuts per prefill 6"
    assert len(messages(caplog)) == 1 and said in messages(caplog)[0]
    assert ("flashmla_sparse in the graph" in messages(caplog)[0]) == (floor == 32)
    equal(served(ours, EDGES), wanted)


def test_a_dropped_prefill_gives_all_its_graphs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded() -> int:
        return sum(isinstance(graph, RecordedPrefill) for graph in LIVE)

    live = recorded()
    monkeypatch.setattr(Serving, "_floor", lambda self, buckets: 32)
    ours = Server(make_body(), PIECEWISE, True)
    assert recorded() == live + 3  # two variants, and one with SGLang's cuts
    ours.served.drop()
    assert recorded() == live
    with pytest.raises(sparse_pcg.SparsePCGError, match="dropped"):
        ours.prefill([5], [0], 1)


def test_what_ours_cannot_serve_sglangs_own_backend_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = make_body()
    wanted = expected(body, PIECEWISE, BATCHES[:4])

    def fails(*args: Any) -> None:
        raise RuntimeError("no such pool")

    for module, name in ((piecewise_runner, "Serving"), (compiled_prefill, "ServedGraph")):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "sparse_pcg"):
            patch.setattr(module, name, fails)
            ours = Server(body, PIECEWISE, True)
        assert len(messages(caplog)) == 1
        equal(served(ours, BATCHES[:4]), wanted)


def other_attention(runner: Any) -> None:
    class Other(type(runner.attn_backend)):  # type: ignore[misc]
        pass

    runner.attn_backend.__class__ = Other


def eagle(runner: Any) -> None:
    runner.model_runner.spec_algorithm = kernels.srt("speculative.spec_info").SpeculativeAlgorithm.EAGLE


def draft(runner: Any) -> None:
    runner.model_runner.is_draft_worker = True


@pytest.mark.parametrize(
    ("change", "reason"), [(other_attention, "not sparse"), (eagle, "hidden states"), (draft, "prefill of a draft")]
)
def test_servers_that_keep_sglangs_runner(caplog: pytest.LogCaptureFixture, change: Any, reason: str) -> None:
    given = Server(make_body(), PIECEWISE, False).runner
    change(given)
    with caplog.at_level(logging.INFO, "sparse_pcg"):
        made = given.build(RELEASE, True, force_for_draft_worker=True)
    assert type(made).__name__ == "PiecewiseCudaGraphRunner"
    assert len(messages(caplog)) == 1 and reason in messages(caplog)[0]


def test_nothing_is_hooked_where_no_graphs_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(release: str) -> None:
        raise ImportError("moved")

    given = Server(make_body(), PIECEWISE, False).runner
    monkeypatch.setattr(hooks, "install", fails)
    assert type(given.build(RELEASE, True)).__name__ == "PiecewiseCudaGraphRunner"  # and an error in the log
    monkeypatch.setattr(hooks, "install", pytest.fail)
    given.model_runner.server_args.disable_piecewise_cuda_graph = True
    assert given.build(RELEASE, True) is None
