"""Our backend behind SGLang's own runner interface: equal to SGLang's own, with fewer cuts."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparse_pcg

from .fake_graphs import capturing
from .harness import BATCHES, BREAKABLE, EDGES, FLAGS, Server, equal, expected, host, kernels, make_body, served


@pytest.mark.parametrize("flag", FLAGS)
def test_outputs_and_caches_equal_sglangs_own(flag: str) -> None:
    body = make_body()
    wanted = expected(body, flag, [*BATCHES, *BATCHES[:4]])
    ours = Server(body, flag, True)
    assert type(ours.backend).__name__.startswith("SparsePCG")
    found = []
    for new, prefix, seed in BATCHES:
        found.extend(served(ours, [(new, prefix, seed)]))
        assert torch.isfinite(ours.runner.whole).all()  # pad rows attend a slot as well
        longest = max(n + p for n, p in zip(new, prefix, strict=True))
        assert ours.served.variants.chosen == ("short" if longest <= kernels.TOPK else "cut")
    replays = sparse_pcg.stats().replays
    ours.served.serving.uncaptured = True  # the same kernels on the same buffers, without graphs
    found.extend(served(ours, BATCHES[:4]))
    assert sparse_pcg.stats().replays == replays
    equal(found, wanted)
    assert set(ours.graphs) == set(kernels.BUCKETS)
    for kept in ours.graphs.values():
        assert (kept["cut"].plan.cuts, kept["short"].plan.cuts) == (2, 0)  # two layers have an indexer


@pytest.mark.parametrize("flag", FLAGS)
def test_edges_of_buckets_after_prompts_outside_graphs(flag: str) -> None:
    body = make_body()
    wanted = expected(body, flag, EDGES * 2)
    ours = Server(body, flag, True)
    found = []
    for batch in [*EDGES, *EDGES]:
        ours.served.serving.uncaptured = len(found) >= len(EDGES)
        ours.runner.attn_backend.use_mha = True  # as a short prompt leaves it that SGLang runs without graphs
        found.extend(served(ours, [batch]))
    equal(found, wanted)


@pytest.mark.parametrize("flag", FLAGS)
def test_two_models_in_one_process(flag: str) -> None:
    first, second = make_body(1), make_body(2)
    wanted = expected(first, flag, BATCHES[:6]), expected(second, flag)
    a, b = Server(first, flag, True), Server(second, flag, True)
    found: tuple[list[Any], list[Any]] = [], []
    for batch in BATCHES[:6]:
        found[0].extend(served(a, [batch]))
        found[1].extend(served(b, [batch]))
    equal(found[0], wanted[0])
    a.backend.cleanup() if hasattr(a.backend, "cleanup") else a.served.drop()
    found[1].extend(served(b, BATCHES[6:]))
    equal(found[1], wanted[1])


@pytest.mark.parametrize("flag", FLAGS)
def test_counters_that_graphs_read_stay_when_sglang_takes_others(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    own = host.make_backend

    def make_backend(*args: Any) -> Any:
        backend = own(*args)
        backend._multi_ctas_kv_counter_buffer = torch.zeros(3)
        return backend

    monkeypatch.setattr(host, "make_backend", make_backend)
    ours = Server(make_body(), flag, True)
    kept = weakref.ref(ours.runner.attn_backend._multi_ctas_kv_counter_buffer)
    ours.runner.attn_backend._multi_ctas_kv_counter_buffer = None
    gc.collect()
    assert kept() is not None
    ours.served.variants.drop()
    assert kept() is None


def test_segments_that_launch_nothing_are_no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_pcg.integrations.sglang.layout import eager_on_graph
    from sparse_pcg.integrations.sglang.segments import record_prefill

    x = torch.zeros(3)
    calls: list[int] = []
    live = eager_on_graph(True)(lambda: calls.append(1))
    with record_prefill("cut", pool=(0, 7), stream=None, barrier=None) as recorded:
        live()
        live()
        x.add_(1)
        live()
    assert (recorded.plan.captures, recorded.plan.cuts, len(recorded._idle)) == (1, 3, 3)
    calls.clear()
    recorded.replay()
    assert len(calls) == 3 and x[0] == 2  # of an emulated graph the capture runs too


class Experts(torch.nn.Module):
    """Routed experts that write over their input and a shared one, launched after them on a stream beside."""

    def __init__(self) -> None:
        super().__init__()
        self.alt_stream: Any = "a stream"
        self.experts = SimpleNamespace(moe_runner_config=SimpleNamespace(inplace=True))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.alt_stream is not None:
            return self.forward_normal_dual_stream(hidden)
        shared = hidden.cos()
        return hidden.copy_(hidden.sin()) + shared

    def forward_normal_dual_stream(self, hidden: torch.Tensor) -> torch.Tensor:
        # In a graph both start at once, and the shared one has read before the routed ones write.
        read = hidden.clone() if capturing() else hidden
        return hidden.copy_(hidden.sin()) + read.cos()


@pytest.mark.skipif(BREAKABLE not in FLAGS, reason="this release has no breakable graphs for sparse attention")
def test_without_graphs_shared_experts_read_what_they_read_in_one() -> None:
    body = make_body()
    body.embed = torch.nn.Sequential(body.embed, Experts())
    wanted = expected(body, BREAKABLE, BATCHES[:4] * 2)
    ours = Server(body, BREAKABLE, True)
    found = served(ours, BATCHES[:4])
    ours.served.serving.uncaptured = True
    equal([*found, *served(ours, BATCHES[:4])], wanted)
    kept = next(block for block in ours.runner.body.modules() if isinstance(block, Experts))
    assert kept.alt_stream == "a stream"
