"""On emulated graphs what tests/gpu shows on real ones: every bucket in order, and serving that leaves no trace."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import sparse_pcg
from sparse_pcg.buckets import default_schedule
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from tests.sparse_pcg.in_order import compare_in_order, requests_with_prefixes

pytestmark = pytest.mark.usefixtures("fresh")


def test_every_bucket_in_both_variants() -> None:
    config = replace(preset("tiny"), num_layers=2, index_topk=16)
    model = DSAModel(config, dtype=torch.float32, seed=3)
    layers = config.index_layers
    kv = PagedKV(config.num_layers, 16, index_layers=layers, dtype=torch.float32, poison=True)
    sizes = default_schedule(48)
    runner = sparse_pcg.PrefillRunner(model, kv, sparse_pcg.Options(capture_sizes=sizes, compiler="eager"))
    runner.capture(progress=False)
    rng = random.Random(3)
    seen = compare_in_order(runner, kv, rng)
    # A batch of many more rows than index_topk has a request that sees more than index_topk tokens.
    wanted = {(b, v) for b in sizes for v in ("cut", "short") if v == "cut" or b <= 16}
    assert wanted <= seen, sorted(wanted - seen)
    sparse_pcg.freeze()
    still = sparse_pcg.stats().expect(captures=0, unique_pieces=0, graphs=0, replays=40, fallbacks={})
    with requests_with_prefixes(runner, kv, rng) as make, still:
        for _ in range(40):
            runner.forward(make(rng.randint(2, 48), rng.random() < 0.5))
    kv.close()
