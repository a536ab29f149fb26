"""The NextN draft: one decoder layer that reads the target's hidden states and guesses the token after the next.

Row t takes the embedding of token t + 1 and the target's hidden state of token t. Embedding, head and RoPE table are
the target's. The layer always has an indexer of its own, whatever the target's sharing pattern says of its place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from .config import ModelConfig
from .drawing import draw_weights
from .dsa import DecoderLayer, DSAModel, rms_norm
from .moe import weight


def draft_config(config: ModelConfig) -> ModelConfig:
    """The configuration of the draft's one layer: MoE, with an indexer of its own."""
    return replace(
        config, num_layers=1, first_k_dense=0, indexer_types=None, index_topk_pattern=None, index_topk_freq=1
    )


class NextN(nn.Module):
    """A draft model for ``target``, with random weights of its own drawn from ``seed`` (none are drawn for seed None
    and on the meta device).

    layer_id: its layer in the KV pools, by default the one after the target's last (where published checkpoints have
        it, as ``model.layers.{layer_id}``). The pools need an index-K cache for it.

    enorm, hnorm, norm: [hidden]; eh_proj: [hidden, 2 * hidden], over the embedding's half first; layers: the decoder
    layer. embed_tokens, lm_head and cos_sin_cache are the target's own tensors. Nothing takes a gradient. Of a target
    that is one rank's part, the draft is that rank's part too.
    Raises ValueError for a layer_id below 0.
    """

    def __init__(self, target: DSAModel, layer_id: int | None = None, seed: int | None = 0) -> None:
        super().__init__()
        self.layer_id = target.config.num_layers if layer_id is None else layer_id
        if self.layer_id < 0:
            raise ValueError(f"NextN: layer_id must be at least 0, got {layer_id}")
        self.config = draft_config(target.config)
        hidden, dtype, device = self.config.hidden_size, target.embed_tokens.dtype, target.embed_tokens.device
        self.enorm = weight(hidden, dtype=dtype, device=device)
        self.hnorm = weight(hidden, dtype=dtype, device=device)
        self.eh_proj = weight(hidden, 2 * hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList([DecoderLayer(self.layer_id, self.config, target.rank, dtype, device)])
        self.norm = weight(hidden, dtype=dtype, device=device)
        if seed is not None and device.type != "meta":
            whole: nn.Module = self
            if target.rank.size > 1:
                whole = NextN(DSAModel(draft_config(target.whole_config), dtype, "meta"), self.layer_id)
            draw_weights(self, self.config.num_layers, seed, target.rank, dict(whole.named_parameters()))
        self.embed_tokens = target.embed_tokens
        self.lm_head = target.lm_head
        self.cos_sin_cache: torch.Tensor
        self.register_buffer("cos_sin_cache", target.cos_sin_cache, persistent=False)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are not the target's, by name."""
        return {n: p for n, p in self.named_parameters() if n not in ("embed_tokens", "lm_head")}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_lens: torch.Tensor,
        target_hidden: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states after the final norm, [T, hidden], and the selection of each row, int32 [T, index_topk].

        input_ids: int64 [T], row t the token after that of ``positions[t]``. positions: int64 [T]. kv_lens: int32
        [T], 0 on pad rows. target_hidden: [T, hidden], what the target returned for the row. input_embeds: [T,
        hidden], taken in place of the embeddings of ``input_ids`` if given.
        """
        eps = self.config.rms_norm_eps
        x = F.embedding(input_ids, self.embed_tokens) if input_embeds is None else input_embeds
        both = torch.cat((rms_norm(x, self.enorm, eps), rms_norm(target_hidden, self.hnorm, eps)), dim=1)
        x = F.linear(both, self.eh_proj)
        x, topk = self.layers[0](x, positions, kv_lens > 0, self.cos_sin_cache, None)
        return rms_norm(x, self.norm, eps), topk

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of the given rows of ``forward``'s hidden states, [rows, hidden]."""
        return F.linear(hidden, self.lm_head)
