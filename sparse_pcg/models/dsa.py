"""A DeepSeek-Sparse-Attention decoder: MLA with an indexer, dense and MoE MLPs.

Written for ``torch.compile(fullgraph=True)``: what differs between layers is a tensor or the ``layer_id``
of a composite operator, so that layers of one kind trace to the same graph. The operators find the caches
and the batch in the forward context: run the model inside ``custom_ops.use_context(kv.context(metadata))``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import custom_ops  # noqa: F401  (registers the operators)

from .config import ModelConfig
from .drawing import draw_weights
from .indexers import Indexer, PlainIndexer
from .moe import DenseMLP, MoE, weight
from .rope import cos_sin_cache
from .sharding import Rank


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * gain over the last dim, in float32; returns x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * gain.float()).to(x.dtype)


class Attention(nn.Module):
    """Absorbed multi-head latent attention over the tokens that the indexer selected.

    w_kc [heads, nope, 512] and w_vc [heads, 512, v] are the two halves of the KV up-projection.
    """

    def __init__(
        self, layer_id: int, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        heads, hidden, latent = config.num_heads, config.hidden_size, config.kv_lora_rank
        self.layer_id = layer_id
        self.config = config
        self.split = (config.q_lora_rank, latent, config.qk_rope_head_dim)
        self.qkv_a_proj = weight(sum(self.split), hidden, dtype=dtype, device=device)
        self.q_a_norm = weight(config.q_lora_rank, dtype=dtype, device=device)
        self.kv_a_norm = weight(latent, dtype=dtype, device=device)
        self.q_b_proj = weight(heads * config.qk_head_dim, config.q_lora_rank, dtype=dtype, device=device)
        self.w_kc = weight(heads, config.qk_nope_head_dim, latent, dtype=dtype, device=device)
        self.w_vc = weight(heads, latent, config.v_head_dim, dtype=dtype, device=device)
        self.o_proj = weight(hidden, heads * config.v_head_dim, dtype=dtype, device=device)
        self.indexer: Indexer | None = None
        if config.has_indexer(layer_id):
            kind = Indexer if config.indexer_float8 else PlainIndexer
            self.indexer = kind(layer_id, config, dtype, device)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, topk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. topk: the selection of the layer before. Returns [T, hidden] and the selection
        used.
        """
        config = self.config
        q_lora, k_nope, k_rope = F.linear(x, self.qkv_a_proj).split(self.split, dim=1)
        q_lora = rms_norm(q_lora, self.q_a_norm, config.lora_norm_eps)
        k_nope = rms_norm(k_nope, self.kv_a_norm, config.lora_norm_eps)
        q = F.linear(q_lora, self.q_b_proj).unflatten(1, (config.num_heads, config.qk_head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=2)
        if self.indexer is not None:
            topk = self.indexer(x, q_lora, positions, table)
        assert topk is not None
        out = torch.empty((x.shape[0], config.num_heads, config.v_head_dim), dtype=x.dtype, device=x.device)
        torch.ops.sparse_pcg.mla_attention(
            self.layer_id,
            q_nope,
            q_rope,
            k_nope,
            k_rope,
            self.w_kc,
            self.w_vc,
            positions,
            table,
            config.rope_interleaved,
            topk,
            config.softmax_scale,
            out,
        )
        return F.linear(out.flatten(1), self.o_proj), topk


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); config: of the part that ``rank`` holds."""

    def __init__(
        self, layer_id: int, config: ModelConfig, rank: Rank, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.rank = rank
        self.eps = config.rms_norm_eps
        self.input_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.post_attention_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(layer_id, config, dtype, device)
        self.mlp: DenseMLP | MoE
        if layer_id < config.first_k_dense:
            self.mlp = DenseMLP(config.hidden_size, config.intermediate_size, dtype, device)
        else:
            self.mlp = MoE(config, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        valid: torch.Tensor,
        table: torch.Tensor,
        topk: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. valid: bool [T]. Returns [T, hidden] and the selection that the layer
        attended.
        """
        attended, topk = self.attention(rms_norm(x, self.input_norm, self.eps), positions, table, topk)
        x = x + self.rank.sum(attended)
        return x + self.rank.sum(self.mlp(rms_norm(x, self.post_attention_norm, self.eps), valid)), topk


class DSAModel(nn.Module):
    """The decoder, with random weights drawn from ``seed`` on ``device`` (none are drawn for seed None and on
    the meta device).

    Weights are scaled so that activations keep their size over depth. Nothing takes a gradient.

    rank: which part of the model this one is (``Rank.of(mesh)``); its random weights are that part of those of a whole
    model. What the ranks give is summed in the forward, which all of them have to run. Embedding and head are whole on
    each, so hidden states and logits are the whole model's.

    whole_config: ``config`` as given. config: of the rank's part.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
        rank: Rank | None = None,
    ) -> None:
        super().__init__()
        self.rank = rank or Rank()
        self.whole_config = config
        self.config = config = self.rank.part_of(config)
        self.embed_tokens = weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(layer_id, config, self.rank, dtype, device) for layer_id in range(config.num_layers)
        )
        self.norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.cos_sin_cache: torch.Tensor
        self.register_buffer("cos_sin_cache", cos_sin_cache(config, device), persistent=False)
        if seed is not None and torch.device(device).type != "meta":
            whole = DSAModel(self.whole_config, dtype, "meta") if self.rank.size > 1 else self
            draw_weights(self, config.num_layers, seed, self.rank, dict(whole.named_parameters()))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_lens: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The hidden states after the final norm, [T, hidden].

        input_ids: int64 [T]. positions: int64 [T], 0-based in the request. kv_lens: int32 [T], how many
        tokens the row sees; 0 marks a pad row. input_embeds: [T, hidden], taken in place of the tokens'
        embeddings if given.
        """
        x = F.embedding(input_ids, self.embed_tokens) if input_embeds is None else input_embeds
        valid = kv_lens > 0
        topk = None
        for layer in self.layers:
            x, topk = layer(x, positions, valid, self.cos_sin_cache, topk)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of the given rows of ``forward``'s result, [rows, hidden]."""
        return F.linear(hidden, self.lm_head)
