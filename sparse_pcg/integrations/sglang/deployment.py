"""What of a SGLang server's prefill is captured beyond SGLang's own graphs, and why not, if not.

Every answer comes from the server's arguments, the attention backend that it built and the kill switches. What does
not hold is left to SGLang, with one line in the log.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sparse_pcg.counters import COUNTS
from sparse_pcg.gates import ATTENTION, DRAFT, FEATURES, INDEXER, SHORT, Deployment, decide
from sparse_pcg.options import Options

from . import LAST, release_of
from .draft import is_one_layer_view
from .rows import Rows

logger = logging.getLogger("sparse_pcg")

# Implementations whose operands are as long as the bucket: physical slots per row and a length per row.
PAGED = ("flashmla_sparse", "trtllm")
# Rows that SGLang's counters for trtllm have room for: for more it makes others, which no capture may.
_COUNTED_ROWS = 8192


def argument(server_args: Any, name: str, default: Any = None) -> Any:
    """A server argument as SGLang resolved it; ``default`` where this release has none of the name."""
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:  # releases that resolve their arguments in place
        value = getattr(server_args, name, None)
    else:
        value = resolution_result(server_args, name, None)
    return default if value is None else value


def deployment_of(model_runner: Any) -> Deployment:
    """The deployment that a server's arguments and the attention backend that it built describe."""
    backend = model_runner.attn_backend

    def on(*names: str) -> bool:
        return any(bool(argument(model_runner.server_args, name)) for name in names)

    def ranks(name: str) -> int:
        return max(1, int(argument(model_runner.server_args, name, 1)))

    loaders = [name for name in ("enable_flexkv", "enable_lmcache", "radix_cache_backend") if on(name)]
    prefill_cp = ranks("attn_cp_size")
    if on("enable_dsa_prefill_context_parallel", "enable_prefill_cp", "enable_prefill_context_parallel"):
        prefill_cp = max(prefill_cp, 2)
    pooled = getattr(model_runner.model_config.hf_config, "index_kpool", None) or 1
    return Deployment(
        dcp=ranks("dcp_size"),
        dp_attention=on("enable_dp_attention") or ranks("attn_dp_size") > 1,
        prefill_cp=prefill_cp,
        pp=ranks("pp_size"),
        hisparse=on("enable_hisparse") or getattr(backend, "hisparse_coordinator", None) is not None,
        kpool=max(int(pooled), int(getattr(backend, "dsa_index_kpool", None) or 1)),
        two_batch_overlap=on("enable_two_batch_overlap"),
        page_sharded_kv=getattr(backend, "_kv_shard_pool", None) is not None,
        layer_kv_loader=", ".join(loaders) or None,
        indexer_lora=on("enable_lora"),
    )


def is_sparse(attn_backend: Any) -> bool:
    """Whether a server's attention is sparse attention."""
    return type(attn_backend).__name__ == "DeepseekSparseAttnBackend"


def _fuses_topk(attn_backend: Any) -> bool:
    """Whether top-k gives physical slots; else attention looks them up in a page table, the dummy's while capturing."""
    fused = getattr(attn_backend, "use_fused_topk", None)
    if fused is None:  # releases whose backend asks the environment at each call
        fused = _environment("SGLANG_DSA_FUSE_TOPK")
    return bool(fused)


def _environment(name: str) -> bool:
    """A switch of SGLang's, by its own rules of what is on."""
    from sglang.srt.environ import envs

    return bool(getattr(envs, name).get())


def _objections(model_runner: Any) -> Iterator[str]:
    """What else of a SGLang server speaks against captured attention."""
    backend = model_runner.attn_backend
    if not is_sparse(backend):
        yield f"the attention backend is {type(backend).__name__}, not sparse attention"
        return
    if getattr(model_runner, "is_draft_worker", False) and not is_one_layer_view(model_runner):
        yield "the prefill of a draft that is no NextN layer"
    if argument(model_runner.server_args, "enable_return_indexer_topk"):
        yield "selections returned to the client"
    if _environment("SGLANG_DSA_TOPK_BROADCAST"):
        yield "SGLANG_DSA_TOPK_BROADCAST"
    if not _fuses_topk(backend):
        yield "top-k and page lookup are not fused"
    impl = getattr(backend, "dsa_prefill_impl", None)
    fp8 = bool(getattr(backend, "dsa_kv_cache_store_fp8", False))
    chosen_per_batch = getattr(backend, "enable_auto_select_prefill_impl", False)
    if impl not in PAGED or (impl == "flashmla_sparse" and fp8) or chosen_per_batch:
        yield f"operands of {impl!r}{' on an fp8 cache' if fp8 else ''} are not as long as the bucket"


def _reasons(model_runner: Any) -> dict[str, str]:
    """Feature -> why it is off; a feature that is on is not in it."""
    own = "; ".join(_objections(model_runner))
    if own:
        return dict.fromkeys(FEATURES, own)
    gates = decide(deployment_of(model_runner), Options(), torch.device(model_runner.attn_backend.device))
    return {gate.feature: gate.reason for gate in gates if not gate.on}


def draft_refusal(model_runner: Any) -> str:
    """Why a NextN draft's prefill is not captured; empty where it is."""
    if argument(model_runner.server_args, "debug_cuda_graph", False):
        return "debug_cuda_graph"
    reasons = _reasons(model_runner)
    return reasons.get(DRAFT) or reasons.get(ATTENTION, "")


def _cuts(plans: Iterable[Any]) -> str:
    return "/".join(map(str, sorted({plan.cuts for plan in plans}) or [0]))


class Serving:
    """One prefill runner's answers.

    attention, indexer, short: captured or not. reasons: feature (``sparse_pcg.gates``) -> why not.
    floor, ceiling: the smallest and the largest bucket with attention in the graph.
    draft: whether the runner is that of a NextN draft.
    """

    def __init__(self, cuda_graph_runner: Any, release: str) -> None:
        model_runner = cuda_graph_runner.model_runner
        self.release = release
        self.attn_backend = model_runner.attn_backend
        self.pool = getattr(model_runner, "token_to_kv_pool", None)
        self.reasons = _reasons(model_runner)
        self.attention = ATTENTION not in self.reasons
        self.indexer = INDEXER not in self.reasons
        self.short = SHORT not in self.reasons
        for feature in self.reasons:
            COUNTS.fallbacks[f"gate:{feature}"] += 1
        # A draft takes its seed from the metadata after the forward; later releases publish what it has read.
        spec = getattr(model_runner, "spec_algorithm", None)
        speculative = spec is not None and not spec.is_none()
        self.needs_metadata = speculative or (release_of(release) or LAST) > (0, 5, 19)
        self.draft = is_one_layer_view(model_runner)
        self.uncaptured = os.environ.get("SPARSE_PCG_SGLANG_UNCAPTURED", "0") == "1"
        self.floor, self.ceiling = 0, sys.maxsize
        self._said: set[tuple[int, str]] = set()
        if self.attention:
            self.index_topk = int(self.attn_backend.dsa_index_topk)
            table = model_runner.req_to_token_pool.req_to_token
            self.rows = Rows(cuda_graph_runner.max_num_tokens, self.index_topk, table)
            self.floor = self._floor(cuda_graph_runner.capture_num_tokens)
            if self.attn_backend.dsa_prefill_impl == "trtllm":
                self.ceiling = _COUNTED_ROWS

    def _floor(self, buckets: list[int]) -> int:
        """The smallest bucket whose rows are always more than half the SMs, where the kernel's order depends on it."""
        if self.attn_backend.dsa_prefill_impl != "trtllm":
            return 0
        from .layout import most_padding

        regime = torch.cuda.get_device_properties(self.attn_backend.device).multi_processor_count // 2
        padding, before = most_padding(), 0
        for bucket in sorted(buckets):
            fewest = before + 1 if padding is None else max(before + 1, -(-bucket // padding))
            if fewest > regime:
                return bucket
            before = bucket
        return max(buckets) + 1

    def serves(self, bucket: int) -> bool:
        """Whether this bucket is captured with fewer breaks than SGLang makes."""
        return self.attention and self.floor <= bucket <= self.ceiling

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

    def report(self, flag: str, plans: Mapping[int, Any], short: Sequence[Any] = ()) -> None:
        """One line: what is captured, with how many cuts, and what is not and why.

        plans: of the ``cut`` graphs, by bucket. short: of the others.
        """
        if self.draft:
            flag += " draft"
        if not plans:
            logger.info(
                "sparse_pcg: SGLang %s %s: SGLang's own graphs; %s",
                self.release,
                flag,
                next(iter(self.reasons.values()), "no bucket above the floor"),
            )
            return
        features: dict[str, list[str]] = {}
        for feature, why in self.reasons.items():
            features.setdefault(why, []).append(feature)
        off = "; ".join(f"{', '.join(names)} off: {why}" for why, names in features.items())
        captured = any(map(self.serves, plans))
        attention = f"{self.attn_backend.dsa_prefill_impl} in the graph" if captured else "a cut"
        logger.info(
            "sparse_pcg: SGLang %s %s: %d buckets %d..%d, cuts per prefill %s, %d short graphs with %s cuts, "
            "attention %s%s",
            self.release, flag, len(plans), min(plans), max(plans), _cuts(plans.values()), len(short), _cuts(short),
            attention, f" ({off})" if off else "",
        )  # fmt: skip

    def note(self, bucket: int, variant: str, plan: Any) -> None:
        """Log the first use of a bucket's variant."""
        if (bucket, variant) not in self._said:
            self._said.add((bucket, variant))
            logger.info(
                "sparse_pcg: first %s prefill in bucket %d: %d graphs, %d cuts",
                variant, bucket, plan.captures, plan.cuts,
            )  # fmt: skip
