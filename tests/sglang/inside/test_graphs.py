"""Our backend behind SGLang's own runner interface: equal to SGLang's own, with fewer cuts."""

from __future__ import annotations

import pytest

from .harness import BATCHES, FLAGS, Server, make_body, same


@pytest.mark.parametrize("flag", FLAGS)
def test_outputs_and_caches_equal_sglangs_own(flag: str) -> None:
    body = make_body()
    ours, own = Server(body, flag, True), Server(body, flag, False)
    assert type(ours.backend).__name__.startswith("SparsePCG")
    same(ours, own)
    for kept in ours.graphs.values():
        assert (kept["cut"].plan.cuts, kept["short"].plan.cuts) == (2, 0)  # two layers have an indexer


@pytest.mark.parametrize("flag", FLAGS)
def test_every_replay_is_one_of_the_two_variants(flag: str) -> None:
    server = Server(make_body(), flag, True)
    for new, prefix, seed in BATCHES:
        server.prefill(new, prefix, seed)
        longest = max(n + p for n, p in zip(new, prefix, strict=True))
        assert server.backend.variants.chosen == ("short" if longest <= 8 else "cut"), (new, prefix)


@pytest.mark.parametrize("flag", FLAGS)
def test_two_models_in_one_process(flag: str) -> None:
    first, second = make_body(1), make_body(2)
    a, b = Server(first, flag, True), Server(second, flag, True)
    own_a, own_b = Server(first, flag, False), Server(second, flag, False)
    for batch in BATCHES[:6]:
        same(a, own_a, [batch])
        same(b, own_b, [batch])
    a.backend.cleanup()
    same(b, own_b, BATCHES[:4])
