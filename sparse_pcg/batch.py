"""A prefill batch as the caller gives it, checked, and brought into the static buffers of a runner."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from custom_ops.batch_metadata import PAGE, BatchMetadata
from custom_ops.metadata_fill import fill_staged

Lengths = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Requests to prefill together.

    input_ids: int64 [T], the new tokens of all requests, one request after the other.
    new_lens, prefix_lens: [B], ints or CPU tensors (a scheduler has them on the host; device tensors cost a sync).
    page_table: int32 [B, pages]; page p of a request holds its tokens 64p .. 64p+63, prefix included. Requests may
        share full pages of a prefix; a page with new tokens belongs to one request.
    input_embeds: [T, hidden] taken in place of the tokens' embeddings, or None.
    """

    input_ids: torch.Tensor
    new_lens: Lengths
    prefix_lens: Lengths
    page_table: torch.Tensor
    input_embeds: torch.Tensor | None = None


@dataclass(frozen=True)
class HostBatch:
    """What the host knows of a checked batch: rows, lengths per request, the longest kv length."""

    rows: int
    new_lens: list[int]
    prefix_lens: list[int]
    max_kv_len: int

    @property
    def last_rows(self) -> list[int]:
        """The row of each request's last token."""
        rows, at = [], 0
        for length in self.new_lens:
            at += length
            rows.append(at - 1)
        return rows


def _refuse(field: str, expected: str, got: Any) -> NoReturn:
    given = f"{got.dtype} {list(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
    raise ValueError(f"batch: {field} must be {expected}, got {given}")


def _listed(name: str, lengths: Lengths, least: int) -> list[int]:
    if isinstance(lengths, torch.Tensor):
        whole = not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
        if lengths.dim() != 1 or not whole:
            _refuse(name, "[B], ints or a tensor of whole numbers", lengths)
        given: list[Any] = lengths.tolist()
    else:
        try:
            given = list(lengths)
        except TypeError:
            _refuse(name, "[B], ints or a tensor of whole numbers", lengths)
    values = []
    for i, value in enumerate(given):
        try:
            values.append(operator.index(value))
        except TypeError:
            raise ValueError(f"batch: {name}[{i}] must be an int, got {value!r}") from None
        if values[i] < least:
            raise ValueError(f"batch: {name}[{i}] must be at least {least}, got {value}")
    return values


def check_batch(batch: Batch, num_pages: int, debug: bool) -> HostBatch:
    """Check types, shapes and lengths, and the values of a page table on the host (with ``debug`` of any).

    Raises ValueError naming the field.
    """
    new_lens = _listed("new_lens", batch.new_lens, 1)
    prefix_lens = _listed("prefix_lens", batch.prefix_lens, 0)
    ids, table, embeds = batch.input_ids, batch.page_table, batch.input_embeds
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.dtype != torch.int64:
        _refuse("input_ids", "int64 [T]", ids)
    if len(prefix_lens) != len(new_lens):
        raise ValueError(f"batch: prefix_lens must have {len(new_lens)} entries like new_lens, got {len(prefix_lens)}")
    if sum(new_lens) != ids.shape[0]:
        raise ValueError(f"batch: new_lens must sum to the {ids.shape[0]} rows of input_ids, got {sum(new_lens)}")
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.dtype != torch.int32:
        _refuse("page_table", f"int32 [{len(new_lens)}, pages]", table)
    if table.shape[0] != len(new_lens):
        _refuse("page_table", f"int32 [{len(new_lens)}, pages]", table)
    kv_lens = [p + n for p, n in zip(prefix_lens, new_lens, strict=True)]
    for i, length in enumerate(kv_lens):
        if length > table.shape[1] * PAGE:
            raise ValueError(
                f"batch: page_table has {table.shape[1]} pages ({table.shape[1] * PAGE} tokens) for request {i}, "
                f"which needs {length} tokens (prefix {prefix_lens[i]} + new {new_lens[i]})"
            )
    if embeds is not None:
        wrong = not isinstance(embeds, torch.Tensor) or embeds.dim() != 2 or not embeds.is_floating_point()
        if wrong or embeds.shape[0] != ids.shape[0]:
            _refuse("input_embeds", f"floating [{ids.shape[0]}, hidden]", embeds)
    # A page number that is on the host is checked at no cost; on a device only when asked.
    if debug or not table.is_cuda:
        _check_pages(table, prefix_lens, kv_lens, num_pages)
    return HostBatch(ids.shape[0], new_lens, prefix_lens, max(kv_lens, default=0))


def _check_pages(table: torch.Tensor, prefix_lens: list[int], kv_lens: list[int], num_pages: int) -> None:
    host = table.cpu().numpy()
    used = [row[: -(-length // PAGE)] for row, length in zip(host, kv_lens, strict=True)]
    together = np.concatenate(used) if used else np.empty(0, dtype=np.int32)
    if together.size and (together.min() < 1 or together.max() >= num_pages):
        i, page = next((i, int(p)) for i, row in enumerate(used) for p in row if not 1 <= p < num_pages)
        raise ValueError(
            f"batch: page_table[{i}] must name pages 1 to {num_pages - 1} (page 0 holds the dummy slot), got {page}"
        )
    uses = np.bincount(together)
    for i, (row, begin) in enumerate(zip(used, prefix_lens, strict=True)):
        written = row[begin // PAGE :]
        if (uses[written] > 1).any():
            page = int(written[uses[written] > 1][0])
            owners = [other for other, pages in enumerate(used) if page in pages]
            raise ValueError(
                f"batch: page_table[{i}] must have page {page} to itself and once, since new tokens of request {i} go "
                f"there; it is in the pages of requests {owners}"
            )


class Staging:
    """Host memory that what a batch has on the host is packed in, to go to the device in one copy.

    On CUDA it is pinned, and there are several in turn: one is packed while copies of others are under way.
    """

    _TURNS = 4

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # An index, which torch resolves sooner than a device without one.
        self._index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self._turn = 0
        self._hosts: list[torch.Tensor] = []
        self._devices: list[torch.Tensor] = []
        self._arrays: list[np.ndarray] = []
        self._copied: list[torch.cuda.Event] = []

    def take(self, words: int) -> np.ndarray:
        """int32 host memory of at least ``words`` words that no copy is reading."""
        if self.device.type != "cuda":
            self._arrays = [np.empty(words, dtype=np.int32)]
            return self._arrays[0]
        if not self._hosts or self._hosts[0].shape[0] < words:
            self._grow(max(1 << 16, 1 << (words - 1).bit_length()))
        self._turn = (self._turn + 1) % self._TURNS
        self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, words: int) -> torch.Tensor:
        """The first ``words`` words of what was taken last, on the device in the order of the current stream."""
        if self.device.type != "cuda":
            return torch.from_numpy(self._arrays[0])
        target = self._devices[self._turn]
        target[:words].copy_(self._hosts[self._turn][:words], non_blocking=True)
        self._copied[self._turn].record(torch.cuda.current_stream(self._index))
        return target

    def _grow(self, words: int) -> None:
        for event in self._copied:
            event.synchronize()
        turns = range(self._TURNS)
        self._hosts = [torch.empty(words, dtype=torch.int32, pin_memory=True) for _ in turns]
        self._devices = [torch.empty(words, dtype=torch.int32, device=self.device) for _ in turns]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in turns]


def fill(
    metadata: BatchMetadata,
    batch: Batch,
    host: HostBatch,
    tail_ids: torch.Tensor | None = None,
    staging: Staging | None = None,
) -> None:
    """Bring a checked batch into the static buffers, pad tails included: one copy to the device, one launch.

    tail_ids: [B], int32 or int64, on any device; row t then takes the token after its own, a request's last row the
    tail's. What of ids, tails and page table is on the device already is read where it is.
    """
    device = metadata.input_ids.device
    staging = staging or Staging(device)
    requests, pages = len(host.new_lens), -(-host.max_kv_len // PAGE)
    table, ids = batch.page_table, batch.input_ids
    words, places = 2 * requests, {}
    given = {"table": table, "ids": ids, "tails": tail_ids}
    for name, tensor in given.items():
        if tensor is not None and tensor.device != device:
            places[name] = words
            words += requests * pages if name == "table" else (host.rows if name == "ids" else requests)
    packed = staging.take(words)
    packed[:requests] = host.prefix_lens
    packed[requests : 2 * requests] = host.new_lens
    if "table" in places:
        entries = packed[places["table"] : places["table"] + requests * pages]
        entries.reshape(requests, pages)[:] = table.cpu().numpy()[:, :pages]
    for name, count in (("ids", host.rows), ("tails", requests)):
        if name in places:
            packed[places[name] : places[name] + count] = given[name].cpu().numpy()  # type: ignore[union-attr]
    sent = staging.send(words)

    def at(name: str) -> tuple[torch.Tensor, int]:
        tensor = given[name]
        assert tensor is not None
        return (sent, places[name]) if name in places else (tensor.contiguous(), 0)

    if "table" not in places and table.stride(-1) != 1:
        table = table.contiguous()
    where = (sent, places["table"], pages) if "table" in places else (table, 0, table.stride(0))
    fill_staged(metadata, sent, requests, where, pages, at("ids"), None if tail_ids is None else at("tails"))
    metadata.num_rows = host.rows
    metadata.num_requests = requests
    metadata.max_kv_len = host.max_kv_len


def dummy(rows: int, device: torch.device) -> tuple[Batch, HostBatch]:
    """A batch to warm up and capture with: one request whose tokens all lie in page 0, which belongs to no one."""
    table = torch.zeros(1, -(-rows // PAGE), dtype=torch.int32, device=device)
    batch = Batch(torch.zeros(rows, dtype=torch.int64, device=device), [rows], [0], table)
    return batch, HostBatch(rows, [rows], [0], rows)
