"""What the indexer does to a projected query before the scores, in one pass over memory: RoPE of the first 64 of 128
dims, Hadamard or not, quantisation. Values are rounded to the input's dtype after each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops import index_queries_cuda
from custom_ops._checks import FLOATS, check_tensor
from custom_ops._register import Provider, define
from custom_ops._rows import unit_stride
from custom_ops.fp8_quant import quant_fp8_reference
from custom_ops.hadamard import hadamard_reference
from custom_ops.index_cache import HEAD_DIM
from custom_ops.index_prepare import HADAMARD_SCALE, ROPE_DIM, ROUTES, finish, sizes, store_row
from custom_ops.rope import apply_rope_reference, check_positions, joined, load_pairs, rotated

# Rows and warps of a program without and with the transform, as measured on an H200. Transformed rows pass between
# threads again and again: fewer warps wait less.
_TILES = ((16, 4), (8, 1))


@triton.jit(do_not_specialize=["num_rows"])
def _kernel(
    q: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    q_fp8: tl.tensor,
    q_scale: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_rows: tl.tensor,
    heads: tl.tensor,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = row < num_rows
    token = (row // heads).to(tl.int64)
    source = q + token * token_stride + (row % heads).to(tl.int64) * head_stride
    table_row = table + tl.load(positions + token, mask=mask, other=0) * 64
    a, b = load_pairs(source, mask, ROWS, 32, 64, INTERLEAVED)
    high = tl.load(source + 64 + tl.arange(0, 64)[None, :], mask=mask, other=0.0).to(tl.float32)
    a, b = rotated(a, b, table_row, mask, 32, 64)
    low, high = finish(joined(a, b, ROWS, 32, INTERLEAVED), high, ROWS, HADAMARD, q.dtype.element_ty)
    row = row.to(tl.int64)
    store_row(low, high, q_fp8 + row * 128, q_scale + row, mask, ROUND_SCALE)


def _check(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> None:
    check_tensor("index_q_prepare", "q", q, FLOATS, (None, None, HEAD_DIM))
    check_positions("index_q_prepare", q, positions, cos_sin_cache, ROPE_DIM)


def index_q_prepare_reference(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: the specification of ``index_q_prepare``."""
    q = apply_rope_reference(q, positions, cos_sin_cache, ROPE_DIM, interleaved)
    if hadamard:
        q = hadamard_reference(q, HADAMARD_SCALE)
    return quant_fp8_reference(q, HEAD_DIM, round_scale)


def _fake(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.new_empty((q.shape[0], q.shape[1], 1), dtype=torch.float32)
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), scale


def _triton(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_fp8, q_scale = _fake(q, positions, cos_sin_cache, interleaved, hadamard, round_scale)
    if q.numel():
        q = unit_stride(q)
        rows, heads = q.shape[0] * q.shape[1], q.shape[1]
        block, warps = _TILES[hadamard]
        _kernel[(triton.cdiv(rows, block),)](
            q, positions, cos_sin_cache, q_fp8, q_scale, q.stride(0), q.stride(1), rows, heads,
            INTERLEAVED=interleaved, HADAMARD=hadamard, ROUND_SCALE=round_scale,
            ROWS=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return q_fp8, q_scale


def _cuda(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_fp8, q_scale = _fake(q, positions, cos_sin_cache, interleaved, hadamard, round_scale)
    index_queries_cuda.launch(q_fp8, q_scale, q, positions, cos_sin_cache)
    return q_fp8, q_scale


define(
    "index_q_prepare(Tensor q, Tensor positions, Tensor cos_sin_cache, bool interleaved, bool hadamard,"
    " bool round_scale) -> (Tensor, Tensor)",
    reference=index_q_prepare_reference,
    fake=_fake,
    check=_check,
    providers={
        "cuda": Provider(_cuda, index_queries_cuda.refuses, index_queries_cuda.missing),
        "triton": Provider(_triton),
    },
    preference=("cuda", "triton"),
)

KERNELS = [
    (
        _kernel,
        {
            "q": "*bf16", "positions": "*i64", "table": "*fp32", "q_fp8": "*fp8e4nv", "q_scale": "*fp32",
            "token_stride": "i32", "head_stride": "i32", "num_rows": "i32", "heads": "i32",
        },
        {**sizes(_TILES[route["HADAMARD"]]), **route},
    )
    for route in ROUTES
]  # fmt: skip


def index_q_prepare(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE of the first 64 dims, Hadamard if asked for, and quantise: the indexer's query.

    q: [T, H, 128], bfloat16, float16 or float32, any strides; rounded to its dtype after each step.
    positions, cos_sin_cache, interleaved: as for ``apply_rope`` with rope_dim 64.
    hadamard: transform with scale 128 ** -0.5. round_scale: as for ``quant_fp8``, one block a head.
    Returns (q_fp8, q_scale): float8_e4m3fn [T, H, 128] and float32 [T, H, 1], contiguous.
    Raises ValueError for another dtype, shape or device; positions are checked under ``debug_checks``.
    """
    return torch.ops.sparse_pcg.index_q_prepare(
        q, positions, cos_sin_cache, interleaved, hadamard, round_scale
    )
