"""Typed views of one layer's caches: what is stored through them and what is read back.

Stores go through the operators, in the cache's own byte layout; reads give plain numbers again, decoded
here independently of the kernels. A read decodes the whole cache: it is for tests and debugging, not for
serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from custom_ops.batch_metadata import PAGE

LATENT = 512
ROPE = 64
INDEX_DIM = 128
LATENT_GROUP = 128
PACKED_ROW = LATENT + 4 * (LATENT // LATENT_GROUP) + 2 * ROPE
INDEX_PAGE = PAGE * (INDEX_DIM + 4)

# layout -> (row length, element type); bf16 also takes other float types of the same row
LAYOUTS: dict[str, tuple[int, torch.dtype]] = {
    "bf16": (LATENT + ROPE, torch.bfloat16),
    "fp8_packed": (PACKED_ROW, torch.uint8),
    "fp8": (LATENT + ROPE, torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class LayerCaches:
    """One layer's caches.

    latent_kv: [slots, row] in ``layout``. index_k: uint8 [pages, 8448], None for a layer without an
    indexer.
    """

    layer_id: int
    layout: str
    latent_kv: torch.Tensor
    index_k: torch.Tensor | None

    def _index_cache(self) -> torch.Tensor:
        if self.index_k is None:
            raise ValueError(f"layer {self.layer_id} has no indexer, so it has no index-K cache")
        return self.index_k


class LayerWriter(LayerCaches):
    """Stores into one layer's caches."""

    def store_mla(self, k_nope: torch.Tensor, k_rope: torch.Tensor, slots: torch.Tensor) -> None:
        """Store row t's latent k_nope [T, 512] and rotated k_rope [T, 64] at slots[t] (int64 [T])."""
        torch.ops.sparse_pcg.mla_kv_store(k_nope, k_rope, self.latent_kv, slots, self.layout)

    def store_index_k(self, key: torch.Tensor, slots: torch.Tensor, round_scale: bool = False) -> None:
        """Quantise the index keys [T, 128] row by row and store row t at slots[t] (int64 [T]).

        round_scale: round each row's scale up to a power of two.
        """
        torch.ops.sparse_pcg.index_k_store(key, self._index_cache(), slots, round_scale)


class LayerReader(LayerCaches):
    """Reads one layer's caches back as float32."""

    def key(self) -> torch.Tensor:
        """The latent KV rows, float32 [slots, 576]: 512 latent values, then 64 rotated ones."""
        if self.layout != "fp8_packed":
            return self.latent_kv.float()
        latent, scales, rope = self.latent_kv.split((LATENT, PACKED_ROW - LATENT - 2 * ROPE, 2 * ROPE), dim=1)
        groups = latent.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, LATENT_GROUP))
        values = groups * scales.contiguous().view(torch.float32).unsqueeze(2)
        return torch.cat((values.flatten(1), rope.contiguous().view(torch.bfloat16).float()), dim=1)

    def index_key(self) -> torch.Tensor:
        """The index keys, float32 [slots, 128]. Raises ValueError for a layer without an indexer."""
        keys, scales = self._index_cache().split((PAGE * INDEX_DIM, PAGE * 4), dim=1)
        values = keys.contiguous().view(torch.float8_e4m3fn).float().view(-1, PAGE, INDEX_DIM)
        return (values * scales.contiguous().view(torch.float32).unsqueeze(2)).flatten(0, 1)
