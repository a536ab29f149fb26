"""Decoder layers over SGLang's own indexer and attention breaks, as each release has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .host import Linear, make_indexer
from .kernels import BREAKABLE, HEADS, HIDDEN, INDEXER, LATENT, MLA, NOPE, Q_LORA, ROPE, TOPK, srt

RADIX = srt("layers.radix_attention")
METHODS = hasattr(RADIX.RadixAttention, "_eager_attention")  # breaks that are methods
SPLIT_INDEXER = hasattr(INDEXER, "pcg_dsa_indexer_prefill_split")  # the whole indexer is one break


class Layer(torch.nn.Module):
    """Projections around SGLang's indexer (``full`` layers) and its fused bmm + attention break."""

    def __init__(self, layer_id: int, full: bool) -> None:
        super().__init__()
        self.layer_id, self.full = layer_id, full
        self.q_a, self.q_b = Linear(HIDDEN, Q_LORA), Linear(Q_LORA, HEADS * (NOPE + ROPE))
        self.kv, self.out = Linear(HIDDEN, LATENT + ROPE), Linear(HEADS * LATENT, HIDDEN)
        self.w_kc = torch.nn.Parameter(torch.randn(HEADS, NOPE, LATENT) / NOPE**0.5, requires_grad=False)
        self.indexer = make_indexer(layer_id) if full else None
        if METHODS or not SPLIT_INDEXER:
            self.attn = self.attn_mqa = RADIX.RadixAttention(HEADS, LATENT + ROPE, 0.3, 1, layer_id, v_head_dim=LATENT)
            return
        self.attn = SimpleNamespace(
            layer_id=layer_id, tp_q_head_num=HEADS, tp_k_head_num=1, head_dim=LATENT + ROPE, v_head_dim=LATENT,
            scaling=0.3, is_cross_attention=False,
        )  # fmt: skip

    def forward(self, hidden: Any, positions: Any, batch: Any, before: Any) -> Any:
        q_lora = self.q_a(hidden)[0]
        q = self.q_b(q_lora)[0].view(-1, HEADS, NOPE + ROPE)
        latent = self.kv(hidden)[0].unsqueeze(1)
        q_nope, q_pe = q.split([NOPE, ROPE], -1)
        if not SPLIT_INDEXER:
            if self.full:
                before = self.indexer.forward_cuda(hidden, q_lora, positions, batch, self.layer_id)
            q = torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)
            k_nope, k_pe = latent[..., :LATENT], latent[..., LATENT:]
            out = self.attn(q, k_nope, k_nope, batch, True, q_rope=q_pe, k_rope=k_pe, topk_indices=before)
            return hidden + torch.tanh(self.out(out.reshape(-1, HEADS * LATENT))[0]), before
        out = q.new_empty(q.shape[0], HEADS * LATENT)
        if self.full:
            before = self.select(hidden, q_lora, positions)
        self.attend(q_nope, q_pe, latent[..., :LATENT], latent[..., LATENT:], out, before)
        return hidden + torch.tanh(self.out(out)[0]), before

    def select(self, hidden: Any, q_lora: Any, positions: Any) -> Any:
        """The slots that each row attends."""
        chosen = torch.full((hidden.shape[0], TOPK), -1, dtype=torch.int32)
        split = INDEXER.pcg_dsa_indexer_prefill_split
        if BREAKABLE.is_in_breakable_cuda_graph():
            split = INDEXER.bcg_dsa_indexer_prefill_split
        split(layer_id=self.layer_id, x=hidden, q_lora=q_lora, positions=positions, topk_result=chosen)
        return chosen

    def attend(self, q_nope: Any, q_pe: Any, k_nope: Any, k_pe: Any, out: Any, chosen: Any) -> None:
        """Attention over the chosen slots into ``out``."""
        q_in = q_nope.transpose(0, 1)
        bmm_out = q_pe.new_empty(HEADS, q_pe.shape[0], LATENT)
        args = (q_in, self.w_kc, bmm_out, bmm_out.transpose(0, 1), k_nope, out, True)
        if METHODS:
            MLA.DeepseekMLAForwardMixin._eager_bmm_attention.__get__(self)(*args, q_pe, k_pe, topk_indices=chosen)
            return
        attend = MLA.mla_bmm_then_unified_attention
        if BREAKABLE.is_in_breakable_cuda_graph():
            attend = MLA.bcg_mla_bmm_then_unified_attention
        attend(*args, self.layer_id, q_pe, k_pe, topk_indices=chosen)


class Body(torch.nn.Module):
    """The transformer body: full indexers in layers 0 and 2, the others share."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, HIDDEN)
        self.embed.weight.requires_grad_(False)
        self.layers = torch.nn.ModuleList(Layer(i, i in (0, 2)) for i in range(layers))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, input_embeds: Any = None
    ) -> torch.Tensor:
        hidden, before = self.embed(input_ids), None
        hidden = hidden + positions[:, None].float() * 0.01
        for layer in self.layers:
            hidden, before = layer(hidden, positions, forward_batch, before)
        return hidden


class Outer(torch.nn.Module):
    """The model around the body; its head is left out."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model = body

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        return self.model(input_ids, positions, forward_batch)


class WithHead(Outer):
    """The model around the body: every row of the body's output as its logits. whole: with pad rows."""

    shared_experts_config = None

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, **kwargs: Any) -> Any:
        self.whole = super().forward(input_ids, positions, forward_batch)
        return srt("layers.logits_processor").LogitsProcessorOutput(next_token_logits=self.whole, hidden_states=None)
