"""Argument checks and views shared by the row-wise operators."""

from __future__ import annotations

import torch

from custom_ops._register import require

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def require_float(op: str, argument: str, x: torch.Tensor) -> None:
    """bfloat16, float16 or float32."""
    require(x.dtype in FLOATS, op, argument, "bfloat16, float16 or float32", x.dtype)


def require_dtype(op: str, argument: str, x: torch.Tensor, *dtypes: torch.dtype) -> None:
    """One of ``dtypes``."""
    require(x.dtype in dtypes, op, argument, " or ".join(str(d) for d in dtypes), x.dtype)


def require_shape(op: str, argument: str, x: torch.Tensor, *shape: int) -> None:
    """Exactly ``shape``; -1 stands for any size."""
    fits = x.dim() == len(shape) and all(want in (-1, got) for want, got in zip(shape, x.shape, strict=True))
    wanted = ", ".join("*" if n == -1 else str(n) for n in shape)
    require(fits, op, argument, f"of shape [{wanted}]", list(x.shape))


def require_device(op: str, reference: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Every given tensor on the device of ``reference``."""
    for argument, tensor in others.items():
        if tensor is not None:
            require(tensor.device == reference.device, op, argument, f"on {reference.device}", tensor.device)


def require_rows_below(op: str, argument: str, index: torch.Tensor, bound: int) -> None:
    """Values in [0, bound). Reads the device: for ``debug_checks`` only."""
    if index.numel():
        low, high = (int(v) for v in torch.aminmax(index))
        require(low >= 0 and high < bound, op, argument, f"within [0, {bound})", f"{low} .. {high}")


def as_rows(x: torch.Tensor, n: int) -> torch.Tensor:
    """``x`` as [rows, n] with unit stride in the last dim: a view where the strides allow it, else a copy."""
    rows = x.reshape(-1, n) if n else x.new_empty(0, 0)
    return rows if rows.stride(1) == 1 or n == 1 else rows.contiguous()


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= max(n, 1)."""
    return 1 << max(n - 1, 0).bit_length()
