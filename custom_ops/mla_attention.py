"""The whole attention of an MLA layer as one composite: k_b bmm, RoPE, KV store, sparse MLA, v_b bmm."""

from __future__ import annotations

from typing import Any

import torch

from custom_ops._checks import FLOATS, check_tensor
from custom_ops._register import define
from custom_ops.batch_metadata import ContextBind, current_context
from custom_ops.sparse_mla import LATENT, ROPE


def _decompose(
    bind: Any,
    layer_id: int,
    q_nope: Any,
    q_rope: Any,
    k_nope: Any,
    k_rope: Any,
    w_kc: Any,
    w_vc: Any,
    positions: Any,
    cos_sin_cache: Any,
    interleaved: bool,
    topk: Any,
    sm_scale: float,
    out: Any,
) -> None:
    ops = torch.ops.sparse_pcg
    context = current_context()
    layout = "bf16" if context is None else context.kv_layout
    cache = bind("latent_kv", layer_id)
    slots, select_lens = bind("slots", rows_like=q_nope), bind("select_lens", rows_like=q_nope)
    q_latent = torch.bmm(q_nope.transpose(0, 1), w_kc).transpose(0, 1)
    q_rotated = ops.apply_rope(q_rope, positions, cos_sin_cache, ROPE, interleaved)
    ops.mla_rope_kv_store(k_nope, k_rope, positions, cos_sin_cache, interleaved, cache, slots, layout)
    attended = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    ops.sparse_mla(
        torch.cat([q_latent, q_rotated], dim=-1), cache, topk, select_lens, attended, sm_scale, layout
    )
    out.copy_(torch.bmm(attended.transpose(0, 1), w_vc).transpose(0, 1))


def _body(layer_id: int, q_nope: torch.Tensor, *args: Any) -> None:
    context = current_context()
    if context is None or context.metadata is None:
        args[-1].zero_()
        return
    _decompose(ContextBind(context), layer_id, q_nope, *args)


def _check(
    layer_id: int,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    w_kc: torch.Tensor,
    w_vc: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    topk: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    op, dtype, device = "mla_attention", q_nope.dtype, q_nope.device
    check_tensor(op, "q_nope", q_nope, FLOATS, (None, None, None))
    rows, heads, nope = q_nope.shape
    check_tensor(op, "q_rope", q_rope, dtype, (rows, heads, ROPE), device)
    check_tensor(op, "k_nope", k_nope, dtype, (rows, LATENT), device)
    check_tensor(op, "k_rope", k_rope, dtype, (rows, ROPE), device)
    check_tensor(op, "w_kc", w_kc, dtype, (heads, nope, LATENT), device)
    check_tensor(op, "w_vc", w_vc, dtype, (heads, LATENT, None), device)
    check_tensor(op, "positions", positions, torch.int64, (rows,), device)
    check_tensor(op, "topk", topk, torch.int32, (rows, None), device, contiguous=True)
    check_tensor(op, "out", out, dtype, (rows, heads, w_vc.shape[2]), device)


def _fake(layer_id: int, q_nope: torch.Tensor, *args: Any) -> None:
    return None


MLA_ATTENTION = define(
    "mla_attention(int layer_id, Tensor q_nope, Tensor q_rope, Tensor k_nope, Tensor k_rope, Tensor w_kc,"
    " Tensor w_vc, Tensor positions, Tensor cos_sin_cache, bool interleaved, Tensor topk, float sm_scale,"
    " Tensor(a!) out) -> ()",
    reference=_body,
    fake=_fake,
    check=_check,
    cut=True,
    decompose=_decompose,
)


def mla_attention(
    layer_id: int,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    w_kc: torch.Tensor,
    w_vc: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    topk: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor,
) -> None:
    """Sparse MLA of a layer, with its KV store, over the current batch.

    q_nope: [T, H, nope]. q_rope: [T, H, 64], before RoPE. k_nope: [T, 512], the normed latent. k_rope: [T,
    64], before RoPE. w_kc: [H, nope, 512] and w_vc: [H, 512, v], the halves of the KV up-projection.
    positions: int64 [T].
    cos_sin_cache: float32 [positions, 64]. interleaved: RoPE pairs are neighbours, else halves. topk: int32
    [T, k] slots. out: [T, H, v], written. All floating tensors but the cos/sin cache have one dtype. Cache,
    slots and lengths come from the current forward context (``latent_kv[layer_id]``, its layout from
    ``kv_layout``). Without a context or a batch nothing is stored and ``out`` is zeroed.
    Raises ValueError naming the argument for a wrong dtype, shape or device.
    """
    return torch.ops.sparse_pcg.mla_attention(
        layer_id,
        q_nope,
        q_rope,
        k_nope,
        k_rope,
        w_kc,
        w_vc,
        positions,
        cos_sin_cache,
        interleaved,
        topk,
        sm_scale,
        out,
    )
