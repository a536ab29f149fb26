"""Target, draft and gates on real graphs. test_drafting.py of sparse_pcg runs here too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sparse_pcg
from sparse_pcg.batch import Batch
from sparse_pcg.drafting import DraftRunner
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, NextN, preset

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
CONFIG = replace(preset("tiny"), num_layers=4)


def build(compiler: str, sizes: tuple[int, ...]) -> tuple[sparse_pcg.PrefillRunner, DraftRunner]:
    model = DSAModel(CONFIG, dtype=torch.bfloat16, device="cuda")
    layers = CONFIG.num_layers
    kv = PagedKV(layers + 1, 64, index_layers=(*CONFIG.index_layers, layers), device="cuda")
    target = sparse_pcg.PrefillRunner(model, kv, sparse_pcg.Options(capture_sizes=sizes, compiler=compiler))
    return target, DraftRunner(NextN(model), kv, target)


@pytest.mark.parametrize("switches", ["", "SPARSE_PCG_ATTN_IN_GRAPH", "SPARSE_PCG_INDEXER_PREP_IN_GRAPH"])
def test_target_and_draft_verify(switches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if switches:
        monkeypatch.setenv(switches, "0")
    target, draft = build("inductor", (16, 64, 256))
    draft.capture(progress=False)
    for runner in (target, draft):
        result = runner.verify()
        assert result.ok, str(result)
    expected = {"": {"cut", "short"}}.get(switches, {"cut"})
    assert {c.variant for c in target.verify().checks} == expected


def test_replays_of_target_and_draft_never_synchronise() -> None:
    target, draft = build("eager", (16, 64))
    draft.capture(progress=False)
    with target.kv.request() as request:
        request.extend(40)
        ids = torch.arange(40).pin_memory()
        table = torch.tensor([request.pages], dtype=torch.int32)
        batch = Batch(ids, [40], [0], table)
        seed = torch.empty(1, CONFIG.index_topk, dtype=torch.int32, device="cuda")

        def step() -> None:
            out = target.forward(batch)
            draft.forward(batch, out.hidden, out.logits.argmax(1), seed)

        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
