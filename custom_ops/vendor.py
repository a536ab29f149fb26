"""Faster kernels of other packages: DeepGEMM (logits), FlashMLA (sparse prefill), FlashInfer (top-k).

Each is imported on first use and is absent without harm. Where a package needs another shape than the op's,
it is padded here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

FLASH_MLA_HEADS = 64
FLASH_MLA_TOPK = 128
# Rows and heads up to which Triton is faster (H200, 2048 selected tokens: 45 us to 70 with 16 rows of 8 heads).
# Of 100 it is the other way, 17.5 to 15.8 with a row and 16.8 to 20.5 with 128; how many they are no host knows.
_FEW_ROWS, _FEW_HEADS = 32, 16


@functools.cache
def _arch() -> int:
    """Major compute capability of the GPU, 0 without one."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


@functools.cache
def _module(name: str) -> ModuleType | str:
    """The module, or the reason why there is none."""
    if _arch() not in (9, 10):
        return f"needs an sm_90 or sm_100 GPU, {f'this is sm_{_arch()}x' if _arch() else 'there is none'}"
    try:
        return importlib.import_module(name)
    except Exception as error:  # an extension built for another CUDA fails in many ways
        return f"{name} cannot be imported: {error}"


def _lacks(module: str, function: str) -> str | None:
    found = _module(module)
    if isinstance(found, str):
        return found
    return None if hasattr(found, function) else f"{module} has no {function}"


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(_module(module), function)(*args, **kwargs)


# --- DeepGEMM -----------------------------------------------------------------------------------------------


def deep_gemm_missing() -> str | None:
    """Why DeepGEMM's ragged logits cannot run here."""
    return _lacks("deep_gemm", "fp8_mqa_logits")


def deep_gemm_supports(q_fp8: torch.Tensor, *rest: Any) -> str | None:
    """Why DeepGEMM does not take this number of heads."""
    heads = q_fp8.shape[1]
    accepted = (32, 64) if _arch() == 9 else (8, 16, 32, 64)
    return None if heads in accepted else f"DeepGEMM takes {accepted} heads here, not {heads}"


def deep_gemm_logits(
    q_fp8: torch.Tensor,
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    compressed_width: int | None = None,
) -> torch.Tensor:
    """Logits with a padded row stride; with ``compressed_width`` column c of row t is token starts[t] + c."""
    compressed = {} if compressed_width is None else {"max_seqlen_k": compressed_width}
    return _call(
        "deep_gemm", "fp8_mqa_logits", q_fp8, (k_fp8, k_scale), weights.flatten(1), starts, ends,
        clean_logits=False, **compressed,
    )  # fmt: skip


# --- FlashMLA -----------------------------------------------------------------------------------------------


def flash_mla_missing() -> str | None:
    """Why FlashMLA's sparse prefill cannot run here."""
    return _lacks("flash_mla", "flash_mla_sparse_fwd")


def flash_mla_supports(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> str | None:
    """It reads bfloat16 rows only."""
    if layout != "bf16" or q.dtype != torch.bfloat16 or cache.dtype != torch.bfloat16:
        return "FlashMLA sparse prefill takes bfloat16 queries and a bfloat16 cache"
    return None


def flash_mla_slower(q: torch.Tensor, *rest: Any) -> str | None:
    """Than Triton, where CUDA C++ does not serve: it has no program for a part of a row's tokens."""
    rows, heads = q.shape[:2]
    if _arch() == 9 and rows <= _FEW_ROWS and heads <= _FEW_HEADS:
        return f"{rows} rows of {heads} heads take less time with a program a chunk of tokens"
    return None


@triton.jit
def _flash_mla_inputs_kernel(
    q: tl.tensor,
    topk: tl.tensor,
    select_lens: tl.tensor,
    queries: tl.tensor,
    indices: tl.tensor,
    k: tl.tensor,
    padded_k: tl.tensor,
    COPY_Q: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
) -> None:
    """A program a row: its queries, and its slots with 0 for a -1 in the first place and -1 beyond k.

    Of the slots only those up to a row's length, rounded up to GRAIN: FlashMLA reads no others.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    end = tl.minimum(tl.cdiv(tl.maximum(tl.load(select_lens + row), 1), GRAIN) * GRAIN, padded_k)
    for begin in range(0, end, BLOCK):
        place = begin + at
        slot = tl.load(topk + row * k + place, mask=place < k, other=-1)
        slot = tl.where((place == 0) & (slot < 0), 0, slot)
        tl.store(indices + row * padded_k + place, slot, mask=place < end)
    if COPY_Q:
        for begin in range(0, ROW, BLOCK):
            place = begin + at
            element = tl.load(q + row * ROW + place, mask=place < ROW)
            tl.store(queries + row * ROW + place, element, mask=place < ROW)


KERNELS = [
    (
        _flash_mla_inputs_kernel,
        {
            "q": "*bf16", "topk": "*i32", "select_lens": "*i32", "queries": "*bf16", "indices": "*i32", "k": "i32",
            "padded_k": "i32",
        },
        {"COPY_Q": True, "ROW": 8 * 576, "BLOCK": 1024, "GRAIN": FLASH_MLA_TOPK},
    )
]  # fmt: skip


def _flash_mla_inputs(
    q: torch.Tensor, topk: torch.Tensor, select_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q with 64 or 128 heads and topk [T, 1, a multiple of 128], by one launch.

    The heads that q lacks are those of the rows behind it: heads do not mix, and nothing is written for them.
    """
    rows, heads, width = q.shape
    few = heads <= FLASH_MLA_HEADS and _arch() == 9
    padded_heads = FLASH_MLA_HEADS if few else 2 * FLASH_MLA_HEADS
    k = topk.shape[1]
    padded_k = -(-k // FLASH_MLA_TOPK) * FLASH_MLA_TOPK
    indices = topk.new_empty(rows, 1, padded_k)
    queries = q
    if heads != padded_heads:
        queries = q.new_empty(rows * heads + padded_heads - heads, width)
        queries = queries.as_strided((rows, padded_heads, width), (heads * width, width, 1))
    _flash_mla_inputs_kernel[(rows,)](
        q, topk, select_lens, queries, indices, k, padded_k,
        COPY_Q=heads != padded_heads, ROW=heads * width, BLOCK=1024, GRAIN=FLASH_MLA_TOPK, num_warps=4,
    )  # fmt: skip
    return queries, indices


@functools.cache
def _flash_mla_options(arch: int, forward: Any) -> dict[str, Any]:
    """The kernels for Hopper are those called legacy; the statistics are left out where the version can."""
    options: dict[str, Any] = {"use_legacy": True} if arch == 9 else {}
    if "return_log2_lse" in inspect.signature(forward).parameters:
        options["return_log2_lse"] = False
    return options


def flash_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    """``sparse_mla`` by ``flash_mla_sparse_fwd``: heads padded to 64 or 128, k to a multiple of 128."""
    if q.shape[0] == 0:
        return
    queries, indices = _flash_mla_inputs(q, topk, select_lens)
    forward = getattr(_module("flash_mla"), "flash_mla_sparse_fwd")  # noqa: B009  (a module or a reason, to mypy)
    result = forward(
        queries, cache.unsqueeze(1), indices, sm_scale,
        d_v=out.shape[2], topk_length=select_lens, **_flash_mla_options(_arch(), forward),
    )  # fmt: skip
    # The heads of a row are one run of memory: wider elements, fewer instructions.
    out.view(torch.int64).copy_(result[0].view(torch.int64)[:, : q.shape[1]])


# --- FlashInfer ---------------------------------------------------------------------------------------------


def flashinfer_missing() -> str | None:
    """Why FlashInfer's top-k cannot run here."""
    return _lacks("flashinfer", "top_k_ragged_transform")


def flashinfer_topk(
    logits: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, k: int
) -> torch.Tensor:
    """``topk_indices`` by ``top_k_ragged_transform``: the exact set, the lowest position of ties, in its own
    order.

    It ranks by bits, -0 below +0 and NaN by its sign, so it is never chosen unasked.
    """
    return _call(
        "flashinfer", "top_k_ragged_transform", logits, torch.zeros_like(starts), lengths, k,
        deterministic=True, tie_break=1, row_starts=starts,
    )  # fmt: skip


def rope_quantize_missing() -> str | None:
    """Why FlashInfer's RoPE with quantisation cannot run here."""
    return _lacks("flashinfer.rope", "mla_rope_quantize_fp8")


def rope_quantize_supports(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> str | None:
    """It writes unscaled float8."""
    if layout != "fp8" or k_nope.dtype not in (torch.bfloat16, torch.float16) or not k_nope.shape[0]:
        return "takes rows of bfloat16 or float16 and the layout fp8"
    return None


def rope_quantize_store(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> None:
    """``mla_rope_kv_store`` by ``mla_rope_quantize_fp8`` and a scatter; the key stands in for the query it also wants.

    The quantisation alone takes as long as the own kernel with its store: never chosen unasked.
    """
    k_nope, k_rope = k_nope.contiguous(), k_rope.contiguous()
    _, rotated, _, latent = _call(
        "flashinfer.rope", "mla_rope_quantize_fp8", k_rope.unsqueeze(1), k_rope, k_nope.unsqueeze(1), k_nope,
        cos_sin_cache, positions, is_neox=not interleaved, quantize_dtype=cache.dtype,
    )  # fmt: skip
    cache.view(torch.uint8)[slots] = torch.cat((latent, rotated), 1).view(torch.uint8)
