"""Absorbed MLA over selected tokens: out[t, h] = softmax over s of (q[t, h] . kv[s] * sm_scale) @
kv[s][:512].

s runs over the slots topk[t, :select_lens[t]]; kv[s] is a row of the latent KV cache: 512 latent dims, then
64 RoPE dims. Layouts of a row: ``bf16`` 576 elements of a floating dtype; ``fp8_packed`` 656 bytes: 512 e4m3,
4 float32 scales (one per 128 dims), 64 bfloat16; ``fp8`` 576 e4m3 of scale 1.
"""

from __future__ import annotations

import torch

from custom_ops import sparse_mla_cuda, trtllm_mla, vendor
from custom_ops._checks import E4M3, FLOATS, check_range, check_tensor
from custom_ops._register import Provider, define, require
from custom_ops.mla_cache import LATENT, LAYOUTS, PACKED_BYTES, ROPE, ROW
from custom_ops.sparse_mla_kernels import launch_sparse_mla

__all__ = ["LATENT", "ROPE", "ROW", "sparse_mla"]
GROUP = 128


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
        "triton": Provider(launch_sparse_mla),
        "cuda": Provider(
            sparse_mla_cuda.launch, sparse_mla_cuda.refuses, sparse_mla_cuda.missing, sparse_mla_cuda.slower
        ),
        "flash_mla": Provider(
            vendor.flash_mla, vendor.flash_mla_supports, vendor.flash_mla_missing, vendor.flash_mla_slower
        ),
        "trtllm": Provider(
            trtllm_mla.run, trtllm_mla.supports, trtllm_mla.missing, row_regime=trtllm_mla.row_regime
        ),
    },
    preference=("cuda", "flash_mla", "trtllm", "triton"),
    rows=("q", "topk", "select_lens", "out"),
)


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
    depends on the provider, which may be another for few rows than for many, and on nothing else outside the row.
    Raises ValueError naming the argument for a wrong dtype, shape, stride, layout or device; with
    ``debug_checks()`` also for slots outside the cache.
    """
    return torch.ops.sparse_pcg.sparse_mla(q, cache, topk, select_lens, out, sm_scale, layout)
