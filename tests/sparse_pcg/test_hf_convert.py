"""``convert``: what is shared with the ``transformers`` model, and what cannot be converted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_pcg import Batch, Options, PrefillRunner
from sparse_pcg.integrations.transformers import convert
from sparse_pcg.kv import page_table
from sparse_pcg.models import config_from_hf, load_model
from tests.sparse_pcg.hf_models import FAMILIES, TOPK, VOCAB, hf_model
from tests.sparse_pcg.serving import new_kv, prefill

pytest.importorskip("transformers", minversion="5.20")


def storages(module):
    """Addresses of the memory that the parameters and buffers of a module lie in, with its size."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.state_dict().values()}


def logits_of(hf):
    with torch.no_grad():
        return hf(torch.arange(20)[None] % VOCAB).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_all_memory_is_shared(family):
    hf = hf_model(family, "medium")
    before, size = logits_of(hf), sum(storages(hf).values())
    model = convert(hf)
    assert torch.equal(logits_of(hf), before)
    ours, theirs = storages(model), storages(hf)
    assert ours == theirs and sum(ours.values()) == size
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in hf.parameters())
    assert convert(hf).state_dict().keys() == model.state_dict().keys()  # a second time


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_in_one_is_seen_in_the_other(family):
    hf = hf_model(family, "medium")
    model = convert(hf, indexer_float8=False)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.mul_(1.01)
        for parameter in model.parameters():
            parameter.mul_(1.01)
    prompt = [token % VOCAB for token in range(20)]
    kv = new_kv(model.config)
    with kv.request() as request:
        (hidden,) = prefill(model, kv, [(request, prompt)])
    torch.testing.assert_close(model.head(hidden), logits_of(hf)[0], atol=1e-4, rtol=0)


def test_only_what_has_another_dtype_is_copied():
    hf = hf_model("glm_moe_dsa", "medium")
    hf.to(torch.bfloat16)
    indexers = [layer.self_attn.indexer for layer in hf.model.layers if layer.self_attn.indexer is not None]
    for indexer in indexers:
        indexer.weights_proj.float()  # as transformers keeps it
    model = convert(hf)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    theirs = storages(hf)
    copied = [n for n, p in model.named_parameters() if p.untyped_storage().data_ptr() not in theirs]
    kinds = {name.rsplit(".", 1)[-1] for name in copied}
    assert kinds == {"weights_proj", "router", "correction_bias"} and len(copied) == len(indexers) + 2 * 2


def test_converted_twice_all_share():
    hf = hf_model("deepseek_v32", "small")
    first, second = (dict(convert(hf).named_parameters()) for _ in range(2))
    assert {n: p.data_ptr() for n, p in first.items()} == {n: p.data_ptr() for n, p in second.items()}


def test_tied_embeddings():
    hf = hf_model("glm_moe_dsa", "small", tie_word_embeddings=True)
    model = convert(hf)
    assert model.lm_head.data_ptr() == model.embed_tokens.data_ptr() == hf.model.embed_tokens.weight.data_ptr()


def fused_away(hf):
    return hf.model.layers[0].self_attn.q_a_proj.weight.untyped_storage().nbytes() > 4 * 32 * 64


@pytest.mark.parametrize("fault", ["shape", "missing", "extra", "quantised", "meta", "dtype"])
def test_what_cannot_be_converted_is_named_and_left_alone(fault):
    hf = hf_model("deepseek_v32", "small")
    attention, name = hf.model.layers[1].self_attn, "model.layers.1.self_attn.o_proj.weight"
    if fault == "shape":
        attention.o_proj.weight = torch.nn.Parameter(torch.zeros(64, 31))
        message = rf"{name} must be \[64, 32\], got \[64, 31\]"
    elif fault == "missing":
        del attention.o_proj.weight
        message = f"{name} is missing"
    elif fault == "extra":
        attention.o_proj.bias = torch.nn.Parameter(torch.zeros(64))
        message = "model.layers.1.self_attn.o_proj.bias is not expected"
    elif fault == "dtype":
        attention.o_proj.to(torch.bfloat16)
        message = f"{name} must be of the embedding's dtype torch.float32, got torch.bfloat16"
    elif fault == "quantised":
        weight = attention.o_proj.weight.data.to(torch.float8_e4m3fn)
        attention.o_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        message = f"{name} must be of a plain float dtype, got torch.float8_e4m3fn"
    else:
        attention.o_proj.to("meta")
        message = f"{name} must be on the embedding's device, and not meta, got meta"
    with pytest.raises(ValueError, match=message):
        convert(hf)
    assert not fused_away(hf)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"hf_model must be a transformers \.\.\.ForCausalLM, got Linear"):
        convert(torch.nn.Linear(2, 2))
    hf = hf_model("deepseek_v32", "small")
    hf.config.attention_bias = True
    with pytest.raises(ValueError, match="attention_bias must be False, got True"):
        convert(hf)


def test_a_converted_model_is_captured():
    """Its parameters are views of one another's memory, in part."""
    hf = hf_model("glm_moe_dsa", "small")
    model = convert(hf)
    kv = new_kv(model.config)
    runner = PrefillRunner(model, kv, Options(capture_sizes=(32,), compiler="eager"))
    runner.capture()
    with kv.request() as request:
        request.extend(20)
        batch = Batch(torch.arange(20) % VOCAB, [20], [0], page_table([request]))
        replayed = runner.forward(batch)
        assert replayed.bucket == 32
        assert torch.equal(replayed.hidden, runner.forward(batch, "uncaptured").hidden)
    torch.testing.assert_close(replayed.logits[0], logits_of(hf)[0, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_saved_checkpoint(family, tmp_path):
    """Past index_topk tokens, one prefill a token."""
    hf = hf_model(family, "medium", seed=2)
    hf.save_pretrained(tmp_path, max_shard_size="1MB")
    prompts = [[1, 5, 9, 2, 7], [token % VOCAB for token in range(3, 3 + TOPK - 4)]]
    config = replace(config_from_hf(tmp_path), indexer_float8=False)
    model = load_model(tmp_path, config, dtype=torch.float32, progress=False)
    kv = new_kv(config)
    requests, new, tokens = [kv.request() for _ in prompts], prompts, [[] for _ in prompts]
    for _ in range(12):
        outputs = prefill(model, kv, list(zip(requests, new, strict=True)))
        new = [[int(model.head(hidden[-1:]).argmax())] for hidden in outputs]
        tokens = [before + after for before, after in zip(tokens, new, strict=True)]
    for prompt, got in zip(prompts, tokens, strict=True):
        with torch.no_grad():
            ids = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert got == ids[0, len(prompt) :].tolist()
        assert len(set(got)) > 3
