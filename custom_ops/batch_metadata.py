"""What a batch looks like to the ops: per-row buffers at fixed addresses, and the context the cut ops read.

``BatchMetadata`` is one set of static buffers; ``ForwardContext`` is what an op with a ``layer_id`` looks up:
the metadata and the caches of each layer. The context is made current, per thread and nested, with
``use_context``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

PAGE = 64


@dataclass
class BatchMetadata:
    """Static per-row buffers of length N, the largest bucket; row t of the batch is element t of each.

    input_ids: int64 [N]; positions: int64 [N], 0-based position in the request.
    slots: int64 [N], row of the KV pools the token is stored at; 0 (the dummy slot) on pad rows.
    kv_lens: int32 [N], how many tokens the row sees (position + 1); 0 on pad rows.
    select_lens: int32 [N], min(kv_lens, index_topk); 1 on pad rows (they attend the dummy slot).
    request_of_row: int32 [N]; 0 on pad rows.
    page_table: int32 [max requests, max pages]; page p of request b holds its tokens 64p .. 64p+63.
    last_rows: int64 [max requests], the row of each request's last token; 0 past the batch's requests.
    num_rows_device: int32 [1], the valid row count, for captured code.
    num_rows, num_requests, max_kv_len: the same and the longest kv length, as host ints; never read by
    captured code.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    select_lens: torch.Tensor
    request_of_row: torch.Tensor
    page_table: torch.Tensor
    last_rows: torch.Tensor
    num_rows_device: torch.Tensor
    index_topk: int
    num_rows: int = 0
    num_requests: int = 0
    max_kv_len: int = 0

    @classmethod
    def allocate(
        cls, max_rows: int, max_requests: int, max_pages: int, index_topk: int, device: torch.device | str
    ) -> BatchMetadata:
        """Zeroed buffers: an empty batch."""

        def row(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device)

        return cls(
            input_ids=row(torch.int64),
            positions=row(torch.int64),
            slots=row(torch.int64),
            kv_lens=row(torch.int32),
            select_lens=torch.ones(max_rows, dtype=torch.int32, device=device),
            request_of_row=row(torch.int32),
            page_table=torch.zeros(max_requests, max_pages, dtype=torch.int32, device=device),
            last_rows=torch.zeros(max_requests, dtype=torch.int64, device=device),
            num_rows_device=torch.zeros(1, dtype=torch.int32, device=device),
            index_topk=index_topk,
        )


ROW_BUFFERS = ("input_ids", "positions", "slots", "kv_lens", "select_lens", "request_of_row")


class PendingLoads(Protocol):
    """KV that is on its way into the caches."""

    def wait(self, layer_id: int | None = None) -> None:
        """What runs next comes after the loads into a layer (None: into every layer)."""
        ...

    def flush(self) -> None:
        """Block until all copies, to and from the caches, are done."""
        ...


@dataclass
class ForwardContext:
    """What the ops with a ``layer_id`` find at run time.

    metadata: the batch, or None (a dry run: such ops do no work, a top-k result is all -1).
    index_k: layer id -> index-K cache, uint8 [pages, 8448]. latent_kv: layer id -> latent KV cache [slots,
    row].
    kv_layout: byte layout of the latent KV caches (``bf16``, ``fp8_packed``, ``fp8``).
    workspace_bytes: bound on the logits that exist at one time.
    loads: KV on its way into the caches, which whoever reads or writes a cache waits for, or None.
    whole: names of the composites that a compiler leaves whole, as cuts.
    valid_rows_only: ops that declare which arguments have rows run on the batch's valid rows alone.
    chosen: of a replay, whose arguments were checked when they were recorded: the providers of cut ops so far, by op
    and shapes. None: each call checks its arguments and chooses.
    scratch: what the layers of one forward share.
    selection_group: a ``torch.distributed`` process group whose first rank's top-k results the others take, or None:
    each its own.
    """

    metadata: BatchMetadata | None
    index_k: Mapping[int, torch.Tensor] = field(default_factory=dict)
    latent_kv: Mapping[int, torch.Tensor] = field(default_factory=dict)
    kv_layout: str = "bf16"
    workspace_bytes: int = 1 << 30
    loads: PendingLoads | None = None
    whole: frozenset[str] = frozenset()
    valid_rows_only: bool = False
    chosen: dict[Any, str] | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)
    selection_group: Any = None

    def tensor(self, name: str, layer_id: int | None = None) -> torch.Tensor:
        """A metadata buffer, or with ``layer_id`` the cache ``index_k``/``latent_kv`` of that layer."""
        if layer_id is not None:
            caches = {"index_k": self.index_k, "latent_kv": self.latent_kv}[name]
            if layer_id not in caches:
                raise KeyError(f"layer_id: no {name} cache for layer {layer_id}, there are {sorted(caches)}")
            if self.loads is not None:
                self.loads.wait(layer_id)
            return caches[layer_id]
        if self.metadata is None:
            raise RuntimeError(f"{name}: the current forward context has no batch metadata")
        return getattr(self.metadata, name)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[ForwardContext] = []


_stack = _Stack()


@contextmanager
def use_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` current in this thread inside the block; contexts nest."""
    _stack.contexts.append(context)
    try:
        yield context
    finally:
        _stack.contexts.pop()


def current_context() -> ForwardContext | None:
    """The innermost current context of this thread, or None."""
    return _stack.contexts[-1] if _stack.contexts else None


class ContextBind:
    """What ``Op.decompose`` asks for, answered with the real tensors of ``context``, for eager bodies."""

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __call__(
        self, name: str, layer_id: int | None = None, rows_like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The named tensor of the context; with ``rows_like`` as many rows of it as that argument has."""
        tensor = self._context.tensor(name, layer_id)
        return tensor if rows_like is None else tensor[: rows_like.shape[0]]

    def shape(self, argument: torch.Tensor) -> tuple[int, ...]:
        """The shape of an argument of the op."""
        return tuple(argument.shape)
