"""The reference model against ``transformers``' own classes, with the same weights."""

from __future__ import annotations

import pytest
import torch

from sparse_pcg.integrations.transformers import convert
from sparse_pcg.kv import RequestPages
from tests.sparse_pcg.hf_models import FAMILIES, SIZES, TOPK, VOCAB, HFSelections, hf_model
from tests.sparse_pcg.serving import Selections, distance, new_kv, prefill

pytest.importorskip("transformers", minversion="5.20")

every_model = pytest.mark.parametrize(("family", "size"), [(f, s) for f in FAMILIES for s in SIZES])


def prompt_of(length, seed):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def theirs(hf, prompt):
    """Logits [T, vocab] and selections of ``transformers``, whole prompt at once, no cache."""
    with HFSelections(hf) as selections:
        logits = hf(torch.tensor([prompt])).logits[0]
    return logits, selections


@every_model
def test_float32_logits_and_selections(family, size):
    hf = hf_model(family, size)
    model = convert(hf, indexer_float8=False)
    kv = new_kv(model.config)
    prompts = [prompt_of(length, seed=length) for length in (71, 1, 37)]
    requests = [kv.request() for _ in prompts]
    with Selections(model) as ours:
        outputs = prefill(model, kv, list(zip(requests, prompts, strict=True)), pad_to=128)
    starts = (0, 71, 72)
    for request, prompt, start, hidden in zip(requests, prompts, starts, outputs, strict=True):
        logits, selections = theirs(hf, prompt)
        assert 0.5 < logits.std() < 5
        torch.testing.assert_close(model.head(hidden), logits, atol=1e-4, rtol=0)
        assert sorted(selections.by_layer) == list(model.config.index_layers)
        for layer in model.config.index_layers:
            rows = slice(start, start + len(prompt))
            assert torch.equal(ours.visible(layer, request.pages, rows), selections.visible(layer))
        assert len(prompt) <= TOPK or not selections.visible(0)[-1].all()

    # a cached prefix of one page, then the rest in two chunks, beside another request
    prompt = prompts[0][:64] + prompt_of(35, seed=3)
    with RequestPages.with_prefix(requests[0], 64) as request:
        logits, _ = theirs(hf, prompt)
        other = prompt_of(5, seed=5)
        first, beside = prefill(model, kv, [(request, prompt[64:75]), (requests[1], other)])
        (second,) = prefill(model, kv, [(request, prompt[75:])])
        torch.testing.assert_close(model.head(torch.cat((first, second))), logits[64:], atol=1e-4, rtol=0)
        torch.testing.assert_close(model.head(beside), theirs(hf, prompts[1] + other)[0][1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["bf16", "fp8_packed"])
@every_model
def test_bfloat16_with_the_float8_indexer(family, size, layout):
    hf = hf_model(family, size, torch.bfloat16)
    model = convert(hf)
    kv = new_kv(model.config, layout=layout, dtype=torch.bfloat16)
    prompt = prompt_of(91, seed=1)
    with kv.request() as request, Selections(model) as ours:
        (hidden,) = prefill(model, kv, [(request, prompt)])
        visible = {layer: ours.visible(layer, request.pages) for layer in model.config.index_layers}
    logits, selections = theirs(hf, prompt)
    got = distance(model.head(hidden)[:TOPK], logits[:TOPK])
    agreed = []
    for layer, mask in visible.items():
        both = mask & selections.visible(layer)
        agreed.append((both[TOPK:].sum() / mask[TOPK:].sum()).item())
    assert got <= 2e-2
    assert min(agreed) >= 0.95
