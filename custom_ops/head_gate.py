"""Gates of the indexer heads, with the scale of the quantised query folded in.

W[t, h] = (x[t] . weight[h]) * n_heads_inv_sqrt * q_scale[t, h] * softmax_scale, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops._checks import FLOATS, check_tensor
from custom_ops._register import Provider, define, require
from custom_ops._rows import next_power_of_two, unit_stride

# The hidden dim is summed in slices of a fixed length, each from zero, and the slices are added in order. So it does
# not matter who sums a slice: a row's gates depend neither on the other rows nor on their number.
SLICE = 512
_ROWS, _STEP, _STAGES, _WARPS = 64, 128, 5, 4
_FEW = 100  # tiles of rows and heads below which a program a slice fills the GPU better than a program a tile


@triton.jit
def _store_gates(
    gate: tl.tensor,
    q_scale: tl.tensor,
    out: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    n_heads_inv_sqrt: tl.tensor,
    softmax_scale: tl.tensor,
) -> None:
    gate = gate * n_heads_inv_sqrt * tl.load(q_scale + at, mask=mask, other=0.0) * softmax_scale
    tl.store(out + at, gate, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "slices_each"])
def _head_gate_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    q_scale: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    num_rows: tl.tensor,
    heads: tl.tensor,
    hidden: tl.tensor,
    slices_each: tl.tensor,
    n_heads_inv_sqrt: tl.tensor,
    softmax_scale: tl.tensor,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A program sums ``slices_each`` slices: all of them and writes ``out``, or one and writes ``sums``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    step = tl.arange(0, STEP)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = weight + head.to(tl.int64)[None, :] * weight_stride
    slices = tl.cdiv(hidden, SLICE)
    first = tl.program_id(2) * slices_each
    gate = tl.zeros((ROWS, HEADS), tl.float32)
    part_sum = tl.zeros((ROWS, HEADS), tl.float32)
    # One loop over all slices: the loads ahead would run dry at the end of each.
    end = tl.minimum((first + slices_each) * SLICE, slices * SLICE)
    for begin in tl.range(first * SLICE, end, STEP, num_stages=STAGES):
        at = begin + step
        a = tl.load(x_row + at[None, :], mask=(row < num_rows)[:, None] & (at < hidden)[None, :], other=0.0)
        b = tl.load(w_row + at[:, None], mask=(head < heads)[None, :] & (at < hidden)[:, None], other=0.0)
        part_sum = tl.dot(a, b, part_sum, input_precision="ieee")
        whole = (begin + STEP) % SLICE == 0
        gate = tl.where(whole, gate + part_sum, gate)
        # By its bits: a sum that is selected against zero stops Triton's compiler for sm_100.
        keep = tl.where(whole, 0, -1)
        part_sum = (part_sum.to(tl.int32, bitcast=True) & keep).to(tl.float32, bitcast=True)
    mask = (row < num_rows)[:, None] & (head < heads)[None, :]
    at = row.to(tl.int64)[:, None] * heads + head[None, :]
    if slices_each >= slices:
        _store_gates(gate, q_scale, out, at, mask, n_heads_inv_sqrt, softmax_scale)
    else:
        tl.store(sums + first.to(tl.int64) * num_rows * heads + at, gate, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_slices_kernel(
    sums: tl.tensor,
    q_scale: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    heads: tl.tensor,
    n_heads_inv_sqrt: tl.tensor,
    softmax_scale: tl.tensor,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gates = num_rows.to(tl.int64) * heads
    mask = at < gates
    gate = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SLICES):
        gate += tl.load(sums + part * gates + at, mask=mask, other=0.0)
    _store_gates(gate, q_scale, out, at, mask, n_heads_inv_sqrt, softmax_scale)


@triton.jit(do_not_specialize=["num_rows"])
def _scale_gate_kernel(
    raw: tl.tensor,
    q_scale: tl.tensor,
    out: tl.tensor,
    raw_stride: tl.tensor,
    num_rows: tl.tensor,
    heads: tl.tensor,
    factor: tl.tensor,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS)[None, :]
    mask = (row < num_rows)[:, None] & (head < heads)
    row = row.to(tl.int64)[:, None]
    gate = tl.load(raw + row * raw_stride + head, mask=mask, other=0.0).to(tl.float32)
    gate = gate * factor * tl.load(q_scale + row * heads + head, mask=mask, other=0.0)
    tl.store(out + row * heads + head, gate, mask=mask)


def _check_q_scale(op: str, q_scale: torch.Tensor, rows: int, heads: int, device: torch.device) -> None:
    require(q_scale.dim() in (2, 3), op, "q_scale", f"of shape [{rows}, {heads}] or [{rows}, {heads}, 1]",
            list(q_scale.shape))  # fmt: skip
    shape = (rows, heads, 1)[: q_scale.dim()]
    check_tensor(op, "q_scale", q_scale, torch.float32, shape, device, contiguous=True)


def _check(
    x: torch.Tensor, weight: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale:
    torch.Tensor
) -> None:
    op = "logits_head_gate"
    check_tensor(op, "x", x, FLOATS, (None, None))
    check_tensor(op, "weight", weight, x.dtype, (None, x.shape[1]), x.device)
    _check_q_scale(op, q_scale, x.shape[0], weight.shape[0], x.device)


def _check_scale(
    weights_raw: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale: torch.Tensor
) -> None:
    check_tensor("scale_head_gate", "weights_raw", weights_raw, FLOATS, (None, None))
    rows, heads = weights_raw.shape
    _check_q_scale("scale_head_gate", q_scale, rows, heads, weights_raw.device)


def logits_head_gate_reference(
    x: torch.Tensor, weight: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale:
    torch.Tensor
) -> torch.Tensor:
    """Plain PyTorch: the specification of ``logits_head_gate``."""
    gate = torch.nn.functional.linear(x.float(), weight.float()) * n_heads_inv_sqrt
    gate = gate * q_scale.reshape(gate.shape) * softmax_scale
    # A product of no rows has strides of its own: copied into the strides that are promised.
    return _fake(x, weight, n_heads_inv_sqrt, softmax_scale, q_scale).copy_(gate.unsqueeze(-1))


def scale_head_gate_reference(
    weights_raw: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale: torch.Tensor
) -> torch.Tensor:
    """Plain PyTorch: the specification of ``scale_head_gate``."""
    gate = weights_raw.float().contiguous() * (softmax_scale * n_heads_inv_sqrt)
    return (gate * q_scale.reshape(gate.shape)).unsqueeze(-1)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale:
    torch.Tensor
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], 1), dtype=torch.float32)


def _fake_scale(
    weights_raw: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale: torch.Tensor
) -> torch.Tensor:
    return weights_raw.new_empty((*weights_raw.shape, 1), dtype=torch.float32)


def _triton(
    x: torch.Tensor, weight: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale:
    torch.Tensor
) -> torch.Tensor:
    out = _fake(x, weight, n_heads_inv_sqrt, softmax_scale, q_scale)
    if out.numel():
        x, weight = unit_stride(x), unit_stride(weight)
        (rows, hidden), heads = x.shape, weight.shape[0]
        block = min(64, max(16, next_power_of_two(heads)))
        blocks = triton.cdiv(rows, _ROWS), triton.cdiv(heads, block)
        slices = triton.cdiv(hidden, SLICE)
        split = slices > 1 and blocks[0] * blocks[1] < _FEW
        # Where no sums are needed, a pointer of the same type: both ways are one binary.
        sums = out.new_empty(slices, rows, heads) if split else out
        grid = (*blocks, slices if split else 1)
        _head_gate_kernel[grid](
            x, weight, q_scale, out, sums, x.stride(0), weight.stride(0), rows, heads, hidden,
            1 if split else slices, n_heads_inv_sqrt, softmax_scale,
            ROWS=_ROWS, HEADS=block, STEP=_STEP * 2 // x.element_size(), SLICE=SLICE, STAGES=_STAGES,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        if split:
            _add_slices_kernel[(triton.cdiv(rows * heads, 256),)](
                sums, q_scale, out, rows, heads, n_heads_inv_sqrt, softmax_scale,
                SLICES=slices, BLOCK=256, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _triton_scale(
    weights_raw: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale: torch.Tensor
) -> torch.Tensor:
    out = _fake_scale(weights_raw, n_heads_inv_sqrt, softmax_scale, q_scale)
    if out.numel():
        raw = unit_stride(weights_raw)
        rows, heads = raw.shape
        width = next_power_of_two(heads)
        block = max(1, 1024 // width)
        _scale_gate_kernel[(triton.cdiv(rows, block),)](
            raw, q_scale, out, raw.stride(0), rows, heads, softmax_scale * n_heads_inv_sqrt,
            ROWS=block, HEADS=width, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


define(
    "logits_head_gate(Tensor x, Tensor weight, float n_heads_inv_sqrt, float softmax_scale, Tensor q_scale)"
    " -> Tensor",
    reference=logits_head_gate_reference,
    fake=_fake,
    check=_check,
    providers={"triton": Provider(_triton)},
    preference=("triton",),
)
define(
    "scale_head_gate(Tensor weights_raw, float n_heads_inv_sqrt, float softmax_scale, Tensor q_scale)"
    " -> Tensor",
    reference=scale_head_gate_reference,
    fake=_fake_scale,
    check=_check_scale,
    providers={"triton": Provider(_triton_scale)},
    preference=("triton",),
)

KERNELS = [
    (
        _head_gate_kernel,
        {
            "x": "*bf16", "weight": "*bf16", "q_scale": "*fp32", "out": "*fp32", "sums": "*fp32", "x_stride": "i32",
            "weight_stride": "i32", "num_rows": "i32", "heads": "i32", "hidden": "i32", "slices_each": "i32",
            "n_heads_inv_sqrt": "fp32", "softmax_scale": "fp32",
        },
        {"ROWS": _ROWS, "HEADS": 64, "STEP": _STEP, "SLICE": SLICE, "STAGES": _STAGES},
    ),
    (
        _add_slices_kernel,
        {
            "sums": "*fp32", "q_scale": "*fp32", "out": "*fp32", "num_rows": "i32", "heads": "i32",
            "n_heads_inv_sqrt": "fp32", "softmax_scale": "fp32",
        },
        {"SLICES": 14, "BLOCK": 256},
    ),
    (
        _scale_gate_kernel,
        {
            "raw": "*bf16", "q_scale": "*fp32", "out": "*fp32", "raw_stride": "i32", "num_rows": "i32",
            "heads": "i32", "factor": "fp32",
        },
        {"ROWS": 16, "HEADS": 64},
    ),
]  # fmt: skip


def logits_head_gate(
    x: torch.Tensor, weight: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale:
    torch.Tensor
) -> torch.Tensor:
    """Gates of the indexer heads from the hidden state, ready to weight the quantised scores.

    x: [T, hidden]; weight: [H, hidden], x's dtype (bfloat16, float16 or float32); any strides.
    n_heads_inv_sqrt: H ** -0.5. softmax_scale: head_dim ** -0.5.
    q_scale: float32 [T, H, 1] or [T, H], contiguous: the scales of the quantised query.
    Returns float32 [T, H, 1], contiguous; the product is accumulated in float32.
    Raises ValueError for another dtype, shape or device.
    """
    return torch.ops.sparse_pcg.logits_head_gate(x, weight, n_heads_inv_sqrt, softmax_scale, q_scale)


def scale_head_gate(
    weights_raw: torch.Tensor, n_heads_inv_sqrt: float, softmax_scale: float, q_scale: torch.Tensor
) -> torch.Tensor:
    """``logits_head_gate`` after the projection: weights_raw * (softmax_scale * n_heads_inv_sqrt) * q_scale.

    weights_raw: [T, H], bfloat16, float16 or float32, any strides: the projected hidden state.
    The other arguments and the result are those of ``logits_head_gate``.
    """
    return torch.ops.sparse_pcg.scale_head_gate(weights_raw, n_heads_inv_sqrt, softmax_scale, q_scale)
