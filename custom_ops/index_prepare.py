"""What the indexer does to a projected key before the scores, in one pass over memory.

LayerNorm, RoPE of the first 64 of 128 dims, Hadamard or not, quantisation, store to the index-K cache.
Where values are rounded to the input's dtype: with ``hadamard`` after each step, as by three separate
operators; without, once, after the rotation, as LayerNorm and RoPE in float32 do together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops import index_keys_cuda
from custom_ops._checks import FLOATS, check_tensor
from custom_ops._register import Provider, define
from custom_ops._rows import unit_stride
from custom_ops.batch_metadata import PAGE
from custom_ops.fp8_quant import magnitude, scale_of_magnitude, to_e4m3
from custom_ops.hadamard import hadamard_reference, hadamard_rows
from custom_ops.index_cache import (
    HEAD_DIM,
    check_pages,
    check_slots,
    index_k_store_reference,
    page_views,
)
from custom_ops.layernorm import check_affine, layernorm_reference, normalized_rows
from custom_ops.rope import apply_rope_reference, check_positions, joined, load_pairs, rotated

ROPE_DIM = 64
HADAMARD_SCALE = HEAD_DIM**-0.5


# Rows and warps of a program without and with the transform, as measured on an H200.
_K_TILES = ((4, 4), (4, 2))


# A row is two tiles of 64: the rotated dims and the others. The last stage of the transform, the scale and the stores
# need no more than the two side by side.
@triton.jit
def finish(
    low: tl.tensor, high: tl.tensor, ROWS: tl.constexpr, HADAMARD: tl.constexpr, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Round to dtype and transform: what follows the rotation in both K and Q."""
    low = low.to(dtype).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    if HADAMARD:
        low, high = hadamard_rows(low, ROWS, 64, 6), hadamard_rows(high, ROWS, 64, 6)
        low, high = (low + high) * 0.08838834764831845, (low - high) * 0.08838834764831845
        low = low.to(dtype).to(tl.float32)
        high = high.to(dtype).to(tl.float32)
    return low, high


@triton.jit
def store_row(
    low: tl.tensor,
    high: tl.tensor,
    q_row: tl.tensor,
    scale_at: tl.tensor,
    mask: tl.tensor,
    ROUND_SCALE: tl.constexpr,
) -> None:
    """Quantise and write 128 elements to the e4m3 row pointers, and their scale; all [ROWS, 1]."""
    largest = tl.max(tl.maximum(magnitude(low), magnitude(high)), 1, keep_dims=True)
    scale = scale_of_magnitude(largest, ROUND_SCALE)
    dim = tl.arange(0, 64)[None, :]
    tl.store(q_row + dim, to_e4m3(low, scale, ROUND_SCALE), mask=mask)
    tl.store(q_row + 64 + dim, to_e4m3(high, scale, ROUND_SCALE), mask=mask)
    tl.store(scale_at, scale, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _k_prepare_kernel(
    k: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    q_pages: tl.tensor,
    scale_pages: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = row < num_rows
    table_row = table + tl.load(positions + row, mask=mask, other=0) * 64
    slot = tl.load(slots + row, mask=mask, other=0)
    source = k + row * row_stride
    dim = tl.arange(0, 128)[None, :]
    always = tl.full((1, 1), 1, tl.int1)
    mean, rstd = normalized_rows(
        tl.load(source + dim, mask=mask, other=0.0).to(tl.float32), dim < 128, eps, 128
    )
    # The row is read again by its parts, from the nearest cache: cheaper than between threads.
    a, b = load_pairs(source, mask, ROWS, 32, 64, INTERLEAVED)
    weight_a, weight_b = load_pairs(weight, always, 1, 32, 64, INTERLEAVED)
    a, b = (a - mean) * rstd * weight_a, (b - mean) * rstd * weight_b
    beyond = 64 + tl.arange(0, 64)[None, :]
    high = tl.load(source + beyond, mask=mask, other=0.0).to(tl.float32)
    high = (high - mean) * rstd * tl.load(weight + beyond).to(tl.float32)
    if HAS_BIAS:
        bias_a, bias_b = load_pairs(bias, always, 1, 32, 64, INTERLEAVED)
        a += bias_a
        b += bias_b
        high += tl.load(bias + beyond).to(tl.float32)
    dtype: tl.constexpr = k.dtype.element_ty
    if HADAMARD:
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    a, b = rotated(a, b, table_row, mask, 32, 64)
    low, high = finish(joined(a, b, ROWS, 32, INTERLEAVED), high, ROWS, HADAMARD, dtype)
    page, token = slot // 64, slot % 64
    q_row, scale_at = q_pages + page * 8448 + token * 128, scale_pages + page * 2112 + 2048 + token
    store_row(low, high, q_row, scale_at, mask, ROUND_SCALE)


def _check_k(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> None:
    op = "index_k_prepare_store"
    check_tensor(op, "k", k, FLOATS, (None, HEAD_DIM))
    check_affine(op, k, weight, bias, HEAD_DIM)
    check_positions(op, k, positions, cos_sin_cache, ROPE_DIM)
    check_pages(op, cache, k.device)
    check_slots(op, slots, k.shape[0], cache.shape[0] * PAGE, k.device)


def index_k_prepare_store_reference(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> None:
    """Plain PyTorch: the specification of ``index_k_prepare_store``."""
    key = layernorm_reference(k if hadamard else k.float(), weight, bias, eps)
    key = apply_rope_reference(key, positions, cos_sin_cache, ROPE_DIM, interleaved).to(k.dtype)
    if hadamard:
        key = hadamard_reference(key, HADAMARD_SCALE)
    index_k_store_reference(key, cache, slots, round_scale)


def _fake_k(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> None:
    return None


def _triton_k(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> None:
    rows = k.shape[0]
    if rows:
        k = unit_stride(k)
        block, warps = _K_TILES[hadamard]
        _k_prepare_kernel[(triton.cdiv(rows, block),)](
            k, weight, bias, positions, cos_sin_cache, *page_views(cache), slots, k.stride(0), rows, eps,
            HAS_BIAS=bias is not None, INTERLEAVED=interleaved, HADAMARD=hadamard, ROUND_SCALE=round_scale,
            ROWS=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


define(
    "index_k_prepare_store(Tensor k, Tensor weight, Tensor? bias, float eps, Tensor positions,"
    " Tensor cos_sin_cache, bool interleaved, bool hadamard, Tensor(a!) cache, Tensor slots,"
    " bool round_scale) -> ()",
    reference=index_k_prepare_store_reference,
    fake=_fake_k,
    check=_check_k,
    providers={
        "triton": Provider(_triton_k),
        "cuda": Provider(index_keys_cuda.launch, index_keys_cuda.refuses, index_keys_cuda.missing),
    },
    preference=("cuda", "triton"),
)
ROUTES = (
    {"INTERLEAVED": False, "HADAMARD": True, "ROUND_SCALE": True},
    {"INTERLEAVED": True, "HADAMARD": False, "ROUND_SCALE": False},
)


def sizes(tile: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("ROWS", "num_warps"), tile, strict=True))


KERNELS = [
    *(
        (
            _k_prepare_kernel,
            {
                "k": "*bf16", "weight": "*fp32", "bias": "*fp32", "positions": "*i64", "table": "*fp32",
                "q_pages": "*fp8e4nv", "scale_pages": "*fp32", "slots": "*i64", "row_stride": "i32",
                "num_rows": "i32", "eps": "fp32",
            },
            {"HAS_BIAS": True, **sizes(_K_TILES[route["HADAMARD"]]), **route},
        )
        for route in ROUTES
    ),
]  # fmt: skip


def index_k_prepare_store(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> None:
    """LayerNorm, RoPE of the first 64 dims, Hadamard if asked for, quantise and store: the indexer's key.

    k: [T, 128], bfloat16, float16 or float32, any strides. weight, bias, eps: as for ``layernorm``.
    positions, cos_sin_cache, interleaved: as for ``apply_rope`` with rope_dim 64.
    hadamard: transform with scale 128 ** -0.5, rounding to k's dtype after each step; without it the
    result is rounded to k's dtype once, before quantisation.
    cache, slots, round_scale: as for ``index_k_store``; the cache is written in place.
    Raises ValueError for another dtype, shape, page size or device, before anything is written; positions and
    slots are checked under ``debug_checks``.
    """
    return torch.ops.sparse_pcg.index_k_prepare_store(
        k, weight, bias, eps, positions, cos_sin_cache, interleaved, hadamard, cache, slots, round_scale
    )
