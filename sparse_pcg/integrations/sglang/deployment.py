"""What of a SGLang server's prefill is captured beyond SGLang's own graphs, and why not, if not.

Every answer comes from the server's arguments, the attention backend that it built and the kill switches. What does
not hold is left to SGLang, with one line in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sparse_pcg.counters import COUNTS

from . import LAST, release_of
from .rows import Rows

logger = logging.getLogger("sparse_pcg")

# Implementations whose operands are as long as the bucket: physical slots per row and a length per row.
PAGED = ("flashmla_sparse", "trtllm")
SWITCHES = {
    "attention": ("SPARSE_PCG_ATTN_IN_GRAPH", "SGLANG_ENABLE_DSA_PREFILL_ATTN_IN_CUDA_GRAPH"),
    "indexer": ("SPARSE_PCG_INDEXER_PREP_IN_GRAPH", "SGLANG_ENABLE_DSA_PREFILL_INDEXER_PREP_IN_CUDA_GRAPH"),
    "draft": ("SPARSE_PCG_DRAFT_IN_GRAPH", "SGLANG_ENABLE_NEXTN_DRAFT_PREFILL_CUDA_GRAPH"),
    "short": ("SPARSE_PCG_SHORT_GRAPHS",),
}


def switched_off(feature: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The kill switch that turns ``feature`` off, or None."""
    for name in SWITCHES[feature]:
        if environ.get(name, "1").strip().lower() in ("0", "false", "no", "off"):
            return name
    return None


def _gates(model_runner: Any) -> Iterator[str]:
    """Every reason why attention must not be captured in this deployment."""
    args, backend = model_runner.server_args, model_runner.attn_backend
    if type(backend).__name__ != "DeepseekSparseAttnBackend":
        yield f"the attention backend is {type(backend).__name__}, not sparse attention"
        return

    def on(name: str) -> Any:
        return getattr(args, name, None)

    if (on("dcp_size") or 1) > 1:
        yield "decode context parallelism"
    if on("enable_dp_attention"):
        yield "data-parallel attention"
    if on("enable_dsa_prefill_context_parallel") or (on("attn_cp_size") or 1) > 1 or on("enable_prefill_cp"):
        yield "prefill context parallelism"
    if on("enable_hisparse") or getattr(backend, "hisparse_coordinator", None) is not None:
        yield "hierarchical sparse attention"
    if on("enable_two_batch_overlap"):
        yield "two-batch overlap"
    if getattr(backend, "_kv_shard_pool", None) is not None:
        yield "page-sharded KV"
    if getattr(model_runner.model_config.hf_config, "index_kpool_size", 1) not in (None, 1) or getattr(
        backend, "kpool", 1
    ) not in (None, 1, False):
        yield "k-pool"
    for name in ("enable_flexkv", "enable_lmcache", "radix_cache_backend"):
        if on(name):
            yield f"a per-layer KV loader ({name})"
    if on("enable_lora"):
        yield "LoRA"
    if on("enable_return_indexer_topk"):
        yield "selections returned to the client"
    if os.environ.get("SGLANG_DSA_TOPK_BROADCAST", "0").lower() in ("1", "true", "yes"):
        yield "SGLANG_DSA_TOPK_BROADCAST"
    if not getattr(backend, "use_fused_topk", True):
        yield "top-k and page lookup are not fused"
    impl = getattr(backend, "dsa_prefill_impl", None)
    fp8 = getattr(backend, "dsa_kv_cache_store_fp8", False)
    if (
        impl not in PAGED
        or (impl == "flashmla_sparse" and fp8)
        or getattr(backend, "enable_auto_select_prefill_impl", False)
    ):
        yield f"operands of {impl!r}{' on an fp8 cache' if fp8 else ''} are not as long as the bucket"


class Serving:
    """One prefill runner's answers.

    attention, indexer, short: captured or not. reasons: feature -> why not. floor: the smallest bucket captured.
    """

    def __init__(self, cuda_graph_runner: Any, release: str) -> None:
        model_runner = cuda_graph_runner.model_runner
        self.release = release
        self.attn_backend = model_runner.attn_backend
        self.pool = getattr(model_runner, "token_to_kv_pool", None)
        self.reasons: dict[str, str] = {}
        gate = next(_gates(model_runner), None)
        for feature in ("attention", "indexer", "short"):
            off = switched_off(feature)
            if gate is not None:
                self.reasons[feature] = gate
            elif off is not None:
                self.reasons[feature] = f"{off}=0"
            elif feature != "attention" and "attention" in self.reasons:
                self.reasons[feature] = "attention is not captured"
        if "indexer" in self.reasons:
            self.reasons.setdefault("short", "the indexer is not captured")
        self.attention = "attention" not in self.reasons
        self.indexer = "indexer" not in self.reasons
        self.short = "short" not in self.reasons
        for reason in set(self.reasons.values()):
            COUNTS.fallbacks[f"gate:{reason}"] += 1
        # A draft takes its seed from the metadata after the forward; later releases publish what it has read.
        spec = getattr(model_runner, "spec_algorithm", None)
        speculative = spec is not None and not spec.is_none()
        self.needs_metadata = speculative or (release_of(release) or LAST) > (0, 5, 19)
        self.uncaptured = os.environ.get("SPARSE_PCG_SGLANG_UNCAPTURED", "0") == "1"
        self.floor = 0
        self._said: set[tuple[int, str]] = set()
        if self.attention:
            self.index_topk = int(self.attn_backend.dsa_index_topk)
            table = model_runner.req_to_token_pool.req_to_token
            self.rows = Rows(cuda_graph_runner.max_num_tokens, self.index_topk, table)
            self.floor = self._floor(cuda_graph_runner.capture_num_tokens)

    def _floor(self, buckets: list[int]) -> int:
        """The smallest bucket whose rows are always more than half the SMs, where the kernel's order depends on it."""
        if self.attn_backend.dsa_prefill_impl != "trtllm":
            return 0
        import torch

        regime = torch.cuda.get_device_properties(self.attn_backend.device).multi_processor_count // 2
        before = 0
        for bucket in sorted(buckets):
            if max(before + 1, -(-bucket // 2)) > regime:
                return bucket
            before = bucket
        return max(buckets) + 1

    def serves(self, bucket: int) -> bool:
        """Whether this bucket is captured with fewer breaks than SGLang makes."""
        return self.attention and bucket >= self.floor

    def is_short(self, forward_batch: Any) -> bool:
        """Whether no row of the batch sees more than ``index_topk`` tokens."""
        lens = forward_batch.seq_lens_cpu
        return self.short and lens is not None and len(lens) > 0 and int(lens.max()) <= self.index_topk

    def wait_for_loads(self) -> None:
        """Captured attention cannot wait layer by layer: wait for every pending host-to-device load first."""
        counter = getattr(self.pool, "layer_transfer_counter", None)
        if counter is not None and counter.consumer_index >= 0:
            counter.wait_until(counter.num_layers - 1)

    @contextmanager
    def keeping_context(self) -> Iterator[None]:
        """SGLang's prefill context does not nest: put the outer one back after the block."""
        from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import context_manager

        outer = context_manager._tc_piecewise_forward_context
        try:
            yield
        finally:
            context_manager._tc_piecewise_forward_context = outer

    def report(self, flag: str, plans: Mapping[int, Any], short: int) -> None:
        """One line: what is captured, with how many cuts, and what is not and why."""
        if not plans:
            logger.info(
                "sparse_pcg: SGLang %s %s: SGLang's own graphs; %s",
                self.release,
                flag,
                next(iter(self.reasons.values()), "no bucket above the floor"),
            )
            return
        cuts = sorted({plan.cuts for plan in plans.values()})
        off = "; ".join(f"{feature} not captured: {why}" for feature, why in self.reasons.items())
        logger.info(
            "sparse_pcg: SGLang %s %s: %d buckets %d..%d, cuts per prefill %s, %d short graphs with 0 cuts, "
            "attention %s in the graph%s",
            self.release, flag, len(plans), min(plans), max(plans), "/".join(map(str, cuts)), short,
            self.attn_backend.dsa_prefill_impl, f" ({off})" if off else "",
        )  # fmt: skip

    def note(self, bucket: int, variant: str, plan: Any) -> None:
        """Log the first use of a bucket's variant."""
        if (bucket, variant) not in self._said:
            self._said.add((bucket, variant))
            logger.info(
                "sparse_pcg: first %s prefill in bucket %d: %d graphs, %d cuts",
                variant, bucket, plan.captures, plan.cuts,
            )  # fmt: skip
