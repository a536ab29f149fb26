"""A prefill batch as the caller gives it, checked, and brought into the static buffers of a runner."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from custom_ops.batch_metadata import PAGE, BatchMetadata
from custom_ops.metadata_header import Description

from .staging import Staging

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


def fill(
    metadata: BatchMetadata, batch: Batch, host: HostBatch, staging: Staging, tail_ids: torch.Tensor | None = None
) -> None:
    """Bring a checked batch into the static buffers, pad tails included, in one launch that copies nothing before.

    tail_ids: [B], int32 or int64, on any device; row t then takes the token after its own, a request's last row the
    tail's. What of ids, tails and page table is on the GPU already is read where it is; ids of 64 bits by their low 32.
    """
    requests, pages = len(host.new_lens), -(-host.max_kv_len // PAGE)
    table, ids, tails = batch.page_table, batch.input_ids, tail_ids
    with_table, with_ids = staging.packs(table), staging.packs(ids)
    with_tails = tails is not None and staging.packs(tails)
    table_at = 2 * requests
    ids_at = table_at + (requests * pages if with_table else 0)
    tails_at = ids_at + (host.rows if with_ids else 0)
    turn = staging.take(tails_at + (requests if with_tails else 0))
    words, address = turn.words, turn.address
    words[:requests] = host.prefix_lens
    words[requests:table_at] = host.new_lens
    if with_table:
        words[table_at:ids_at].reshape(requests, pages)[:] = table.cpu().numpy()[:, :pages]
        where = address + 4 * table_at, pages
    else:
        table = table if table.stride(-1) == 1 else table.contiguous()
        where = table.data_ptr(), table.stride(0)
    if with_ids:
        words[ids_at:tails_at] = ids.cpu().numpy()
        new = address + 4 * ids_at, 1
    else:
        ids = ids.contiguous()
        new = ids.data_ptr(), ids.element_size() // 4
    last = 0, 0
    if tails is not None and with_tails:
        words[tails_at : tails_at + requests] = tails.cpu().numpy()
        last = address + 4 * tails_at, 1
    elif tails is not None:
        tails = tails.contiguous()
        last = tails.data_ptr(), tails.element_size() // 4
    staging.fill(turn, Description(requests, pages, address, *where, *new, *last), metadata)
    metadata.num_rows = host.rows
    metadata.num_requests = requests
    metadata.max_kv_len = host.max_kv_len


def dummy(rows: int, device: torch.device) -> tuple[Batch, HostBatch]:
    """A batch to warm up and capture with: one request whose tokens all lie in page 0, which belongs to no one."""
    table = torch.zeros(1, -(-rows // PAGE), dtype=torch.int32, device=device)
    batch = Batch(torch.zeros(rows, dtype=torch.int64, device=device), [rows], [0], table)
    return batch, HostBatch(rows, [rows], [0], rows)
