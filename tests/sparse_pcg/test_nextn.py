"""The NextN module: what it shares, what is its own, and its value against a one-layer decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from custom_ops import BatchMetadata, fill_batch_metadata, use_context
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, NextN, preset

CONFIG = replace(preset("tiny"), index_topk=8)


def pools(layers: int) -> PagedKV:
    """Pools for the target's layers and the draft's, which always has an indexer."""
    return PagedKV(layers + 1, 4, index_layers=(*CONFIG.index_layers, layers), dtype=torch.float32)


def run(module: Any, kv: PagedKV, rows: int, **inputs: torch.Tensor) -> Any:
    """``module`` on one fresh request in page 1."""
    m = BatchMetadata.allocate(rows, 1, 1, CONFIG.index_topk, "cpu")
    lens = torch.tensor([[0], [rows]], dtype=torch.int32)
    fill_batch_metadata(
        lens[0], lens[1], torch.ones(1, 1, dtype=torch.int32), m.positions, m.slots, m.kv_lens, m.select_lens,
        m.request_of_row, m.page_table, m.num_rows_device, m.index_topk,
    )  # fmt: skip
    m.num_rows, m.num_requests, m.max_kv_len = rows, 1, rows
    with use_context(kv.context(m)), torch.no_grad():
        return module(positions=m.positions, kv_lens=m.kv_lens, **inputs)


def test_it_shares_the_target_and_has_an_indexer_wherever_it_lies() -> None:
    target = DSAModel(CONFIG, dtype=torch.float32)
    draft = NextN(target, seed=1)
    assert not CONFIG.has_indexer(CONFIG.num_layers) and draft.layers[0].attention.indexer is not None
    assert draft.layer_id == draft.layers[0].attention.layer_id == CONFIG.num_layers
    for name in ("embed_tokens", "lm_head", "cos_sin_cache"):
        assert getattr(draft, name) is getattr(target, name)
    own = draft.own_parameters()
    assert {"enorm", "hnorm", "eh_proj", "norm", "layers.0.input_norm", "layers.0.mlp.router"} < set(own)
    assert draft.eh_proj.shape == (128, 256) and not {"embed_tokens", "lm_head"} & set(own)
    assert torch.equal(target.embed_tokens, DSAModel(CONFIG, dtype=torch.float32).embed_tokens)  # not drawn again
    assert torch.equal(draft.eh_proj, NextN(target, seed=1).eh_proj)
    assert not torch.equal(draft.eh_proj, NextN(target, seed=2).eh_proj)


def test_it_is_a_one_layer_decoder_of_both_norms() -> None:
    target = DSAModel(CONFIG, dtype=torch.float32)
    draft = NextN(target)
    ids, hidden = torch.randint(CONFIG.vocab_size, (20,)), torch.randn(20, CONFIG.hidden_size)
    kv = pools(CONFIG.num_layers)
    got, selected = run(draft, kv, 20, input_ids=ids, target_hidden=hidden)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()

    embedded, given = unit(target.embed_tokens[ids].double()), unit(hidden.double())
    weights = {n: p.double() for n, p in draft.own_parameters().items()}
    x = torch.cat((embedded * weights["enorm"], given * weights["hnorm"]), 1) @ weights["eh_proj"].T
    decoder = DSAModel(draft.config, dtype=torch.float32)
    decoder.layers, decoder.norm = draft.layers, draft.norm
    want = run(decoder, pools(CONFIG.num_layers), 20, input_ids=ids, input_embeds=x.float())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(draft.head(got), got @ target.lm_head.T)
    assert selected.shape == (20, 8) and selected[2].tolist() == [64, 65, 66, -1, -1, -1, -1, -1]
    assert (selected[8:] >= 64).all() and len(set(selected[19].tolist())) == 8
    other, _ = run(draft, kv, 20, input_ids=ids, target_hidden=hidden, input_embeds=target.embed_tokens[ids])
    assert torch.equal(other, got)


def test_a_layer_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="layer_id must be at least 0, got -1"):
        NextN(DSAModel(CONFIG, device="meta"), layer_id=-1)
