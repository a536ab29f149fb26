"""``fill_batch_metadata`` from a header: a few integers in host memory that say where the parts of a batch lie.

What fills the buffers has the same arguments for every batch, and a graph of it serves them all: it reads the header
anew each time, and through it whatever memory the header points at. A GPU reads pinned host memory where it is, so that
no copy comes before.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import NamedTuple

import torch

from custom_ops.batch_metadata import BatchMetadata
from custom_ops.metadata_fill import FILL_BATCH_METADATA, fill_batch_metadata_reference
from custom_ops.metadata_kernels import CONSTANTS, COPY, ROWS, fill_described_kernel

_MOST_COPIES = 64  # programs that copy the page table


class Description(NamedTuple):
    """What a header holds, in order. Addresses are of int32 words; steps and strides count such words.

    lens: the prefix lengths, then the new ones, ``requests`` each. table: ``pages`` entries of each request are read,
    table_stride apart. ids: the new tokens' (the low words of int64 ones, with a step of 2). tails: likewise one a
    request, and a step of 0 where there are none. All zero: an empty batch.
    """

    requests: int
    pages: int
    lens: int
    table: int
    table_stride: int
    ids: int
    ids_step: int
    tails: int
    tails_step: int


HEADER_WORDS = len(Description._fields)


def fill_described(metadata: BatchMetadata, header: torch.Tensor) -> None:
    """``fill_batch_metadata`` into all of ``metadata`` from what ``header`` describes, unchecked, in one launch.

    header: int64 [HEADER_WORDS], on the host; pinned, like all host memory it points at, where ``metadata`` is on a
    GPU. Both are read when the launch runs and must stay until then. The provider is the op's; the reference is no
    launch and reads the header at once.
    """
    m = metadata
    if takes_header_at_once(m):
        _reference(m, Description(*header.tolist()))
        return
    rows, static_pages = m.positions.shape[0], m.page_table.shape[1]
    row_blocks = max(1, -(-rows // ROWS))  # one at least: it writes the number of rows
    copies = max(1, min(_MOST_COPIES, -(-m.page_table.numel() // COPY)))
    fill_described_kernel[(row_blocks + copies,)](
        header, m.positions, m.slots, m.kv_lens, m.select_lens, m.request_of_row, m.page_table, m.num_rows_device,
        m.input_ids, m.last_rows, row_blocks, rows, static_pages, m.index_topk, **CONSTANTS,
    )  # fmt: skip


def takes_header_at_once(metadata: BatchMetadata) -> bool:
    """Whether the reference is what fills ``metadata``: on a GPU no graph can then do it for later batches."""
    return FILL_BATCH_METADATA.choose(metadata.positions) == "reference"


def _reference(m: BatchMetadata, given: Description) -> None:
    words = partial(_words, m.positions.device)
    lens = words(given.lens, 2 * given.requests)
    prefix_lens, new_lens = lens[: given.requests], lens[given.requests :]
    span = (given.requests - 1) * given.table_stride + given.pages if given.requests and given.pages else 0
    table = words(given.table, span).as_strided((given.requests, given.pages), (given.table_stride, 1))
    ids = words(given.ids, int(new_lens.sum()), given.ids_step)
    tails = words(given.tails, given.requests, given.tails_step) if given.tails_step else None
    fill_batch_metadata_reference(
        prefix_lens, new_lens, table, m.positions, m.slots, m.kv_lens, m.select_lens, m.request_of_row, m.page_table,
        m.num_rows_device, m.index_topk, ids, tails, m.input_ids, m.last_rows,
    )  # fmt: skip


def _words(device: torch.device, address: int, count: int, step: int = 1) -> torch.Tensor:
    """int32 [count] at an address, ``step`` words apart: on ``device``, or in pinned memory that it reads."""
    if not count:
        return torch.empty(0, dtype=torch.int32, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, count, step), device=device)
    memory = (ctypes.c_int32 * ((count - 1) * step + 1)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int32)[::step]


class _Memory:
    """int32 words that a GPU can read, as torch takes them from other libraries."""

    def __init__(self, address: int, count: int, step: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (count,), "strides": (4 * step,), "typestr": "<i4", "version": 2,
        }  # fmt: skip
