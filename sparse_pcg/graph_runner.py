"""What the runners of target and draft share: a compiled model, captured bucket by bucket, served in several modes."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import torch

from custom_ops.batch_metadata import PAGE, ROW_BUFFERS, BatchMetadata, ForwardContext, use_context

from . import session
from .backend import OwnBackend
from .batch import Batch, HostBatch, check_batch, dummy, fill
from .buckets import bucket_floor, bucket_for
from .collectives import Ranks, together
from .compiled_graph import CompiledGraph
from .counters import count_fallback, logger
from .errors import CaptureError, FrozenError, SparsePCGError
from .gates import ATTENTION, INDEXER, SHORT, Deployment, decide
from .options import Options
from .plan import Plan
from .served import KV, Bucket, Captured, Served, listed, no_grad, row_parameters, row_regimes, tracked
from .staging import Staging
from .verification import Verification, verify

MODES = ("replay", "uncaptured", "breaks", "eager")
MAX_REQUESTS = 512  # of a batch that is replayed; the static page table has a row for each


class GraphRunner:
    """Base of ``PrefillRunner`` and ``DraftRunner``.

    metadata: the static row buffers. sizes: the buckets that are captured. gates: one ``Gate`` per feature. floor: the
    smallest bucket whose graphs hold every op, known once captured; below it ops with a row regime are cuts. None: no
    bucket is large enough.
    """

    FURTHER: ClassVar[tuple[str, ...]] = ()  # row buffers that the model takes beside those of ``BatchMetadata``

    def __init__(
        self,
        model: torch.nn.Module,
        kv: KV,
        options: Options | None,
        deployment: Deployment | None,
        selection_group: Any = None,
    ) -> None:
        self.model, self.kv, self.selection_group = model, kv, selection_group
        self._rows = row_parameters(model, (*ROW_BUFFERS, *self.FURTHER))
        self.options = options or Options()
        self.deployment = deployment or Deployment()
        self.device = next(iter(model.parameters())).device
        self.sizes = tuple(s for s in self.options.capture_sizes if s >= 2)
        if not self.sizes:
            raise ValueError(f"options: capture_sizes must hold a size of at least 2, got {self.options.capture_sizes}")
        self.gates = decide(self.deployment, self.options, self.device)
        self.index_topk: int = model.config.index_topk  # type: ignore[union-attr,assignment]
        self.max_positions: int | None = getattr(model.config, "max_positions", None)
        largest = self.sizes[-1]
        self.metadata = self._allocate(largest, min(largest, MAX_REQUESTS))
        self.further_rows = self._further_rows(largest)
        self.floor: int | None = self.sizes[0]
        self.captured: list[Captured] = []
        self._buckets: dict[int, Bucket] = {}
        self._addresses: dict[str, int] = {}
        self._lock = threading.RLock()
        self._staging = Staging(self.device)
        self._sharers: weakref.WeakSet[GraphRunner] = weakref.WeakSet()  # whose graphs lie in this runner's pool
        session.RESETTABLE.add(self)
        # Backends of our own: caches, layout and pool of another runner of the same model class are not this one's.
        self._compiled = self._compile(self.options)
        self._compiled_below: Any = None  # with cuts at the ops that have a row regime, for buckets below the floor

    def _compile(self, options: Options) -> Any:
        return torch.compile(self.model, backend=OwnBackend(), fullgraph=True, options=options.to_dict())

    def _allocate(self, rows: int, requests: int) -> BatchMetadata:
        pages = self.kv.num_pages
        if self.max_positions is not None:
            pages = min(pages, -(-self.max_positions // PAGE))
        return BatchMetadata.allocate(rows, requests, pages, self.index_topk, self.device)

    def _further_rows(self, rows: int) -> dict[str, torch.Tensor]:
        """The ``FURTHER`` buffers, by parameter name."""
        return {}

    # Capture.

    def capture(self, progress: bool = True) -> list[Captured]:
        """Compile the model and capture every bucket, big to small. Captures nothing twice.

        A bucket whose capture fails is logged, counted (``capture_failed``) and served uncaptured.
        """
        if session.frozen():
            raise FrozenError("capture() was called after freeze()")
        with self._lock, no_grad():
            for size in tracked(sorted(set(self.sizes) - set(self._buckets), reverse=True), progress):
                start, before = time.perf_counter(), self.pool_bytes
                self._buckets[size] = bucket = self._prepare(size)
                took, grown = time.perf_counter() - start, self.pool_bytes - before
                self.captured.append(Captured(size, tuple(bucket.plans), took, grown))
                logger.info("captured bucket %d: %.2f s, %d bytes", size, took, grown)
            place = next((p for graph in self.graphs() if (p := graph.place()) is not None), None)
            if place is not None and not self._staging.recorded:
                self._staging.record(self.metadata, *place)
            self._addresses = self._static_addresses()
        return self.captured

    def _prepare(self, size: int) -> Bucket:
        """Warm up and record one bucket; all it writes is the dummy page."""
        ranks = self._ranks()
        if ranks is not None:
            ranks.same("the next bucket", {"rows": size})
        batch, host = dummy(size, self.device)
        fill(self.metadata, batch, host, self._staging)
        with use_context(self._context(self.metadata)):
            bucket = self._trace(self.metadata, size)
            regimes = row_regimes(bucket.graph, self.device)
            self.floor = bucket_floor(self.sizes, regimes.values()) if regimes else self.floor
            if self._is_below(size):
                if self._compiled_below is None:
                    cuts = {name for name in regimes if regimes[name]}
                    logger.info("below bucket %s these are cuts: %s", self.floor, ", ".join(sorted(cuts)))
                    self._compiled_below = self._compile(
                        replace(self.options, cut_ops=(*self.options.cut_ops, *sorted(cuts)))
                    )
                bucket = self._trace(self.metadata, size)
            self._share_pool(bucket.graph)
            variants = ["cut"]
            if self.gates.on(SHORT) and bucket.graph.program.has_short:
                variants.append("short")
            for variant in variants:
                try:
                    if variant == "short":
                        bucket.graph.program.run(bucket.inputs, short=True)
                    plan = bucket.graph.plan(bucket.inputs, variant=variant, label=f", bucket {size}")
                except CaptureError as error:
                    count_fallback("capture_failed", f"bucket {size}, variant {variant}: {error}")
                    continue
                if plan is not None:
                    self._complete(plan, bucket)
                    bucket.plans[variant] = plan
        return bucket

    def _complete(self, plan: Plan, bucket: Bucket) -> None:
        """Add to a recorded plan what is never captured."""

    def _ranks(self) -> Ranks | None:
        """Those that run the model together, known once a bucket is captured; None: this one alone."""
        return next((bucket.graph.ranks for bucket in self._buckets.values()), None)

    def _share_pool(self, graph: CompiledGraph) -> None:
        """All graphs of a runner lie in the pool of the first."""
        first = next(iter(self._buckets.values()), None)
        if first is not None and first.graph is not graph:
            graph.share_pool(first.graph)

    def _is_below(self, size: int) -> bool:
        return self.floor is None or size < self.floor

    def _trace(self, metadata: BatchMetadata, rows: int) -> Bucket:
        """Run the compiled model on ``rows`` rows; returns its graph, its flat inputs and where the results are."""
        seen: list[tuple[CompiledGraph, list[Any], list[Any]]] = []
        with session.watching(lambda graph, inputs, outputs: seen.append((graph, inputs, outputs))):
            results = self._call_compiled(metadata, rows)
        if len(seen) != 1:
            raise SparsePCGError(f"the model must be one graph, Dynamo called {len(seen)}")
        graph, inputs, outputs = seen[0]
        places = [next((i for i, out in enumerate(outputs) if out is result), None) for result in results]
        if None in places:
            raise SparsePCGError("the model's forward must return tensors that its graph computes")
        return Bucket(graph, inputs, [p for p in places if p is not None], {})

    # Serving.

    def _host(self, batch: Batch, mode: str) -> HostBatch:
        """The checked batch. Raises ValueError naming the field, before anything is written."""
        if mode not in MODES:
            raise ValueError(f"mode: must be one of {MODES}, got {mode!r}")
        host = check_batch(batch, self.kv.num_pages, self.options.debug_checks)
        if self.max_positions is not None and host.max_kv_len > self.max_positions:
            raise ValueError(
                f"batch: prefix + new must be at most the model's {self.max_positions} positions, got {host.max_kv_len}"
            )
        return host

    def _serve(
        self,
        batch: Batch,
        host: HostBatch,
        mode: str,
        further: dict[str, torch.Tensor] | None = None,
        tail_ids: torch.Tensor | None = None,
    ) -> Served:
        """Run the model; ``self.metadata`` holds the batch afterwards unless it was larger than that."""
        metadata, rows = self._buffers(host)
        fill(metadata, batch, host, self._staging, tail_ids)
        for name, value in (further or {}).items():
            rows[name][: host.rows].copy_(value)
        bucket = bucket_for(host.rows, self.sizes) if batch.input_embeds is None else None
        if metadata is not self.metadata:
            bucket = None
        context = self._context(metadata)
        with use_context(context):
            if mode == "eager":
                return Served(self._call_model(metadata, rows, host, batch), metadata.last_rows, None, None)
            if mode == "replay":
                plan = self._plan(bucket, host, batch)
                if plan is not None and bucket is not None:
                    if context.loads is not None:
                        context.loads.wait()  # a graph cannot wait layer by layer
                    context.chosen = {}
                    plan.replay()
                    outputs, places = plan.outputs, self._buckets[bucket].results
                    return Served([outputs[i] for i in places], metadata.last_rows, bucket, plan.variant)
            context.valid_rows_only = mode == "breaks"
            results = self._uncaptured(metadata, rows, host, bucket, batch)
            return Served(results, metadata.last_rows, None, None)

    def _plan(self, bucket: int | None, host: HostBatch, batch: Batch) -> Plan | None:
        """The plan for this batch; None, with the reason counted, where there is none."""
        if self.options.graphs == "off":
            return None
        self.gates.record(ATTENTION, INDEXER)
        short = self._is_short(host)
        if short and self.options.short_graphs:
            self.gates.record(SHORT)
        refusal = self._refusal(bucket, host, batch)
        ranks = self._ranks() if self.options.debug_checks else None
        if ranks is not None:
            facts = {"rows": host.rows, "requests": len(host.new_lens), "max_kv_len": host.max_kv_len}
            ranks.same("a batch", {**facts, "what it is served by": refusal or "a graph"})
        if refusal is not None or bucket is None:
            self._leave(*(refusal or ("size", "no bucket")))
            return None
        plans = self._buckets[bucket].plans
        if self.options.debug_checks:
            self._buckets[bucket].graph.poison()
        return plans["short"] if short and "short" in plans else plans["cut"]

    def _is_short(self, host: HostBatch) -> bool:
        """Whether every row selects all it sees: a matter of kv lengths, never of how many rows there are."""
        return host.max_kv_len <= self.index_topk

    def _refusal(self, bucket: int | None, host: HostBatch, batch: Batch) -> tuple[str, str] | None:
        """Why no captured graph serves this batch: the reason it is counted under, and a sentence."""
        if batch.input_embeds is not None:
            return "multimodal", "a batch with input_embeds runs uncaptured"
        if bucket is None:
            return "size", (
                f"no bucket for {host.rows} rows of {len(host.new_lens)} requests in {self.sizes[0]}..{self.sizes[-1]}"
            )
        if bucket not in self._buckets:
            return "size", f"bucket {bucket} was not captured; call capture() first"
        plans = self._buckets[bucket].plans
        if "cut" not in plans and not ("short" in plans and self._is_short(host)):
            return "capture_failed", f"bucket {bucket} has no graph"
        if self.options.debug_checks and self._static_addresses() != self._addresses:
            return "moved_static", "weights or caches moved after capture; call refresh()"
        return None

    def _leave(self, reason: str, detail: str) -> None:
        if session.frozen() and self.options.strict:
            raise FrozenError(f"after freeze(), with strict=True: {detail} ({reason})")
        count_fallback(reason, detail)

    def _uncaptured(
        self,
        metadata: BatchMetadata,
        further: dict[str, torch.Tensor],
        host: HostBatch,
        bucket: int | None,
        batch: Batch,
    ) -> list[torch.Tensor]:
        """The compiled pieces without graphs: over the bucket's rows, or over the batch's own where none fits."""
        known = self._buckets.get(bucket) if bucket is not None else None
        if known is not None:
            outputs = known.graph.program.run(known.inputs)
            return [outputs[i] for i in known.results]
        if batch.input_embeds is not None:
            return self._call_model(metadata, further, host, batch)
        rows = min(max(bucket or host.rows, 2), metadata.positions.shape[0])  # one row would be a graph of its own
        with session.watching(lambda graph, inputs, outputs: None):
            return self._call_compiled(metadata, rows, further)

    def _call_compiled(
        self, metadata: BatchMetadata, rows: int, further: dict[str, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        arguments = self._row_arguments(metadata, rows, self.further_rows if further is None else further)
        for tensor in arguments.values():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        below = self._compiled_below is not None and self._is_below(rows)
        # Dynamo counts what it compiled per code object: every runner of one model class adds to it.
        with torch._dynamo.config.patch(recompile_limit=64):
            return listed((self._compiled_below if below else self._compiled)(**arguments))

    def _call_model(
        self, metadata: BatchMetadata, further: dict[str, torch.Tensor], host: HostBatch, batch: Batch
    ) -> list[torch.Tensor]:
        embeds = {} if batch.input_embeds is None else {"input_embeds": batch.input_embeds}
        arguments = self._row_arguments(metadata, host.rows, further)
        with together(self._ranks(), "an eager run", arguments.values()):
            return listed(self.model(**arguments, **embeds))

    def _row_arguments(
        self, metadata: BatchMetadata, rows: int, further: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {n: (further[n] if n in further else getattr(metadata, n))[:rows] for n in self._rows}

    def _buffers(self, host: HostBatch) -> tuple[BatchMetadata, dict[str, torch.Tensor]]:
        """The static buffers, or ones of its own for a batch that is larger than these."""
        requests, pages = self.metadata.page_table.shape
        fits = host.rows <= self.sizes[-1] and len(host.new_lens) <= requests and host.max_kv_len <= pages * PAGE
        if fits:
            return self.metadata, self.further_rows
        return self._allocate(host.rows, len(host.new_lens)), self._further_rows(host.rows)

    def serve_checked(self, batch: Batch, mode: str) -> Any:
        """What ``verify`` compares: ``forward`` with all that it takes beside the batch made up from it."""
        raise NotImplementedError

    def verify(self) -> Verification:
        """Replay every captured graph against uncaptured, breaks and eager, on batches of its own in free pages."""
        return verify(self)

    # Addresses.

    def refresh(self) -> None:
        """Look again where weights and caches are; if any moved, on any rank, capture anew (frozen: run uncaptured)."""
        with self._lock:
            now, moved = self._static_addresses(), ""
            if now != self._addresses:
                moved = ", ".join([n for n, address in now.items() if self._addresses.get(n) != address][:8]) or "some"
            if (ranks := self._ranks()) is not None:
                moved = ranks.vote("refresh()", moved or None) or ""  # all capture anew, or none does
            if not moved or not self._buckets:
                return
            logger.warning("moved after capture: %s", moved)
            sharers = [s for s in self._sharers if s.bucket_sizes()]
            self.drop()
            if session.frozen():
                self._leave("moved_static", f"{moved} moved after freeze()")
            else:
                for runner in (self, *sharers):
                    runner.capture(progress=False)

    def drop(self) -> None:
        """Drop the captured graphs (part of ``reset``), also of those that share the pool; batches run uncaptured."""
        with self._lock:
            for sharer in self._sharers:
                sharer.drop()
            for bucket in self._buckets.values():
                bucket.graph.drop()
            self._buckets.clear()
            self._staging.drop()
            self.captured.clear()

    def bucket_sizes(self) -> list[int]:
        """The captured buckets."""
        return sorted(self._buckets)

    def variants(self, bucket: int) -> list[str]:
        """The variants captured for a bucket."""
        return list(self._buckets[bucket].plans)

    def graphs(self) -> list[CompiledGraph]:
        """The split graphs behind the captured buckets (one, unless the model traces differently by size)."""
        return list({id(b.graph): b.graph for b in self._buckets.values()}.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes of the graph pool that all buckets share; 0 for a draft's, which lie in its target's."""
        return sum(g.pool_bytes() for g in self.graphs())

    def _static_addresses(self) -> dict[str, int]:
        found = {name: t.data_ptr() for name, t in self.model.named_parameters()}
        found |= {name: t.data_ptr() for name, t in self.model.named_buffers()}
        context = self._context(self.metadata)
        found |= {f"latent_kv[{i}]": t.data_ptr() for i, t in context.latent_kv.items()}
        found |= {f"index_k[{i}]": t.data_ptr() for i, t in context.index_k.items()}
        return found

    def _context(self, metadata: BatchMetadata) -> ForwardContext:
        context = self.kv.context(metadata, self.options.workspace_bytes)
        context.whole = self.gates.whole
        context.selection_group = self.selection_group
        return context
