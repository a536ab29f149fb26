"""The paged KV pools of a model: one allocation per kind of cache, one view of it per layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from custom_ops.batch_metadata import PAGE, BatchMetadata, ForwardContext, PendingLoads

from .allocator import PageAllocator
from .requests import RequestPages
from .views import INDEX_PAGE, LAYOUTS, LayerReader, LayerWriter

_POISON = 0xFF  # NaN in every float type of the caches, float8_e4m3fn included


class PagedKV:
    """Latent KV of every layer and index K of the layers with an indexer, in pages of 64 slots.

    layout: ``bf16`` (rows of 576 elements of ``dtype``: bfloat16, float16 or float32), ``fp8_packed`` (656
    bytes) or
        ``fp8`` (576 float8_e4m3fn); ``dtype`` matters to ``bf16`` alone.
    index_layers: ids of the layers with an indexer; None: all.
    poison: fill the pages that become free with NaN, so that reading one again shows.

    latent_kv: layer id -> [num_pages * 64, row]; index_k: layer id -> uint8 [num_pages, 8448]. Both are
    zero at first. allocator: hands out the pages. Raises ValueError for a layout, dtype, layer or page
    count that cannot be.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        layout: str = "bf16",
        index_layers: Iterable[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
    ) -> None:
        indexed = tuple(range(num_layers)) if index_layers is None else tuple(index_layers)
        if layout not in LAYOUTS:
            raise ValueError(f"PagedKV: layout must be one of {sorted(LAYOUTS)}, got {layout!r}")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"PagedKV: dtype must be bfloat16, float16 or float32, got {dtype}")
        if num_layers < 1:
            raise ValueError(f"PagedKV: num_layers must be at least 1, got {num_layers}")
        if len(set(indexed)) != len(indexed) or not set(indexed) <= set(range(num_layers)):
            raise ValueError(f"PagedKV: index_layers must be distinct ids below {num_layers}, got {indexed}")
        self.layout = layout
        self.loads: PendingLoads | None = None  # set by a ``HostKV``
        self.allocator = PageAllocator(num_pages, on_free=self._poison_pages if poison else None)
        row, element = LAYOUTS[layout]
        # One allocation per kind: whoever registers, offloads or frees a pool has one tensor to handle.
        self.latent_pool = torch.zeros(
            num_layers, num_pages * PAGE, row, dtype=dtype if layout == "bf16" else element, device=device
        )
        self.index_pool = torch.zeros(len(indexed), num_pages, INDEX_PAGE, dtype=torch.uint8, device=device)
        self.latent_kv = dict(enumerate(self.latent_pool))
        self.index_k = dict(zip(indexed, self.index_pool, strict=True))

    @property
    def num_pages(self) -> int:
        """Pages of the pools, the dummy slot's page included."""
        return self.allocator.num_pages

    @property
    def num_layers(self) -> int:
        """Layers that have a latent KV cache."""
        return len(self.latent_kv)

    @property
    def nbytes(self) -> int:
        """Bytes of both pools."""
        return self.latent_pool.nbytes + self.index_pool.nbytes

    def layer(self, layer_id: int) -> LayerWriter:
        """The view to store into a layer's caches through. Raises ValueError for an unknown layer."""
        self._wait(layer_id)
        return LayerWriter(layer_id, self.layout, self._latent(layer_id), self.index_k.get(layer_id))

    def read(self, layer_id: int) -> LayerReader:
        """The view to read a layer's caches through. Raises ValueError for an unknown layer."""
        self._wait(layer_id)
        return LayerReader(layer_id, self.layout, self._latent(layer_id), self.index_k.get(layer_id))

    def request(self) -> RequestPages:
        """A new request, without pages yet."""
        return RequestPages(self.allocator)

    def context(self, metadata: BatchMetadata | None, workspace_bytes: int = 1 << 30) -> ForwardContext:
        """What the ops with a ``layer_id`` look up: ``metadata`` and these caches."""
        return ForwardContext(metadata, self.index_k, self.latent_kv, self.layout, workspace_bytes, loads=self.loads)

    def close(self) -> None:
        """Raises RuntimeError naming the pages that some request still holds."""
        if self.loads is not None:
            self.loads.flush()
        self.allocator.close()

    def _wait(self, layer_id: int) -> None:
        if self.loads is not None and layer_id in self.latent_kv:
            self.loads.wait(layer_id)

    def _latent(self, layer_id: int) -> torch.Tensor:
        if layer_id not in self.latent_kv:
            raise ValueError(f"layer_id must be one of 0 to {self.num_layers - 1}, got {layer_id}")
        return self.latent_kv[layer_id]

    def _poison_pages(self, pages: list[int]) -> None:
        paged_rows = self.latent_pool.view(torch.uint8).unflatten(1, (-1, PAGE))
        index = torch.tensor(pages, device=self.latent_pool.device)
        paged_rows.index_fill_(1, index, _POISON)
        self.index_pool.index_fill_(1, index, _POISON)
