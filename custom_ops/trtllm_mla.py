"""``sparse_mla`` on sm_100 by FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla``: each row a request of one token,
the selected slots its sparse page table.

The kernel chooses how many programs share a row by the number of rows: bits depend on it up to half the multiprocessors
(``row_regime``).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from custom_ops import vendor
from custom_ops._checks import E4M3
from custom_ops.batch_metadata import PAGE

MAX_ROWS = 8192  # the counters are laid out for as many rows once: they may not grow under a captured graph
_WORKSPACE_BYTES = 256 << 20
_WIDTH_MULTIPLE = 4
_LATENT, _ROPE = 512, 64
_FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"


def row_regime(sms: int) -> int:
    """Rows up to which a row is shared among programs."""
    return sms // 2


def missing() -> str | None:
    """Why the kernel cannot run here."""
    if vendor._arch() != 10:
        return "needs an sm_100 GPU"
    return vendor._lacks("flashinfer.mla", _FUNCTION)


def supports(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> str | None:
    """bfloat16 queries over whole pages of bfloat16 or plain float8 rows."""
    if q.dtype != torch.bfloat16 or cache.dtype not in (torch.bfloat16, E4M3):
        return "takes bfloat16 queries and a cache of bfloat16 or unscaled float8"
    if cache.shape[0] % PAGE:
        return f"takes whole pages of {PAGE} slots, not {cache.shape[0]} slots"
    return None if q.shape[0] <= MAX_ROWS else f"takes at most {MAX_ROWS} rows, not {q.shape[0]}"


@functools.cache
def buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Workspace and counters of a device, zero at first; the kernel leaves the counters at zero."""
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return workspace, torch.zeros(MAX_ROWS * 128, dtype=torch.int32, device=device)


def arguments(
    parameters: Any,
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    workspace: torch.Tensor,
    counters: torch.Tensor,
) -> dict[str, Any]:
    """Keyword arguments of the kernel, from those of ``sparse_mla``; parameters: the names that this version takes.

    A row that selects nothing attends slot 0, for the kernel has no result for empty rows. max_seq_len is the width of
    the selection, whatever the lengths: it is baked into a captured graph.
    """
    rows, heads, width = q.shape
    k = -(-topk.shape[1] // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    table = topk.new_full((rows, 1, k), -1)
    table[:, 0, : topk.shape[1]] = topk
    table[:, :, 0].clamp_(min=0)
    query = q if cache.dtype == q.dtype else q.clamp(-448.0, 448.0).to(E4M3)
    found = {
        "query": query.view(rows, 1, heads, width),
        "kv_cache": cache.view(-1, 1, PAGE, width),
        "workspace_buffer": workspace,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": _LATENT,
        "qk_rope_head_dim": _ROPE,
        "block_tables": table,
        "seq_lens": select_lens.clamp(min=1),
        "max_seq_len": k,
        "sparse_mla_top_k": k,
        "out": out.view(rows, 1, heads, _LATENT),
        "bmm1_scale": sm_scale,
        "bmm2_scale": 1.0,
        "backend": "trtllm-gen",
    }
    if "multi_ctas_kv_counter_buffer" in parameters:
        found["multi_ctas_kv_counter_buffer"] = counters
    return found


def run(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> None:
    """``sparse_mla`` by the kernel."""
    if q.shape[0] == 0:
        return
    forward = getattr(vendor._module("flashinfer.mla"), _FUNCTION)
    parameters = inspect.signature(forward).parameters
    forward(**arguments(parameters, q, cache, topk, select_lens, out, sm_scale, *buffers(q.device)))
    out.masked_fill_((select_lens == 0)[:, None, None], 0.0)
