"""Absorbed MLA over selected tokens: out[t, h] = softmax over s of (q[t, h] . kv[s] * sm_scale) @
kv[s][:512].

s runs over the slots topk[t, :select_lens[t]]; kv[s] is a row of the latent KV cache: 512 latent dims, then
64 RoPE dims. Layouts of a row: ``bf16`` 576 elements of a floating dtype; ``fp8_packed`` 656 bytes: 512 e4m3,
4 float32 scales (one per 128 dims), 64 bfloat16; ``fp8`` 576 e4m3 of scale 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops import vendor
from custom_ops._checks import E4M3, FLOATS, check_range, check_tensor
from custom_ops._register import Provider, define, require

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
PACKED_BYTES = LATENT + 4 * 4 + ROPE * 2
GROUP = 128
LAYOUTS = ("bf16", "fp8_packed", "fp8")


_COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_GROUP: tl.constexpr = tl.constexpr(128)


@triton.jit
def _sparse_mla_kernel(
    q: tl.tensor,
    latents: tl.tensor,
    ropes: tl.tensor,
    scales: tl.tensor,
    topk: tl.tensor,
    select_lens: tl.tensor,
    out: tl.tensor,
    sm_scale: tl.tensor,
    k: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """One program a row and block of heads; online softmax over TOKENS selected tokens at a time.

    latents, ropes, scales: the parts of a cache row, each at its own offset and element type (``_parts``).
    SCALE_STRIDE 0: no scales.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    dim = tl.arange(0, LATENT_DIM)
    rope_dim = tl.arange(0, ROPE_DIM)
    length = tl.minimum(tl.load(select_lens + row), k)
    query = q + (row * HEADS + head)[:, None] * (LATENT_DIM + ROPE_DIM)
    present = (head < HEADS)[:, None]
    q_latent = tl.load(query + dim[None, :], mask=present, other=0.0).to(COMPUTE)
    q_rope = tl.load(query + LATENT_DIM + rope_dim[None, :], mask=present, other=0.0).to(COMPUTE)
    scale = sm_scale * 1.4426950408889634  # exp2 instead of exp
    peak = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_BLOCK,), tl.float32)
    attended = tl.zeros((HEAD_BLOCK, LATENT_DIM), tl.float32)
    for at in range(0, length, TOKENS):
        token = at + tl.arange(0, TOKENS)
        slot = tl.load(topk + row * k + token, mask=token < length, other=-1)
        slot = tl.where((token == 0) & (slot < 0), 0, slot).to(tl.int64)
        live = slot >= 0
        latent = tl.load(
            latents + slot[:, None] * LATENT_STRIDE + dim[None, :], mask=live[:, None], other=0.0
        )
        if SCALE_STRIDE > 0:
            group = tl.arange(0, LATENT_DIM // _GROUP)
            factor = tl.load(
                scales + slot[:, None] * SCALE_STRIDE + group[None, :], mask=live[:, None], other=0.0
            )
            grouped = tl.reshape(latent.to(tl.float32), (TOKENS, LATENT_DIM // _GROUP, _GROUP))
            latent = tl.reshape(grouped * factor[:, :, None], (TOKENS, LATENT_DIM))
        latent = latent.to(COMPUTE)
        rope = tl.load(ropes + slot[:, None] * ROPE_STRIDE + rope_dim[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope.to(COMPUTE)), acc=scores, input_precision="ieee") * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(peak - anchor)
        total = total * shrink + tl.sum(weights, axis=1)
        attended = tl.dot(weights.to(COMPUTE), latent, acc=attended * shrink[:, None], input_precision="ieee")
        peak = raised
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (row * HEADS + head)[:, None] * LATENT_DIM + dim[None, :]
    tl.store(target, attended.to(out.dtype.element_ty), mask=present)


def _parts(cache: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent, RoPE and scale columns of a cache as typed views; the stride of each is that of its row."""
    if layout != "fp8_packed":
        return cache[:, :LATENT], cache[:, LATENT:], cache[:, :0]
    ropes = cache.view(torch.bfloat16)[:, (LATENT + 16) // 2 :]
    return cache.view(E4M3)[:, :LATENT], ropes, cache.view(torch.float32)[:, LATENT // 4 : LATENT // 4 + 4]


def _tiling(heads: int, compute: torch.dtype) -> dict[str, int]:
    """The most heads that share a token's row; float32 tiles take twice the memory."""
    if compute == torch.float32:
        return {"HEAD_BLOCK": 16, "TOKENS": 16}
    return {"HEAD_BLOCK": min(64, max(16, triton.next_power_of_2(heads))), "TOKENS": 32}


def _compute_dtype(q: torch.Tensor, cache: torch.Tensor, layout: str) -> torch.dtype:
    """What the products are computed in: q's dtype where the cache's values fit it, else float32."""
    if q.dtype == torch.bfloat16 or (q.dtype == cache.dtype == torch.float16):
        return q.dtype
    return torch.float32


def _triton(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    rows, heads = q.shape[:2]
    if rows == 0:
        return
    compute = _compute_dtype(q, cache, layout)
    tiling = _tiling(heads, compute)
    latents, ropes, scales = _parts(cache, layout)
    _sparse_mla_kernel[(rows, triton.cdiv(heads, tiling["HEAD_BLOCK"]))](
        q,
        latents,
        ropes,
        scales,
        topk,
        select_lens,
        out,
        sm_scale,
        topk.shape[1],
        HEADS=heads,
        **tiling,
        LATENT_DIM=LATENT,
        ROPE_DIM=ROPE,
        LATENT_STRIDE=latents.stride(0),
        ROPE_STRIDE=ropes.stride(0),
        SCALE_STRIDE=scales.stride(0) if layout == "fp8_packed" else 0,
        COMPUTE=_COMPUTE[compute],
        num_warps=8,
    )


def load_latent_rows(cache: torch.Tensor, slots: torch.Tensor, layout: str, into: torch.Tensor) -> None:
    """Dequantise rows ``slots`` (int64 [n]) of a latent KV cache into ``into``, float32 [n, 576]."""
    if layout == "bf16":
        into.copy_(cache.index_select(0, slots))
        return
    rows = cache.view(torch.uint8).index_select(0, slots)
    if layout == "fp8":
        into.copy_(rows.view(E4M3))
        return
    scales = rows[:, LATENT : LATENT + 16].contiguous().view(torch.float32)
    into[:, :LATENT] = rows[:, :LATENT].view(E4M3)
    into[:, :LATENT].unflatten(1, (-1, GROUP)).mul_(scales.unsqueeze(2))
    into[:, LATENT:] = rows[:, LATENT + 16 :].contiguous().view(torch.bfloat16)


def sparse_mla_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    """The specification, any device (reads the lengths on the host).

    Row by row: a row costs what it selects, and its result cannot depend on the other rows or their number.
    """
    scratch = torch.empty(topk.shape[1], ROW, dtype=torch.float32, device=q.device)
    queries, chosen = q.float(), topk.long()
    chosen[:, 0].clamp_(min=0)
    for row, length in enumerate(select_lens.tolist()):
        slots = chosen[row, :length]
        slots = slots[slots >= 0]
        kv = scratch[: slots.shape[0]]
        load_latent_rows(cache, slots, layout, kv)
        weights = torch.softmax((queries[row] @ kv.T) * sm_scale, dim=-1)
        out[row] = weights @ kv[:, :LATENT]


def _check(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    op = "sparse_mla"
    require(layout in LAYOUTS, op, "layout", f"one of {LAYOUTS}", repr(layout))
    check_tensor(op, "q", q, FLOATS, (None, None, ROW), contiguous=True)
    rows, heads = q.shape[:2]
    require(1 <= heads <= 128, op, "q", "of 1 to 128 heads", heads)
    dtypes = {"bf16": FLOATS, "fp8_packed": (torch.uint8,), "fp8": (E4M3,)}[layout]
    width = PACKED_BYTES if layout == "fp8_packed" else ROW
    check_tensor(op, "cache", cache, dtypes, (None, width), q.device, contiguous=True)
    check_tensor(op, "topk", topk, torch.int32, (rows, None), q.device, contiguous=True)
    require(topk.shape[1] >= 1, op, "topk", "of at least 1 column", list(topk.shape))
    check_tensor(op, "select_lens", select_lens, torch.int32, (rows,), q.device, contiguous=True)
    check_tensor(op, "out", out, q.dtype, (rows, heads, LATENT), q.device, contiguous=True)
    check_range(op, "topk", topk, -1, cache.shape[0])
    check_range(op, "select_lens", select_lens, 0, topk.shape[1] + 1)


def _fake(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    return None


SPARSE_MLA = define(
    "sparse_mla(Tensor q, Tensor cache, Tensor topk, Tensor select_lens, Tensor(a!) out, float sm_scale,"
    " str layout) -> ()",
    reference=sparse_mla_reference,
    fake=_fake,
    check=_check,
    providers={
        "triton": Provider(_triton),
        "flash_mla": Provider(vendor.flash_mla, vendor.flash_mla_supports, vendor.flash_mla_missing),
    },
    preference=("flash_mla", "triton"),
)


_SIGNATURES = {
    "bf16": ("*bf16", "*bf16", "*bf16", (ROW, ROW, 0)),
    "fp8_packed": ("*fp8e4nv", "*bf16", "*fp32", (PACKED_BYTES, PACKED_BYTES // 2, PACKED_BYTES // 4)),
    "fp8": ("*fp8e4nv", "*fp8e4nv", "*fp8e4nv", (ROW, ROW, 0)),
}
KERNELS = [
    (
        _sparse_mla_kernel,
        {
            "q": "*bf16",
            "latents": latents,
            "ropes": ropes,
            "scales": scales,
            "topk": "*i32",
            "select_lens": "*i32",
            "out": "*bf16",
            "sm_scale": "fp32",
            "k": "i32",
        },
        {
            "HEADS": heads,
            **_tiling(heads, torch.bfloat16),
            "LATENT_DIM": LATENT,
            "ROPE_DIM": ROPE,
            "LATENT_STRIDE": strides[0],
            "ROPE_STRIDE": strides[1],
            "SCALE_STRIDE": strides[2],
            "COMPUTE": tl.bfloat16,
            "num_warps": 8,
        },
    )
    for heads in (8, 64)
    for latents, ropes, scales, strides in _SIGNATURES.values()
]


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    """Absorbed multi-head latent attention over the selected slots of the latent KV cache.

    q: [T, H, 576] bfloat16, float16 or float32, H up to 128: 512 dims multiplied into the latent space, then
    64 with RoPE. cache: [slots, 576] floating (``layout="bf16"``), uint8 [slots, 656] (``"fp8_packed"``) or
    float8_e4m3fn [slots, 576] (``"fp8"``). topk: int32 [T, k] slots. select_lens: int32 [T], how many of a
    row's k to attend; time follows it. out: [T, H, 512] of q's dtype, written. sm_scale: factor on
    the scores.
    A -1 within the length is skipped; in a row's first place it reads slot 0, so a row that selects nothing
    (a pad row) attends the dummy slot. Length 0 gives zeros. Softmax in float32; the reduction order of a row
    depends on neither the other rows nor their number.
    Raises ValueError naming the argument for a wrong dtype, shape, stride, layout or device; with
    ``debug_checks()`` also for slots outside the cache.
    """
    return torch.ops.sparse_pcg.sparse_mla(q, cache, topk, select_lens, out, sm_scale, layout)
