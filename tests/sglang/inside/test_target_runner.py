"""Our backends in SGLang's own prefill runner of releases with graph backends: equal to SGLang's own in it."""

from __future__ import annotations

from typing import Any

import pytest

from .harness import FLAGS, STEPS, Served, equal, kernels, make_body, served

if kernels.ONE_RUNNER:
    pytest.skip("this release has one runner and no graph backends", allow_module_level=True)

from .target_runner import Target


@pytest.mark.parametrize("flag", FLAGS)
def test_outputs_and_caches_equal_sglangs_own(flag: str) -> None:
    body = make_body()
    wanted: list[Served] = served(Target(body, flag, False), STEPS)
    ours = Target(body, flag, True)
    backend: Any = ours.graphs.backend
    assert type(backend).__name__.startswith("SparsePCG")
    found = []
    for new, prefix, seed in STEPS:
        found.extend(served(ours, [(new, prefix, seed)]))
        longest = max(n + p for n, p in zip(new, prefix, strict=True))
        assert backend.variants.chosen == ("short" if longest <= kernels.TOPK else "cut")
    equal(found, wanted)
    assert set(backend.variants.graphs) == set(kernels.BUCKETS)
