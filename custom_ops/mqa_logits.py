"""Indexer logits: logits[t, s] = k_scale[s] * sum over heads of relu(q[t, h] . k[s]) * weights[t, h], in
float32.

q and k are e4m3 with head dim 128; the scales of q are folded into ``weights``. ``mqa_logits`` takes K
gathered in one piece, ``paged_mqa_logits`` reads it from the pages of the index-K cache: 64 tokens of 128
e4m3 bytes, then 64 float32 scales, 8448 bytes a page.
"""

from __future__ import annotations

from typing import Any

import torch

from custom_ops import vendor
from custom_ops._checks import E4M3, check_range, check_table, check_tensor, check_used_pages
from custom_ops._register import Provider, define, require
from custom_ops.batch_metadata import PAGE
from custom_ops.index_cache import HEAD_DIM, check_pages
from custom_ops.mqa_logits_kernels import launch_mqa_logits, launch_paged_mqa_logits

_REFERENCE_BYTES = 1 << 26  # how much the references hold of q.k at one time

# --- references ---------------------------------------------------------------------------------------------


def _weighted_relu(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """q e4m3 [T, H, 128], k e4m3 [S, 128], k_scale [S], weights [T, H] -> float32 [T, S], every column.

    e4m3 products and their sum over 128 dims are exact in float64 and the heads are added one by one: a row's
    result does not depend on how many rows there are, whatever the GEMM does.
    """
    heads, width = q.shape[1], k.shape[0]
    out = torch.empty(q.shape[0], width, dtype=torch.float32, device=q.device)
    k_exact, scale = k.double().T, k_scale.double()
    step = max(1, _REFERENCE_BYTES // (8 * max(1, heads * width)))
    for at in range(0, q.shape[0], step):
        rows = q[at : at + step].double()
        scores = (rows.flatten(0, 1) @ k_exact).view(-1, heads, width).relu()
        gates = weights[at : at + step].double()
        total = torch.zeros(rows.shape[0], width, dtype=torch.float64, device=q.device)
        for head in range(heads):
            total += scores[:, head] * gates[:, head, None]
        out[at : at + step] = (total * scale).float()
    return out


def mqa_logits_reference(
    q_fp8: torch.Tensor,
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """The specification, any device; -inf outside each row's range."""
    logits = _weighted_relu(q_fp8, k_fp8, k_scale, weights.flatten(1))
    column = torch.arange(k_fp8.shape[0], device=q_fp8.device)
    outside = (column < starts.unsqueeze(1)) | (column >= ends.unsqueeze(1))
    return logits.masked_fill_(outside, float("-inf"))


def paged_mqa_logits_reference(
    q_fp8: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    kv_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    max_kv_len: int,
) -> torch.Tensor:
    """The specification, any device (reads the lengths on the host); -inf from each row's length on."""
    out = torch.full((q_fp8.shape[0], max_kv_len), float("-inf"), dtype=torch.float32, device=q_fp8.device)
    gates = weights.flatten(1)
    for request in request_of_row.unique().tolist():
        rows = (request_of_row == request).nonzero().squeeze(1)
        lengths = kv_lens[rows]
        longest = min(int(lengths.max()), max_kv_len)
        if longest <= 0:
            continue
        pages = cache[page_table[request, : -(-longest // PAGE)].long()]
        k = pages[:, : PAGE * HEAD_DIM].reshape(-1, HEAD_DIM).view(E4M3)[:longest]
        k_scale = pages[:, PAGE * HEAD_DIM :].contiguous().view(torch.float32).flatten()[:longest]
        logits = _weighted_relu(q_fp8[rows], k, k_scale, gates[rows])
        beyond = torch.arange(longest, device=out.device) >= lengths.unsqueeze(1)
        out[rows, :longest] = logits.masked_fill_(beyond, float("-inf"))
    return out


# --- checks, fakes ------------------------------------------------------------------------------------------


def check_queries(op: str, q_fp8: torch.Tensor, weights: torch.Tensor) -> None:
    """q_fp8: e4m3 [T, 1 to 128 heads, 128]. weights: float32 [T, H] or [T, H, 1]. Both contiguous."""
    check_tensor(op, "q_fp8", q_fp8, E4M3, (None, None, HEAD_DIM), contiguous=True)
    rows, heads = q_fp8.shape[:2]
    require(1 <= heads <= 128, op, "q_fp8", "of 1 to 128 heads", heads)
    shape = (rows, heads) if weights.dim() == 2 else (rows, heads, 1)
    check_tensor(op, "weights", weights, torch.float32, shape, q_fp8.device, contiguous=True)


def _check_ragged(
    q_fp8: torch.Tensor,
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    op = "mqa_logits"
    check_queries(op, q_fp8, weights)
    rows, device = q_fp8.shape[0], q_fp8.device
    check_tensor(op, "k_fp8", k_fp8, E4M3, (None, HEAD_DIM), device, contiguous=True)
    check_tensor(op, "k_scale", k_scale, torch.float32, (k_fp8.shape[0],), device, contiguous=True)
    check_tensor(op, "starts", starts, torch.int32, (rows,), device, contiguous=True)
    check_tensor(op, "ends", ends, torch.int32, (rows,), device, contiguous=True)
    check_range(op, "starts", starts, 0, k_fp8.shape[0] + 1)
    check_range(op, "ends", ends, 0, k_fp8.shape[0] + 1)


def _check_paged(
    q_fp8: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    kv_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    max_kv_len: int,
) -> None:
    op = "paged_mqa_logits"
    check_queries(op, q_fp8, weights)
    rows, device = q_fp8.shape[0], q_fp8.device
    check_pages(op, cache, device)
    check_tensor(op, "kv_lens", kv_lens, torch.int32, (rows,), device, contiguous=True)
    check_tensor(op, "request_of_row", request_of_row, torch.int32, (rows,), device, contiguous=True)
    check_table(op, page_table, device)
    require(
        0 <= max_kv_len <= page_table.shape[1] * PAGE,
        op,
        "max_kv_len",
        f"in [0, {page_table.shape[1] * PAGE}], what the page table holds",
        max_kv_len,
    )
    check_range(op, "kv_lens", kv_lens, 0, max_kv_len + 1)
    check_range(op, "request_of_row", request_of_row, 0, page_table.shape[0])
    check_used_pages(op, page_table, request_of_row, kv_lens, cache.shape[0])


def _fake_ragged(
    q_fp8: torch.Tensor,
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    return q_fp8.new_empty((q_fp8.shape[0], k_fp8.shape[0]), dtype=torch.float32)


def _fake_paged(
    q_fp8: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    kv_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    max_kv_len: int,
) -> torch.Tensor:
    return q_fp8.new_empty((q_fp8.shape[0], max_kv_len), dtype=torch.float32)


def _triton_paged(
    q_fp8: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, *rest: Any
) -> torch.Tensor:
    out = _fake_paged(q_fp8, cache, weights, *rest)
    launch_paged_mqa_logits(out, q_fp8, cache, weights, *rest[:-1])
    return out


def _triton_ragged(q_fp8: torch.Tensor, k_fp8: torch.Tensor, *rest: Any) -> torch.Tensor:
    out = _fake_ragged(q_fp8, k_fp8, *rest)
    launch_mqa_logits(out, q_fp8, k_fp8, *rest)
    return out


def _deep_gemm(q_fp8: torch.Tensor, k_fp8: torch.Tensor, *rest: Any) -> torch.Tensor:
    out = _fake_ragged(q_fp8, k_fp8, *rest)
    if out.numel():
        # DeepGEMM's rows are padded, and contiguous() would keep the stride of a single row.
        out.copy_(vendor.deep_gemm_logits(q_fp8, k_fp8, *rest)[:, : out.shape[1]])
    return out


MQA_LOGITS = define(
    "mqa_logits(Tensor q_fp8, Tensor k_fp8, Tensor k_scale, Tensor weights, Tensor starts, Tensor ends)"
    " -> Tensor",
    reference=mqa_logits_reference,
    fake=_fake_ragged,
    check=_check_ragged,
    providers={
        "triton": Provider(_triton_ragged),
        "deep_gemm": Provider(_deep_gemm, vendor.deep_gemm_supports, vendor.deep_gemm_missing),
    },
    preference=("triton", "deep_gemm"),
)
PAGED_MQA_LOGITS = define(
    "paged_mqa_logits(Tensor q_fp8, Tensor cache, Tensor weights, Tensor kv_lens, Tensor request_of_row,"
    " Tensor page_table, SymInt max_kv_len) -> Tensor",
    reference=paged_mqa_logits_reference,
    fake=_fake_paged,
    check=_check_paged,
    providers={"triton": Provider(_triton_paged)},
    preference=("triton",),
)


def mqa_logits(
    q_fp8: torch.Tensor,
    k_fp8: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Indexer logits over K gathered in request order.

    q_fp8: float8_e4m3fn [T, H, 128], H up to 128. k_fp8: float8_e4m3fn [S, 128]. k_scale: float32 [S].
    weights: float32 [T, H] or [T, H, 1], the head gates with the scales of q and the softmax scale in them.
    starts, ends: int32 [T]; row t is defined in columns [starts[t], ends[t]).
    Returns float32 [T, S], contiguous; undefined outside the row's range.
    Raises ValueError naming the argument for a wrong dtype, shape, stride or device.
    """
    return torch.ops.sparse_pcg.mqa_logits(q_fp8, k_fp8, k_scale, weights, starts, ends)


def paged_mqa_logits(
    q_fp8: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    kv_lens: torch.Tensor,
    request_of_row: torch.Tensor,
    page_table: torch.Tensor,
    max_kv_len: int,
) -> torch.Tensor:
    """Indexer logits straight from the pages of the index-K cache.

    q_fp8, weights: as in ``mqa_logits``. cache: uint8 [pages, 8448]. kv_lens: int32 [T], how many tokens each
    row sees. request_of_row: int32 [T], rows of page_table: int32 [requests, pages]. max_kv_len: width of the
    result, at least every kv_len.
    Returns float32 [T, max_kv_len], contiguous; column p is position p of the row's request, undefined from
    the row's kv_len on.
    Raises ValueError naming the argument for a wrong dtype, shape, stride or device; with ``debug_checks()``
    also for lengths and requests out of range and for pages outside the cache.
    """
    return torch.ops.sparse_pcg.paged_mqa_logits(
        q_fp8, cache, weights, kv_lens, request_of_row, page_table, max_kv_len
    )
