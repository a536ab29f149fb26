"""LayerNorm over the last dim: y = (x - mean) / sqrt(var + eps) * weight + bias, in float32, rounded once."""

from __future__ import annotations

import functools
import importlib.util

import torch
import triton
import triton.language as tl

from custom_ops._checks import check_tensor
from custom_ops._register import Provider, define, require
from custom_ops._rows import as_rows, next_power_of_two, require_float

MAX_TRITON_DIM = 16384


@triton.jit
def normalized_rows(
    x: tl.tensor, column_mask: tl.tensor, eps: tl.tensor, columns: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Mean and reciprocal standard deviation, both [ROWS, 1], of a float32 tile that is 0 where masked."""
    mean = (tl.sum(x, 1) / columns)[:, None]
    centred = tl.where(column_mask, x - mean, 0.0)
    variance = (tl.sum(centred * centred, 1) / columns)[:, None]
    return mean, 1.0 / tl.sqrt_rn(variance + eps)


# Elements of a program and of a warp. Wide rows share a read of weight and bias, which are as long as they.
_ELEMENTS = 1024
_WARP_ELEMENTS = 1024
_WIDE = 8192
_WIDE_ELEMENTS = 32768


@triton.jit(do_not_specialize=["num_rows"])
def _layernorm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    mask = (row < num_rows)[:, None] & inside[None, :]
    row = row.to(tl.int64)[:, None]
    tile = tl.load(x + row * row_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mean, rstd = normalized_rows(tile, inside[None, :], eps, columns)
    y = (tile - mean) * rstd * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * columns + column[None, :], y.to(out.dtype.element_ty), mask=mask)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
    require_float("layernorm", "x", x)
    width = x.shape[-1]
    require(width > 0, "layernorm", "x", "at least one element wide", width)
    check_affine("layernorm", x, weight, bias, width)


def check_affine(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, width: int, prefix: str = ""
) -> None:
    """weight and, where given, bias: [width], contiguous, float32 or x's dtype, on x's device.

    prefix: of the two arguments' names.
    """
    # The dispatcher lets None pass for a tensor.
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None or name == "weight":
            check_tensor(op, prefix + name, tensor, (torch.float32, x.dtype), (width,), x.device, contiguous=True)


def layernorm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Plain PyTorch: the specification of ``layernorm``."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    rstd = 1.0 / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    y = centred * rstd * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    columns = x.shape[-1]
    out = x.new_empty(x.shape)
    if x.numel():
        rows = as_rows(x, columns)
        width = next_power_of_two(columns)
        block = max(1, (_WIDE_ELEMENTS if width >= _WIDE else _ELEMENTS) // width)
        _layernorm_kernel[(triton.cdiv(rows.shape[0], block),)](
            rows, weight, bias, out, rows.stride(0), rows.shape[0], columns, eps,
            HAS_BIAS=bias is not None, ROWS=block, WIDTH=width,
            num_warps=min(16, max(1, block * width // _WARP_ELEMENTS)), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _triton_supports(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> str | None:
    return None if x.shape[-1] <= MAX_TRITON_DIM else f"rows wider than {MAX_TRITON_DIM}"


@functools.cache
def _flashinfer_missing() -> str | None:
    return None if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"


def _flashinfer_supports(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> str | None:
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.numel() == 0:
        return "takes bfloat16 rows on a CUDA device"
    if bias is None or weight.dtype != torch.float32 or bias.dtype != torch.float32:
        return "takes a float32 weight and a float32 bias"
    return None


def _flashinfer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    from flashinfer.norm import layernorm as flashinfer_layernorm

    rows = as_rows(x, x.shape[-1]).contiguous()
    return flashinfer_layernorm(rows, weight, bias, eps).view(x.shape)


define(
    "layernorm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    reference=layernorm_reference,
    fake=_fake,
    check=_check,
    providers={
        "triton": Provider(_triton, supports=_triton_supports),
        "flashinfer": Provider(_flashinfer, supports=_flashinfer_supports, missing=_flashinfer_missing),
    },
    preference=("triton", "flashinfer"),
)

KERNELS = [
    (
        _layernorm_kernel,
        {
            "x": "*bf16", "weight": "*fp32", "bias": "*fp32", "out": "*bf16", "row_stride": "i32",
            "num_rows": "i32", "columns": "i32", "eps": "fp32",
        },
        {"HAS_BIAS": True, "ROWS": rows, "WIDTH": width, "num_warps": warps},
    )
    for rows, width, warps in ((8, 128, 1), (4, 8192, 16))
]  # fmt: skip


def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dim.

    x: [..., n], bfloat16, float16 or float32, any strides.
    weight, bias: [n], contiguous, float32 or x's dtype; bias may be None. eps: added to the variance.
    Returns a contiguous tensor of x's shape and dtype; computed in float32 and rounded once.
    Raises ValueError for another dtype, shape or device.
    """
    return torch.ops.sparse_pcg.layernorm(x, weight, bias, eps)
