"""Exact float casts and products for Triton's interpreter.

The interpreter truncates float32 -> bfloat16 where a GPU rounds to nearest even, rounds float8 ties up, turns
float8 subnormals into zero and multiplies the bits of bfloat16 matrices as integers. With PyTorch's casts in
their place an interpreted kernel can be compared bitwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def repair() -> None:
    """Replace the interpreter's cast for the types above; a second call does nothing."""
    original = interpreter._convert_float
    if getattr(original, "repaired", False):
        return

    def convert(array: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if source.name not in _TORCH or target.name not in _TORCH:
            return original(array, source, target, rounding_mode)
        unsigned = [np.dtype(f"u{t.primitive_bitwidth // 8}") for t in (source, target)]
        signed = np.ascontiguousarray(array).reshape(-1).view(unsigned[0]).view(f"i{unsigned[0].itemsize}")
        values = torch.from_numpy(signed.copy()).view(_TORCH[source.name]).float()
        if target.name.startswith("fp8"):  # a GPU saturates
            values = values.clamp(-torch.finfo(_TORCH[target.name]).max, torch.finfo(_TORCH[target.name]).max)
        cast = values.to(_TORCH[target.name]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
        return cast.numpy().view(unsigned[1]).reshape(array.shape)

    convert.repaired = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert

    original_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return original_dot(self, a, b, d, *rest)

    interpreter.InterpreterBuilder.create_dot = dot
