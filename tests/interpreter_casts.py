"""Exact float casts, products and fused multiply-adds for Triton's interpreter.

The interpreter truncates float32 -> bfloat16 where a GPU rounds to nearest even, rounds float8 ties up, turns
float8 subnormals into zero, multiplies the bits of bfloat16 matrices as integers and, up to Triton 3.8, rounds
the product of an fma too. With exact ones in their place an interpreted kernel can be compared bitwise.
-x becomes 0 - x, as Triton up to 3.6 compiles it: later ones flip the sign, of zeros too, and kernels have to be
right with either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 arrays, rounded once.

    The product is exact in float64. Of the sum a last bit of 1 stands for what is lost, so that it rounds to float32
    as the whole would.
    """
    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + z)
    part = total - product
    lost = (product - (total - part)) + (z - part)
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    inexact = np.isfinite(lost) & (lost != 0)
    return np.where(inexact & even, odd, total).astype(np.float32)


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

    original_fma = interpreter.InterpreterBuilder.create_fma

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return original_fma(self, x, y, z)
        return interpreter.TensorHandle(fma(x.data, y.data, z.data), tl.float32)

    interpreter.InterpreterBuilder.create_fma = fused
    TritonSemantic.minus = lambda self, x: self.sub(0, x, True)  # type: ignore[method-assign]
