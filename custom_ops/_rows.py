"""Checks and views shared by the operators that treat their input as rows."""

from __future__ import annotations

import torch

from custom_ops._checks import FLOATS
from custom_ops._register import require


def require_float(op: str, name: str, x: torch.Tensor) -> None:
    """bfloat16, float16 or float32, at least one dimension."""
    require(x.dtype in FLOATS, op, name, "bfloat16, float16 or float32", x.dtype)
    require(x.dim() > 0, op, name, "of at least one dimension", "a scalar")


def as_rows(x: torch.Tensor, n: int) -> torch.Tensor:
    """``x`` as [rows, n] with unit stride in the last dim: a view where the strides allow it, else a copy."""
    rows = x.reshape(-1, n)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied if its last dim does not have unit stride: the kernels take any stride in the others."""
    return x if x.stride(-1) == 1 else x.contiguous()


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()
