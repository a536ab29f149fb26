"""The latent KV cache of MLA: one row a token, 512 latent elements and 64 rotated ones, in one of three
layouts.

bf16        576 elements of bfloat16 (float16 and float32 caches hold the values cast to their type)
fp8_packed  656 bytes: 512 e4m3; from byte 512 a float32 scale for each 128 of them; from byte 528 64 bfloat16
fp8         576 e4m3, scale 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops import vendor
from custom_ops._checks import E4M3, FLOATS, check_tensor
from custom_ops._register import Provider, define, require
from custom_ops._rows import unit_stride
from custom_ops.fp8_quant import E4M3_MAX, e4m3_scale, quant_fp8_reference, to_e4m3
from custom_ops.index_cache import check_slots
from custom_ops.rope import apply_rope_reference, check_positions, joined, load_pairs
from custom_ops.rope import rotated as turned

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
PACKED_BYTES = LATENT + 4 * 4 + ROPE * 2
LAYOUTS = ("bf16", "fp8_packed", "fp8")
_ROWS, _WARPS = 4, 4


@triton.jit(do_not_specialize=["num_rows"])
def _store_kernel(
    k_nope: tl.tensor,
    k_rope: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    rotated: tl.tensor,
    slots: tl.tensor,
    nope_stride: tl.tensor,
    rope_stride: tl.tensor,
    num_rows: tl.tensor,
    LAYOUT: tl.constexpr,
    WITH_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """cache, scales and rotated point at the same rows, as the types of the three parts."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = row < num_rows
    slot = tl.load(slots + row, mask=row_mask, other=0)

    # Latent, as 4 blocks of 128: [ROWS, 4, 128].
    block = tl.arange(0, 4)[None, :, None]
    element = block * 128 + tl.arange(0, 128)[None, None, :]
    mask = row_mask[:, None, None]
    latent = tl.load(k_nope + row[:, None, None] * nope_stride + element, mask=mask, other=0.0).to(tl.float32)
    if LAYOUT == "fp8_packed":
        scale = e4m3_scale(latent, 2, False)
        tl.store(cache + slot[:, None, None] * 656 + element, to_e4m3(latent, scale, False), mask=mask)
        tl.store(scales + slot[:, None, None] * 164 + 128 + block, scale, mask=mask)
    elif LAYOUT == "fp8":
        one = tl.full(latent.shape, 1.0, tl.float32)
        tl.store(cache + slot[:, None, None] * 576 + element, to_e4m3(latent, one, True), mask=mask)
    else:
        tl.store(
            cache + slot[:, None, None] * 576 + element, latent.to(cache.dtype.element_ty), mask=mask
        )

    dim = tl.arange(0, 64)[None, :]
    mask = row_mask[:, None]
    source = k_rope + row[:, None] * rope_stride
    if WITH_ROPE:
        a, b = load_pairs(source, mask, ROWS, 32, 64, INTERLEAVED)
        table_row = table + tl.load(positions + row, mask=row_mask, other=0)[:, None] * 64
        a, b = turned(a, b, table_row, mask, 32, 64)
        y = joined(a, b, ROWS, 32, INTERLEAVED).to(k_rope.dtype.element_ty).to(tl.float32)
    else:
        y = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
    if LAYOUT == "fp8_packed":
        tl.store(rotated + slot[:, None] * 328 + 264 + dim, y.to(tl.bfloat16), mask=mask)
    elif LAYOUT == "fp8":
        one = tl.full(y.shape, 1.0, tl.float32)
        tl.store(rotated + slot[:, None] * 576 + 512 + dim, to_e4m3(y, one, True), mask=mask)
    else:
        tl.store(rotated + slot[:, None] * 576 + 512 + dim, y.to(rotated.dtype.element_ty), mask=mask)


def check_layout(op: str, layout: str, name: str = "layout") -> None:
    """A layout of a latent KV cache, called ``name``."""
    require(layout in LAYOUTS, op, name, f"one of {', '.join(LAYOUTS)}", layout)


def check_latent_cache(
    op: str, cache: torch.Tensor, layout: str, device: torch.device, name: str = "cache"
) -> None:
    """A contiguous, 16-byte aligned [slots, row] cache of ``layout``, called ``name``, on ``device``."""
    dtypes, width = {
        "bf16": (FLOATS, LATENT + ROPE),
        "fp8_packed": ((torch.uint8,), PACKED_BYTES),
        "fp8": ((E4M3,), LATENT + ROPE),
    }[layout]
    check_tensor(op, name, cache, dtypes, (None, width), device, contiguous=True)
    aligned = cache.data_ptr() % 16 == 0
    require(aligned, op, name, "16-byte aligned", f"an address {cache.data_ptr() % 16} bytes off")


def _check(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
    op: str = "mla_kv_store",
) -> None:
    check_tensor(op, "k_nope", k_nope, FLOATS, (None, LATENT))
    check_tensor(op, "k_rope", k_rope, k_nope.dtype, (k_nope.shape[0], ROPE), k_nope.device)
    check_layout(op, layout)
    check_latent_cache(op, cache, layout, k_nope.device)
    check_slots(op, slots, k_nope.shape[0], cache.shape[0], k_nope.device)


def _check_rope(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> None:
    _check(k_nope, k_rope, cache, slots, layout, "mla_rope_kv_store")
    check_positions("mla_rope_kv_store", k_rope, positions, cos_sin_cache, ROPE)


def mla_kv_store_reference(
    k_nope: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: str
) -> None:
    """Plain PyTorch: the specification of ``mla_kv_store``."""
    if layout == "fp8_packed":
        q, scale = quant_fp8_reference(k_nope, 128)
        parts = (q, scale, k_rope.to(torch.bfloat16).contiguous())
        cache[slots] = torch.cat([part.view(torch.uint8) for part in parts], 1)
    elif layout == "fp8":
        # The layout saturates by itself: it does not rest on what the cast makes of values beyond 448.
        row = torch.cat((k_nope, k_rope), 1).float().clamp(-E4M3_MAX, E4M3_MAX)
        cache.view(torch.uint8)[slots] = row.to(E4M3).view(torch.uint8)
    else:
        cache[slots] = torch.cat((k_nope, k_rope), 1).to(cache.dtype)


def mla_rope_kv_store_reference(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> None:
    """Plain PyTorch: the specification of ``mla_rope_kv_store``."""
    k_rope = apply_rope_reference(k_rope, positions, cos_sin_cache, ROPE, interleaved)
    mla_kv_store_reference(k_nope, k_rope, cache, slots, layout)


def _fake(
    k_nope: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: str
) -> None:
    return None


def _fake_rope(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> None:
    return None


def _launch(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> None:
    rows = k_nope.shape[0]
    if not rows:
        return
    k_nope, k_rope = unit_stride(k_nope), unit_stride(k_rope)
    latent, scales, rotated = cache, None, cache
    if layout == "fp8_packed":
        latent, scales, rotated = cache.view(E4M3), cache.view(torch.float32), cache.view(torch.bfloat16)
    _store_kernel[(triton.cdiv(rows, _ROWS),)](
        k_nope, k_rope, positions, cos_sin_cache, latent, scales, rotated, slots,
        k_nope.stride(0), k_rope.stride(0), rows,
        LAYOUT=layout, WITH_ROPE=positions is not None, INTERLEAVED=interleaved, ROWS=_ROWS, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _triton(
    k_nope: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: str
) -> None:
    _launch(k_nope, k_rope, None, None, False, cache, slots, layout)


define(
    "mla_kv_store(Tensor k_nope, Tensor k_rope, Tensor(a!) cache, Tensor slots, str layout) -> ()",
    reference=mla_kv_store_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)
define(
    "mla_rope_kv_store(Tensor k_nope, Tensor k_rope, Tensor positions, Tensor cos_sin_cache,"
    " bool interleaved, Tensor(a!) cache, Tensor slots, str layout) -> ()",
    reference=mla_rope_kv_store_reference,
    fake=_fake_rope,
    check=_check_rope,
    providers={
        "triton": Provider(_launch),
        "flashinfer": Provider(vendor.rope_quantize_store, vendor.rope_quantize_supports, vendor.rope_quantize_missing),
    },
    preference=("triton",),
)

_POINTERS = {
    "bf16": ("*bf16", "*fp32", "*bf16"),
    "fp8_packed": ("*fp8e4nv", "*fp32", "*bf16"),
    "fp8": ("*fp8e4nv", "*fp32", "*fp8e4nv"),
}
KERNELS = [
    (
        _store_kernel,
        {
            "k_nope": "*bf16", "k_rope": "*bf16", "positions": "*i64", "table": "*fp32",
            "cache": _POINTERS[layout][0], "scales": _POINTERS[layout][1], "rotated": _POINTERS[layout][2],
            "slots": "*i64", "nope_stride": "i32", "rope_stride": "i32", "num_rows": "i32",
        },
        {"LAYOUT": layout, "WITH_ROPE": True, "INTERLEAVED": True, "ROWS": 2},
    )
    for layout in LAYOUTS
]  # fmt: skip


def mla_kv_store(
    k_nope: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: str
) -> None:
    """Write latent KV rows to the cache.

    k_nope: [T, 512]; k_rope: [T, 64], rotated already; one dtype of bfloat16, float16 and float32, any
    strides.
    cache: contiguous, written in place at ``slots``; by ``layout``:
    ``bf16``: [slots, 576] bfloat16 (float16, float32), the values cast to its dtype;
    ``fp8_packed``: uint8 [slots, 656]: 512 e4m3, 4 float32 scales (max(amax, 1e-4) / 448 of each 128), 64
    bfloat16; ``fp8``: float8_e4m3fn [slots, 576], saturated, scale 1.
    slots: int64 [T]. Of rows with the same slot, any one wins.
    Raises ValueError for another dtype, shape, layout or device, before anything is written; slots are
    checked under ``debug_checks``.
    """
    return torch.ops.sparse_pcg.mla_kv_store(k_nope, k_rope, cache, slots, layout)


def mla_rope_kv_store(
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
) -> None:
    """``mla_kv_store`` of ``apply_rope(k_rope, positions, cos_sin_cache, 64, interleaved)``, in one pass.

    k_rope: [T, 64], not rotated yet; the result is rounded to its dtype before it is stored.
    The other arguments and the errors are those of the two operators.
    """
    return torch.ops.sparse_pcg.mla_rope_kv_store(
        k_nope, k_rope, positions, cos_sin_cache, interleaved, cache, slots, layout
    )
