"""A layer's indexer, as it is served and in plain float32."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import nn

from custom_ops.batch_metadata import PAGE, current_context

from .config import ModelConfig
from .moe import weight


class Indexer(nn.Module):
    """Weights of a layer's indexer, and its call."""

    def __init__(
        self, layer_id: int, config: ModelConfig, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.layer_id = layer_id
        self.config = config
        self.wq_b = weight(heads * dim, config.q_lora_rank, dtype=dtype, device=device)
        self.wk = weight(dim, config.hidden_size, dtype=dtype, device=device)
        self.k_norm = weight(dim, dtype=torch.float32, device=device)
        self.k_norm_bias = weight(dim, dtype=torch.float32, device=device)
        self.weights_proj = weight(heads, config.hidden_size, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """The selected slots of each row, int32 [T, index_topk], -1 where there are fewer."""
        config = self.config
        topk = torch.full((x.shape[0], config.index_topk), -1, dtype=torch.int32, device=x.device)
        torch.ops.sparse_pcg.indexer_prefill(
            self.layer_id,
            x,
            q_lora,
            positions,
            self.wq_b,
            self.wk,
            self.k_norm,
            self.k_norm_bias,
            self.weights_proj,
            table,
            config.index_norm_eps,
            config.indexer_interleaved,
            config.indexer_hadamard,
            config.indexer_round_scale,
            topk,
        )
        return topk


class PlainIndexer(Indexer):
    """``Indexer`` with its weights and its contract, but scores of unquantised keys in float32.

    Its keys lie here, one set for the pool in use: another pool starts with none. Runs uncompiled only.
    """

    _pool: weakref.ref[torch.Tensor] | None = None
    _keys: torch.Tensor

    def forward(
        self, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """The selected slots of each row, int32 [T, index_topk], -1 where there are fewer. Raises RuntimeError
        in a compiled model.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("indexer_float8=False: the float32 indexer runs uncompiled only")
        config, rows = self.config, x.shape[0]
        topk = torch.full((rows, config.index_topk), -1, dtype=torch.int32, device=x.device)
        context = current_context()
        if context is None or context.metadata is None or context.metadata.num_rows == 0:
            return topk
        ops, batch = torch.ops.sparse_pcg, context.metadata
        x, q_lora = x.float(), q_lora.float()
        rope = (positions, table, config.qk_rope_head_dim, config.indexer_interleaved)
        q = F.linear(q_lora, self.wq_b.float()).unflatten(1, (config.index_n_heads, config.index_head_dim))
        q = ops.apply_rope(q, *rope)
        k = F.linear(x, self.wk.float())
        k = F.layer_norm(k, (config.index_head_dim,), self.k_norm, self.k_norm_bias, config.index_norm_eps)
        keys = self._pool_keys(context.tensor("index_k", self.layer_id))
        keys[batch.slots[:rows]] = ops.apply_rope(k, *rope)
        gates = F.linear(x, self.weights_proj.float()) * (config.index_n_heads * config.index_head_dim) ** -0.5

        valid = min(batch.num_rows, rows)
        lens, requests = batch.kv_lens[:valid], batch.request_of_row[:valid]
        seen = torch.arange(batch.max_kv_len, device=x.device)
        slots = batch.page_table[:, seen // PAGE].long() * PAGE + seen % PAGE
        logits = torch.empty(valid, batch.max_kv_len, device=x.device)
        for row, request in enumerate(requests.tolist()):
            scores = torch.mm(q[row], keys[slots[request]].T).relu()
            logits[row] = gates[row] @ scores
        topk[:valid] = ops.topk_slots(
            logits, torch.zeros_like(lens), lens, requests, batch.page_table, config.index_topk
        )
        return topk

    def _pool_keys(self, cache: torch.Tensor) -> torch.Tensor:
        if self._pool is None or self._pool() is not cache:
            self._pool = weakref.ref(cache)
            self._keys = torch.zeros(cache.shape[0] * PAGE, self.config.index_head_dim, device=cache.device)
        return self._keys
