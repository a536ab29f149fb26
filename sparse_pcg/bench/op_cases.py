"""The operators at the shapes of DSA prefill, for ``bench ops``: GLM-5.2 on one of eight ranks, and DeepSeek V3.2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from custom_ops._register import OPS
from custom_ops.batch_metadata import PAGE, BatchMetadata, ForwardContext, use_context
from custom_ops.moe_few_rows import ROWS as FEW_ROWS

from .timing import device

TOPK = 2048
_TABLE_ROWS = 1 << 16
_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_TURNED = (1, 2)  # position, then its angles


@dataclass
class Case:
    """An op with its arguments. nbytes: what it has to read and write; flops: of its products, in ``rate``'s dtype.

    chain: kernels that it launches one after another, and loads of the first that need what the one before brought.
    """

    op: str
    label: str
    args: tuple[Any, ...]
    nbytes: int
    flops: int = 0
    rate: torch.dtype = _BF16
    context: ForwardContext | None = None
    chain: tuple[int, int] = (1, 1)

    def active(self) -> Any:
        """The context manager under which the op runs."""
        return nullcontext() if self.context is None else use_context(self.context)

    def call(self) -> Any:
        """Run the op's body: checks, choice of provider and the provider."""
        return OPS[self.op].body(*self.args)


class Batch:
    """Tensors that several cases share: ``rows`` rows at the end of one request of ``kv_len`` tokens."""

    def __init__(self, rows: int, kv_len: int) -> None:
        self.rows = rows
        self.kv_len = -(-max(rows, kv_len) // PAGE) * PAGE
        self.generator = torch.Generator(device()).manual_seed(rows)
        angles = torch.rand(_TABLE_ROWS, 32, generator=self.generator, device=device()) * 6.28
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        self.positions = torch.arange(self.kv_len - rows, self.kv_len, device=device())
        order = torch.randperm(self.kv_len // PAGE, generator=self.generator, device=device()) + 1
        self.page_table = order.int()[None].contiguous()
        tokens = (order[:, None] * PAGE + torch.arange(PAGE, device=device())).flatten()
        self.all_slots = tokens
        self.slots = tokens[self.kv_len - rows :].contiguous()
        self.lens = (self.positions + 1).int()
        self.requests = torch.zeros(rows, dtype=torch.int32, device=device())
        self.pages = self.kv_len // PAGE + 1

    def normal(self, *shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=device()).to(dtype)

    def gates(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=device())

    def index_cache(self) -> torch.Tensor:
        cache = torch.zeros(self.pages, PAGE * 132, dtype=torch.uint8, device=device())
        OPS["index_k_store"].body(self.normal(self.kv_len, 128), cache, self.all_slots)
        return cache

    def latent_cache(self, layout: str) -> torch.Tensor:
        rows = self.normal(self.pages * PAGE, 576)
        if layout != "fp8_packed":
            return rows if layout == "bf16" else rows.to(_E4M3)
        cache = torch.zeros(self.pages * PAGE, 656, dtype=torch.uint8, device=device())
        every = torch.arange(self.pages * PAGE, device=device())
        OPS["mla_kv_store"].body(rows[:, :512], rows[:, 512:], cache, every, layout)
        return cache

    def selection(self) -> torch.Tensor:
        """Slots of 2048 tokens (all, where there are fewer) of the request, each row its own, in ascending position."""
        k = min(TOPK, self.kv_len)
        some = min(self.rows, 64)
        picked = [torch.randperm(self.kv_len, generator=self.generator, device=device())[:k] for _ in range(some)]
        slots = self.all_slots[torch.stack(picked).sort(1).values].int()
        return slots.repeat(-(-self.rows // some), 1)[: self.rows].contiguous()

    def metadata(self) -> BatchMetadata:
        metadata = BatchMetadata.allocate(self.rows, 1, self.pages, TOPK, torch.device(device()))
        metadata.positions.copy_(self.positions)
        metadata.slots.copy_(self.slots)
        metadata.kv_lens.copy_(self.lens)
        metadata.page_table[:, : self.pages - 1] = self.page_table
        metadata.num_rows, metadata.num_requests, metadata.max_kv_len = self.rows, 1, self.kv_len
        return metadata


def _row_wise(b: Batch) -> Iterator[Case]:
    rows = b.rows
    for heads, route in ((32, (True, False, False)), (64, (False, True, True))):
        q = b.normal(rows, heads, 128)
        moved, scales = q.numel() * 2, rows * heads * 4
        named = f"{heads} heads"
        yield Case("hadamard", named, (q, 128**-0.5), 2 * moved)
        yield Case("apply_rope", named, (q, b.positions, b.table, 64, route[0]), 2 * moved + rows * 264, chain=_TURNED)
        yield Case("quant_fp8", named, (q, 128, route[2]), moved * 3 // 2 + scales)
        nbytes = moved * 3 // 2 + scales + rows * 264
        yield Case("index_q_prepare", named, (q, b.positions, b.table, *route), nbytes, chain=_TURNED)
    key, weight, bias = b.normal(rows, 128), b.gates(128), b.gates(128)
    cache = torch.zeros(b.pages, PAGE * 132, dtype=torch.uint8, device=device())
    yield Case("layernorm", "128 wide", (key, weight, bias, 1e-6), rows * 512)
    yield Case("index_k_store", "", (key, cache, b.slots), rows * (256 + 132 + 8))
    for named, route in (("norm, rope", (True, False, False)), ("norm, rope, hadamard", (False, True, True))):
        args = (key, weight, bias, 1e-6, b.positions, b.table, *route[:2], cache, b.slots, route[2])
        yield Case("index_k_prepare_store", named, args, rows * (256 + 132 + 16 + 256), chain=_TURNED)
    latent, rope = b.normal(rows, 512), b.normal(rows, 64)
    for layout, width, dtype in (("bf16", 576, _BF16), ("fp8_packed", 656, torch.uint8), ("fp8", 576, _E4M3)):
        kv = torch.zeros(b.pages * PAGE, width, dtype=torch.uint8, device=device()).to(dtype)
        stored = width * kv.element_size()
        yield Case("mla_kv_store", layout, (latent, rope, kv, b.slots, layout), rows * (1152 + stored + 8))
        with_rope = (latent, rope, b.positions, b.table, True, kv, b.slots, layout)
        yield Case("mla_rope_kv_store", layout, with_rope, rows * (1152 + stored + 16 + 256), chain=_TURNED)


def _gates(b: Batch) -> Iterator[Case]:
    for hidden, heads in ((6144, 32), (7168, 64)):
        x, weight, scale = b.normal(b.rows, hidden), b.normal(heads, hidden), b.gates(b.rows, heads, 1)
        args = (x, weight, heads**-0.5, 128**-0.5, scale)
        nbytes = 2 * (b.rows + heads) * hidden + 8 * b.rows * heads
        yield Case("logits_head_gate", f"{hidden} to {heads}", args, nbytes, 2 * b.rows * hidden * heads)
        raw = b.normal(b.rows, heads)
        yield Case("scale_head_gate", f"{heads} heads", (raw, *args[2:]), 10 * b.rows * heads)


def _indexer(b: Batch) -> Iterator[Case]:
    cache = b.index_cache()
    total = torch.tensor([b.kv_len], dtype=torch.int32, device=device())
    gathered = (cache, b.page_table, total, b.kv_len)
    yield Case("index_k_gather", f"{b.kv_len} tokens", gathered, 264 * b.kv_len, chain=(1, 3))
    k, k_scale = OPS["index_k_gather"].body(cache, b.page_table, total, b.kv_len)
    zeros = torch.zeros_like(b.lens)
    pairs = int(b.lens.sum())
    for heads in (32, 64):
        q, gates = b.normal(b.rows, heads, 128, dtype=_E4M3), b.gates(b.rows, heads)
        moved = 132 * b.kv_len + q.numel() + 4 * gates.numel()
        flops = 2 * 128 * heads * pairs
        named = f"{heads} heads, {b.kv_len} tokens"
        rest = {"flops": flops, "rate": _E4M3}
        yield Case("mqa_logits", named, (q, k, k_scale, gates, zeros, b.lens), moved + 4 * pairs, **rest)  # type: ignore[arg-type]
        paged = (q, cache, gates, b.lens, b.requests, b.page_table, b.kv_len)
        yield Case("paged_mqa_logits", named, paged, moved + 4 * pairs, **rest)  # type: ignore[arg-type]
        result = torch.empty(b.rows, TOPK, dtype=torch.int32, device=device())
        context = ForwardContext(b.metadata(), {0: cache})
        moved += 4 * result.numel()
        yield Case("indexer_topk", named, (0, q, gates, result), moved, context=context, **rest)  # type: ignore[arg-type]
    logits = b.normal(b.rows, b.kv_len, dtype=torch.float32)
    moved = 4 * pairs + 4 * b.rows * TOPK
    named = f"2048 of {b.kv_len}"
    yield Case("topk_indices", named, (logits, zeros, b.lens, TOPK), moved, chain=(1, 2))
    yield Case("topk_slots", named, (logits, zeros, b.lens, b.requests, b.page_table, TOPK), moved, chain=(1, 3))


def _attention(b: Batch) -> Iterator[Case]:
    selection = b.selection()
    k = selection.shape[1]
    few = min(100, k)
    shapes = [("bf16", 8, k), ("bf16", 64, k), ("bf16", 8, few), ("fp8_packed", 8, k), ("fp8", 8, k)]
    caches = {layout: b.latent_cache(layout) for layout in ("bf16", "fp8_packed", "fp8")}
    for layout, heads, selected in shapes:
        cache, q = caches[layout], b.normal(b.rows, heads, 576)
        out = torch.empty(b.rows, heads, 512, dtype=_BF16, device=device())
        lens = torch.full((b.rows,), selected, dtype=torch.int32, device=device())
        nbytes = 2 * (q.numel() + out.numel()) + b.rows * selected * (4 + cache.stride(0) * cache.element_size())
        args = (q, cache, selection, lens, out, 576**-0.5, layout)
        flops = 2 * b.rows * heads * selected * 1088
        yield Case("sparse_mla", f"{heads} heads, {selected} of {layout}", args, nbytes, flops, chain=(1, 2))


def _experts(b: Batch) -> Iterator[Case]:
    hidden, experts, of, top = 6144, 4, 256, 8
    x = b.normal(b.rows, hidden)
    weights, chosen = b.gates(b.rows, of).topk(top)
    ids = chosen.clamp(max=experts)
    rows, used = int((ids < experts).sum()), len(ids.unique()) - 1
    for inter in (2048, 256):
        gate_up, down = b.normal(experts, 2 * inter, hidden), b.normal(experts, hidden, inter)
        nbytes = 2 * (2 * x.numel() + used * 3 * inter * hidden) + 12 * ids.numel()
        args = (x, gate_up, down, weights, ids, of)
        named, flops = f"{experts} of {of} experts, {inter} wide", 6 * rows * inter * hidden
        yield Case("moe_experts", named, args, nbytes, flops, chain=(2 if b.rows <= FEW_ROWS else 4, 1))


FAMILIES: tuple[tuple[tuple[str, ...], Callable[[Batch], Iterator[Case]]], ...] = (
    (
        ("hadamard", "apply_rope", "quant_fp8", "index_q_prepare", "layernorm", "index_k_store",
         "index_k_prepare_store", "mla_kv_store", "mla_rope_kv_store"),
        _row_wise,
    ),
    (("logits_head_gate", "scale_head_gate"), _gates),
    (
        ("index_k_gather", "mqa_logits", "paged_mqa_logits", "indexer_topk", "topk_indices", "topk_slots"),
        _indexer,
    ),
    (("sparse_mla",), _attention),
    (("moe_experts",), _experts),
)  # fmt: skip
NAMES = tuple(name for names, _ in FAMILIES for name in names)


def cases(rows: int, kv_len: int, ops: tuple[str, ...]) -> Iterator[Case]:
    """The cases of ``ops`` with ``rows`` rows."""
    batch = Batch(rows, kv_len)
    for names, family in FAMILIES:
        if any(name in ops for name in names):
            yield from (case for case in family(batch) if case.op in ops)
