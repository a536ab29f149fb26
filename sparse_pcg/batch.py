"""A prefill batch as the caller gives it, checked, and brought into the static buffers of a runner."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from custom_ops.batch_metadata import PAGE, BatchMetadata

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
    host = table.cpu().long()
    first = torch.arange(host.shape[1]) * PAGE  # position of each page's first token
    begins, ends = (torch.tensor(lens, dtype=torch.int64).unsqueeze(1) for lens in (prefix_lens, kv_lens))
    used = first < ends
    outside = used & ((host < 1) | (host >= num_pages))
    if bool(outside.any()):
        i, p = outside.nonzero()[0].tolist()
        raise ValueError(
            f"batch: page_table[{i}] must name pages 1 to {num_pages - 1} (page 0 holds the dummy slot), "
            f"got {int(host[i, p])}"
        )
    uses = torch.bincount(host[used], minlength=num_pages)
    shared = used & (first + PAGE > begins) & (uses[host.clamp(0, num_pages - 1)] > 1)
    if bool(shared.any()):
        i, p = shared.nonzero()[0].tolist()
        page = int(host[i, p])
        owners = sorted({row for row, _ in (used & (host == page)).nonzero().tolist()})
        raise ValueError(
            f"batch: page_table[{i}] must have page {page} to itself and once, since new tokens of request {i} go "
            f"there; it is in the pages of requests {owners}"
        )


def fill(metadata: BatchMetadata, batch: Batch, host: HostBatch) -> None:
    """Bring a checked batch into the static buffers, pad tails included."""
    device = metadata.input_ids.device
    metadata.input_ids[: host.rows].copy_(batch.input_ids, non_blocking=True)
    metadata.input_ids[host.rows :].zero_()
    lens = torch.tensor([host.prefix_lens, host.new_lens], dtype=torch.int32)
    if device.type == "cuda":
        lens = lens.pin_memory().to(device, non_blocking=True)
    table = batch.page_table.to(device, non_blocking=True)
    torch.ops.sparse_pcg.fill_batch_metadata(
        lens[0],
        lens[1],
        table[:, : metadata.page_table.shape[1]],
        metadata.positions,
        metadata.slots,
        metadata.kv_lens,
        metadata.select_lens,
        metadata.request_of_row,
        metadata.page_table,
        metadata.num_rows_device,
        metadata.index_topk,
    )
    metadata.num_rows = host.rows
    metadata.num_requests = len(host.new_lens)
    metadata.max_kv_len = host.max_kv_len


def dummy(rows: int, device: torch.device) -> tuple[Batch, HostBatch]:
    """A batch to warm up and capture with: one request whose tokens all lie in page 0, which belongs to no one."""
    table = torch.zeros(1, -(-rows // PAGE), dtype=torch.int32, device=device)
    batch = Batch(torch.zeros(rows, dtype=torch.int64, device=device), [rows], [0], table)
    return batch, HostBatch(rows, [rows], [0], rows)
