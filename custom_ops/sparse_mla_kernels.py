"""Triton kernels of ``sparse_mla``.

A row's tokens are taken in chunks of a fixed length; each chunk starts from an empty softmax state and the states
are merged in order. So it does not matter who computes a chunk: with many rows one program takes all chunks of a
row, with few rows each chunk has a program of its own and a second kernel merges them, and the bits are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from custom_ops._checks import E4M3
from custom_ops.mla_cache import LATENT, PACKED_BYTES, ROPE, ROW

_COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_GROUP: tl.constexpr = tl.constexpr(128)


@triton.jit
def _merge(
    peak: tl.tensor,
    total: tl.tensor,
    attended: tl.tensor,
    chunk_peak: tl.tensor,
    chunk_total: tl.tensor,
    chunk_attended: tl.tensor,
    TRANSPOSED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax state of two runs of tokens from that of each; fma by name, so that no compiler chooses."""
    raised = tl.maximum(peak, chunk_peak)
    anchor = tl.where(raised == float("-inf"), 0.0, raised)
    old, new = tl.exp2(peak - anchor), tl.exp2(chunk_peak - anchor)
    total = tl.fma(total, old, chunk_total * new)
    if TRANSPOSED:
        attended = tl.fma(attended, tl.broadcast_to(old[None, :], attended.shape), chunk_attended * new[None, :])
    else:
        attended = tl.fma(attended, tl.broadcast_to(old[:, None], attended.shape), chunk_attended * new[:, None])
    return raised, total, attended


@triton.jit
def _store_row(
    out: tl.tensor,
    attended: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> None:
    dim = tl.arange(0, LATENT_DIM)
    # A division a head, not one an element: a result of 32 bits is off by a last bit for it.
    share = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total == 0.0, 1.0, total))
    if TRANSPOSED:
        target = out + (row * HEADS + head)[None, :] * LATENT_DIM + dim[:, None]
        tl.store(target, (attended * share[None, :]).to(out.dtype.element_ty), mask=(head < HEADS)[None, :])
    else:
        target = out + (row * HEADS + head)[:, None] * LATENT_DIM + dim[None, :]
        tl.store(target, (attended * share[:, None]).to(out.dtype.element_ty), mask=(head < HEADS)[:, None])


@triton.jit
def _partial(
    states: tl.tensor,
    place: tl.tensor,
    HEAD_BLOCK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Pointers to the state of a chunk: [HEAD_BLOCK] peaks, totals, then the sums."""
    head = tl.arange(0, HEAD_BLOCK)
    dim = tl.arange(0, LATENT_DIM)
    base = states + place * (HEAD_BLOCK * (LATENT_DIM + 2))
    sums = base + 2 * HEAD_BLOCK
    if TRANSPOSED:
        return base + head, base + HEAD_BLOCK + head, sums + head[None, :] * LATENT_DIM + dim[:, None]
    else:
        return base + head, base + HEAD_BLOCK + head, sums + head[:, None] * LATENT_DIM + dim[None, :]


@triton.jit(do_not_specialize=["chunks", "chunks_each"])
def _sparse_mla_kernel(
    q: tl.tensor,
    latents: tl.tensor,
    ropes: tl.tensor,
    scales: tl.tensor,
    topk: tl.tensor,
    select_lens: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    sm_scale: tl.tensor,
    k: tl.tensor,
    chunks: tl.tensor,
    chunks_each: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    COMPUTE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A program takes ``chunks_each`` chunks of a row and a block of heads; TOKENS selected tokens at a time.

    latents, ropes, scales: the parts of a cache row, each at its own offset and element type (``parts``).
    SCALE_STRIDE 0: no scales. CHUNK 0: a row is one chunk. TRANSPOSED: tokens and latent dims take the rows of the
    products, where few heads would leave most of a tile empty. Writes ``out``, or with fewer than all ``chunks``
    the softmax state to ``states``.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    part = tl.program_id(2)
    dim = tl.arange(0, LATENT_DIM)
    rope_dim = tl.arange(0, ROPE_DIM)
    length = tl.minimum(tl.load(select_lens + row), k)
    query = q + (row * HEADS + head)[:, None] * (LATENT_DIM + ROPE_DIM)
    present = (head < HEADS)[:, None]
    q_latent = tl.load(query + dim[None, :], mask=present, other=0.0).to(COMPUTE)
    q_rope = tl.load(query + LATENT_DIM + rope_dim[None, :], mask=present, other=0.0).to(COMPUTE)
    scale = sm_scale * 1.4426950408889634  # exp2 instead of exp
    SHAPE_0: tl.constexpr = LATENT_DIM if TRANSPOSED else HEAD_BLOCK
    SHAPE_1: tl.constexpr = HEAD_BLOCK if TRANSPOSED else LATENT_DIM
    HEAD_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    TOKEN_AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    DIM_AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    all_peak = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32)
    all_total = tl.zeros((HEAD_BLOCK,), tl.float32)
    all_attended = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    if CHUNK > 0:
        first = part * chunks_each
        last = tl.minimum(first + chunks_each, tl.cdiv(length, CHUNK))
    else:
        first = part * 0
        last = first + 1
    for chunk in range(first, last):
        peak = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((HEAD_BLOCK,), tl.float32)
        attended = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
        end = tl.minimum((chunk + 1) * CHUNK, length) if CHUNK > 0 else length
        for at in tl.range(chunk * CHUNK, end, TOKENS, num_stages=STAGES):
            token = at + tl.arange(0, TOKENS)
            slot = tl.load(topk + row * k + token, mask=token < length, other=-1)
            slot = tl.where((token == 0) & (slot < 0), 0, slot).to(tl.int64)
            live = slot >= 0
            latent = tl.load(latents + slot[:, None] * LATENT_STRIDE + dim[None, :], mask=live[:, None], other=0.0)
            if SCALE_STRIDE > 0:
                group = tl.arange(0, LATENT_DIM // _GROUP)
                factor = tl.load(
                    scales + slot[:, None] * SCALE_STRIDE + group[None, :], mask=live[:, None], other=0.0
                )
                grouped = tl.reshape(latent.to(tl.float32), (TOKENS, LATENT_DIM // _GROUP, _GROUP))
                latent = tl.reshape(grouped * factor[:, :, None], (TOKENS, LATENT_DIM))
            latent = latent.to(COMPUTE)
            rope = tl.load(ropes + slot[:, None] * ROPE_STRIDE + rope_dim[None, :], mask=live[:, None], other=0.0)
            rope = rope.to(COMPUTE)
            if TRANSPOSED:
                scores = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
                scores = tl.dot(rope, tl.trans(q_rope), acc=scores, input_precision="ieee") * scale
            else:
                scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
                scores = tl.dot(q_rope, tl.trans(rope), acc=scores, input_precision="ieee") * scale
            scores = tl.where(tl.expand_dims(live, HEAD_AXIS), scores, float("-inf"))
            raised = tl.maximum(peak, tl.max(scores, axis=TOKEN_AXIS))
            anchor = tl.where(raised == float("-inf"), 0.0, raised)
            weights = tl.exp2(scores - tl.expand_dims(anchor, TOKEN_AXIS))
            shrink = tl.exp2(peak - anchor)
            total = total * shrink + tl.sum(weights, axis=TOKEN_AXIS)
            attended = attended * tl.expand_dims(shrink, DIM_AXIS)
            if TRANSPOSED:
                attended = tl.dot(tl.trans(latent), weights.to(COMPUTE), acc=attended, input_precision="ieee")
            else:
                attended = tl.dot(weights.to(COMPUTE), latent, acc=attended, input_precision="ieee")
            peak = raised
        if CHUNK > 0:
            all_peak, all_total, all_attended = _merge(
                all_peak, all_total, all_attended, peak, total, attended, TRANSPOSED
            )
        else:
            all_peak, all_total, all_attended = peak, total, attended
    if chunks_each >= chunks:
        _store_row(out, all_attended, all_total, row, head, HEADS, LATENT_DIM, TRANSPOSED)
    elif first < last:
        place = (row * tl.num_programs(1) + tl.program_id(1)) * chunks + part
        peaks, totals, sums = _partial(states, place, HEAD_BLOCK, LATENT_DIM, TRANSPOSED)
        tl.store(peaks, all_peak)
        tl.store(totals, all_total)
        tl.store(sums, all_attended)


@triton.jit(do_not_specialize=["chunks"])
def _merge_kernel(
    states: tl.tensor,
    select_lens: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    chunks: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
) -> None:
    """Merge the states of a row's chunks (a chunk a program of the kernel above) and write the row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    length = tl.minimum(tl.load(select_lens + row), k)
    peak = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_BLOCK,), tl.float32)
    attended = tl.zeros((HEAD_BLOCK, LATENT_DIM), tl.float32)
    for chunk in range(tl.cdiv(length, CHUNK)):
        place = (row * tl.num_programs(1) + tl.program_id(1)) * chunks + chunk
        peaks, totals, sums = _partial(states, place, HEAD_BLOCK, LATENT_DIM, False)
        peak, total, attended = _merge(
            peak, total, attended, tl.load(peaks), tl.load(totals), tl.load(sums), False
        )
    _store_row(out, attended, total, row, head, HEADS, LATENT_DIM, False)


def parts(cache: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent, RoPE and scale columns of a cache as typed views; the stride of each is that of its row."""
    if layout != "fp8_packed":
        return cache[:, :LATENT], cache[:, LATENT:], cache[:, :0]
    ropes = cache.view(torch.bfloat16)[:, (LATENT + 16) // 2 :]
    return cache.view(E4M3)[:, :LATENT], ropes, cache.view(torch.float32)[:, LATENT // 4 : LATENT // 4 + 4]


def tiling(heads: int, compute: torch.dtype, layout: str = "bf16") -> dict[str, Any]:
    """The most heads that share a token's row; float32 tiles take twice the memory.

    A state of 64 heads fills the registers: such rows are one chunk. float8 rows are widened in registers, of which
    fewer tokens leave more.
    """
    if compute == torch.float32:
        return {"HEAD_BLOCK": 16, "TOKENS": 16, "CHUNK": 512, "TRANSPOSED": False, "STAGES": 2, "num_warps": 8}
    if heads <= 16:
        tokens = 64 if layout == "bf16" else 32
        return {"HEAD_BLOCK": 16, "TOKENS": tokens, "CHUNK": 512, "TRANSPOSED": False, "STAGES": 3, "num_warps": 4}
    if heads <= 32 and layout == "bf16":
        return {"HEAD_BLOCK": 32, "TOKENS": 64, "CHUNK": 0, "TRANSPOSED": False, "STAGES": 3, "num_warps": 4}
    block = min(64, triton.next_power_of_2(heads))
    return {"HEAD_BLOCK": block, "TOKENS": 64, "CHUNK": 0, "TRANSPOSED": False, "STAGES": 2, "num_warps": 8}


def compute_dtype(q: torch.Tensor, cache: torch.Tensor) -> torch.dtype:
    """What the products are computed in: q's dtype where the cache's values fit it, else float32."""
    if q.dtype == torch.bfloat16 or (q.dtype == cache.dtype == torch.float16):
        return q.dtype
    return torch.float32


@functools.cache
def _multiprocessors() -> int:
    """Of the GPU; without one a small number, for the interpreter takes both ways."""
    if not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _split_pays(programs: int, chunks: int) -> bool:
    """Whether a program a chunk takes less time than a program a row: turns of one program a multiprocessor.

    The states that the chunks leave take time too, and memory: an eighth less time is wanted, and few rows.
    """
    sms = _multiprocessors()
    whole = chunks * triton.cdiv(programs, sms)
    return programs < 2 * sms and 8 * triton.cdiv(programs * chunks, sms) <= 7 * whole


def launch_sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
    tiles: dict[str, Any] | None = None,
    split: bool | None = None,
) -> None:
    """``sparse_mla`` by Triton; ``tiles`` and ``split`` (a program a chunk, or a row) override what fits the shape."""
    rows, heads = q.shape[:2]
    if rows == 0:
        return
    compute = compute_dtype(q, cache)
    tiles = tiles or tiling(heads, compute, layout)
    latents, ropes, scales = parts(cache, layout)
    blocks = triton.cdiv(heads, tiles["HEAD_BLOCK"])
    k = topk.shape[1]
    chunks = triton.cdiv(k, tiles["CHUNK"]) if tiles["CHUNK"] else 1
    if split is None:
        split = _split_pays(rows * blocks, chunks)
    split = split and chunks > 1
    states = select_lens.view(torch.float32)  # unused: of the type that makes it the same binary
    if split:
        states = q.new_empty(rows * blocks * chunks * tiles["HEAD_BLOCK"] * (LATENT + 2), dtype=torch.float32)
    _sparse_mla_kernel[(rows, blocks, chunks if split else 1)](
        q, latents, ropes, scales, topk, select_lens, out, states, sm_scale, k,
        chunks, 1 if split else chunks,
        HEADS=heads, **tiles, LATENT_DIM=LATENT, ROPE_DIM=ROPE,
        LATENT_STRIDE=latents.stride(0), ROPE_STRIDE=ropes.stride(0),
        SCALE_STRIDE=scales.stride(0) if layout == "fp8_packed" else 0, COMPUTE=_COMPUTE[compute],
    )  # fmt: skip
    if split:
        _merge_kernel[(rows, blocks)](
            states, select_lens, out, k, chunks,
            HEADS=heads, HEAD_BLOCK=tiles["HEAD_BLOCK"], CHUNK=tiles["CHUNK"], LATENT_DIM=LATENT, num_warps=4,
        )  # fmt: skip


_LAYOUTS = {
    "bf16": ("*bf16", "*bf16", "*bf16", (ROW, ROW, 0)),
    "fp8_packed": ("*fp8e4nv", "*bf16", "*fp32", (PACKED_BYTES, PACKED_BYTES // 2, PACKED_BYTES // 4)),
    "fp8": ("*fp8e4nv", "*fp8e4nv", "*fp8e4nv", (ROW, ROW, 0)),
}
KERNELS = [
    *(
        (
            _sparse_mla_kernel,
            {
                "q": "*bf16", "latents": latents, "ropes": ropes, "scales": scales, "topk": "*i32",
                "select_lens": "*i32", "out": "*bf16", "states": "*fp32", "sm_scale": "fp32", "k": "i32",
                "chunks": "i32", "chunks_each": "i32",
            },
            {
                "HEADS": heads, **tiling(heads, torch.bfloat16, layout), "LATENT_DIM": LATENT, "ROPE_DIM": ROPE,
                "LATENT_STRIDE": strides[0], "ROPE_STRIDE": strides[1], "SCALE_STRIDE": strides[2],
                "COMPUTE": tl.bfloat16, "enable_fp_fusion": True,
            },
        )
        for heads in (8, 64)
        for layout, (latents, ropes, scales, strides) in _LAYOUTS.items()
    ),
    (
        _merge_kernel,
        {"states": "*fp32", "select_lens": "*i32", "out": "*bf16", "k": "i32", "chunks": "i32"},
        {"HEADS": 8, "HEAD_BLOCK": 16, "CHUNK": 512, "LATENT_DIM": LATENT, "enable_fp_fusion": True},
    ),
]  # fmt: skip
