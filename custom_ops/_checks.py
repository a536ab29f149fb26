"""Argument checks shared by the operators: cheap, on the host, no read of device memory."""

from __future__ import annotations

from typing import Any

import torch

from custom_ops._register import debug_checks_on, require
from custom_ops.batch_metadata import PAGE

E4M3 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_tensor(
    op: str,
    name: str,
    tensor: Any,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Raise ValueError naming ``op`` and ``name`` unless the tensor fits.

    shape: one entry a dimension; None matches any size. device: None matches any.
    contiguous: the kernels index it as packed memory.
    """
    require(isinstance(tensor, torch.Tensor), op, name, "a tensor", type(tensor).__name__)
    accepted = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in accepted:
        require(False, op, name, f"of dtype {' or '.join(map(str, accepted))}", tensor.dtype)
    given = tensor.shape
    if len(given) != len(shape) or any(w is not None and g != w for g, w in zip(given, shape, strict=True)):
        expected = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        require(False, op, name, f"of shape {expected}", list(given))
    if device is not None and tensor.device != device:
        require(False, op, name, f"on {device}", tensor.device)
    if contiguous and not tensor.is_contiguous():
        require(False, op, name, "contiguous", f"strides {tensor.stride()}")


def check_range(op: str, name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """Under ``debug_checks()``: raise ValueError unless every value is in [low, high). Reads the device."""
    if debug_checks_on() and tensor.numel():
        smallest, largest = int(tensor.min()), int(tensor.max())
        require(
            low <= smallest and largest < high, op, name, f"in [{low}, {high})", f"{smallest} .. {largest}"
        )


def check_table(op: str, page_table: torch.Tensor, device: torch.device) -> None:
    """page_table: int32 [requests, pages] on ``device``, a request's pages side by side."""
    check_tensor(op, "page_table", page_table, torch.int32, (None, None), device)
    strides = page_table.stride()
    require(strides[1] == 1 or page_table.shape[1] <= 1, op, "page_table", "contiguous along pages", strides)


def check_used_pages(
    op: str, page_table: torch.Tensor, request_of_row: torch.Tensor, kv_lens: torch.Tensor, pages: int
) -> None:
    """Under ``debug_checks()``: raise ValueError unless the entries that rows use are in [0, pages).

    request_of_row, kv_lens: int32 [T], of each row, within the table. Reads the device.
    """
    if debug_checks_on() and kv_lens.numel() and page_table.numel():
        longest = kv_lens.new_zeros(page_table.shape[0])
        longest.scatter_reduce_(0, request_of_row.long(), kv_lens, "amax")
        first = torch.arange(page_table.shape[1], device=page_table.device) * PAGE
        check_range(op, "page_table", page_table[first < longest.unsqueeze(1)], 0, pages)
