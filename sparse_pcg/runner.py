"""Serve prefill batches of a model: buckets, padding, static buffers, and the modes that prove a replay right."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from custom_ops._register import debug_checks
from custom_ops.batch_metadata import ROW_BUFFERS, BatchMetadata, ForwardContext, use_context

from . import session
from .backend import OwnBackend
from .batch import Batch, HostBatch, check_batch, dummy, fill
from .buckets import bucket_for
from .compiled_graph import CompiledGraph
from .counters import count_fallback, logger
from .errors import CaptureError, FrozenError, SparsePCGError
from .options import Options
from .plan import Plan
from .verification import Verification, verify

MODES = ("replay", "uncaptured", "eager")


class KV(Protocol):
    """What a runner needs of the KV pools."""

    @property
    def num_pages(self) -> int: ...

    def request(self) -> Any: ...

    def context(self, metadata: BatchMetadata | None, workspace_bytes: int = ...) -> ForwardContext: ...


@dataclass(frozen=True)
class PrefillOutput:
    """logits: [B, vocab], of each request's last token. hidden: [T, hidden], after the final norm.

    bucket, variant: of the graph that was replayed, or None where none was.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    bucket: int | None = None
    variant: str | None = None


@dataclass(frozen=True)
class Captured:
    """One captured bucket: seconds it took and bytes by which the pool grew."""

    bucket: int
    variants: tuple[str, ...]
    seconds: float
    nbytes: int


@dataclass
class _Bucket:
    graph: CompiledGraph
    inputs: list[Any]
    hidden: int  # which graph output is the hidden states
    plans: dict[str, Plan]


class PrefillRunner:
    """Runs ``model`` over batches, replaying captured graphs wherever a bucket fits.

    model: a module with ``forward(**rows) -> hidden`` whose required parameters are named like the row buffers of
        ``BatchMetadata`` (``input_ids``, ``positions``, ``kv_lens``, ...), with ``head(hidden) -> logits`` and a
        ``config.index_topk``.
    kv: the KV pools (``sparse_pcg.kv.PagedKV``).

    Raises ValueError naming a required parameter of ``forward`` that no buffer has.
    """

    def __init__(self, model: torch.nn.Module, kv: KV, options: Options | None = None) -> None:
        self.model, self.kv = model, kv
        self.options = options or Options()
        self._rows = _row_parameters(model)
        self.device = next(iter(model.parameters())).device
        self.sizes = tuple(s for s in self.options.capture_sizes if s >= 2)
        if not self.sizes:
            raise ValueError(f"options: capture_sizes must hold a size of at least 2, got {self.options.capture_sizes}")
        self.index_topk: int = model.config.index_topk  # type: ignore[union-attr,assignment]
        largest = self.sizes[-1]
        self.metadata = BatchMetadata.allocate(largest, largest, kv.num_pages, self.index_topk, self.device)
        self.captured: list[Captured] = []
        self._buckets: dict[int, _Bucket] = {}
        self._addresses: dict[str, int] = {}
        self._lock = threading.RLock()
        session.RESETTABLE.add(self)
        # A backend of its own: caches, layout and pool of another runner of the same model class are not this one's.
        self._compiled = torch.compile(model, backend=OwnBackend(), fullgraph=True, options=self.options.to_dict())

    # Capture.

    def capture(self, progress: bool = True) -> list[Captured]:
        """Compile the model and capture every bucket, big to small. Captures nothing twice.

        A bucket whose capture fails is logged, counted (``capture_failed``) and served uncaptured.
        """
        if session.frozen():
            raise FrozenError("capture() was called after freeze()")
        with self._lock, _no_grad():
            for size in _tracked(sorted(set(self.sizes) - set(self._buckets), reverse=True), progress):
                start, before = time.perf_counter(), self.pool_bytes
                self._buckets[size] = bucket = self._prepare(size)
                took, grown = time.perf_counter() - start, self.pool_bytes - before
                self.captured.append(Captured(size, tuple(bucket.plans), took, grown))
                logger.info("captured bucket %d: %.2f s, %d bytes", size, took, grown)
            self._addresses = self._static_addresses()
        return self.captured

    def _prepare(self, size: int) -> _Bucket:
        """Warm up and record one bucket; all it writes is the dummy page."""
        batch, host = dummy(size, self.device)
        fill(self.metadata, batch, host)
        with use_context(self._context(self.metadata)):
            graph, inputs, hidden = self._trace(self.metadata, size)
            bucket = _Bucket(graph, inputs, hidden, {})
            variants = ["cut"]
            if self.options.short_graphs and graph.program.has_short:
                variants.append("short")
            for variant in variants:
                try:
                    if variant == "short":
                        graph.program.run(inputs, short=True)
                    plan = graph.plan(inputs, variant=variant, label=f", bucket {size}")
                except CaptureError as error:
                    count_fallback("capture_failed", f"bucket {size}, variant {variant}: {error}")
                    continue
                if plan is not None:
                    bucket.plans[variant] = plan
        return bucket

    def _trace(self, metadata: BatchMetadata, rows: int) -> tuple[CompiledGraph, list[Any], int]:
        """Run the compiled model on ``rows`` rows; returns its graph, its flat inputs and where the result is."""
        seen: list[tuple[CompiledGraph, list[Any], list[Any]]] = []
        with session.watching(lambda graph, inputs, outputs: seen.append((graph, inputs, outputs))):
            result = self._call_compiled(metadata, rows)
        if len(seen) != 1:
            raise SparsePCGError(f"the model must be one graph, Dynamo called {len(seen)}")
        graph, inputs, outputs = seen[0]
        place = next((i for i, out in enumerate(outputs) if out is result), None)
        if place is None:
            raise SparsePCGError("the model's forward must return one tensor that its graph computes")
        return graph, inputs, place

    # Serving.

    def forward(self, batch: Batch, mode: str = "replay") -> PrefillOutput:
        """Prefill ``batch`` and write its KV.

        mode: "replay"; "uncaptured", the same compiled pieces and bucket without graphs (bitwise the same); "eager",
        the model itself on the unpadded rows.
        Raises ValueError naming the field of a batch that does not hold together; nothing is written then.
        """
        if mode not in MODES:
            raise ValueError(f"mode: must be one of {MODES}, got {mode!r}")
        host = check_batch(batch, self.kv.num_pages, self.options.debug_checks)
        longest = getattr(self.model.config, "max_positions", host.max_kv_len)
        if host.max_kv_len > longest:
            raise ValueError(
                f"batch: prefix + new must be at most the model's {longest} positions, got {host.max_kv_len}"
            )
        if self.options.graphs == "off" and mode == "replay":
            mode = "uncaptured"
        with self._lock, _no_grad(), debug_checks(self.options.debug_checks):
            if host.rows == 0:
                return self._empty()
            return self._forward(batch, host, mode)

    def _forward(self, batch: Batch, host: HostBatch, mode: str) -> PrefillOutput:
        fits = host.rows <= self.sizes[-1]
        metadata = self.metadata if fits else self._larger(host)
        fill(metadata, batch, host)
        bucket = bucket_for(host.rows, self.sizes) if batch.input_embeds is None else None
        variant: str | None = None
        with use_context(self._context(metadata)):
            if mode == "eager":
                hidden = self.model(**self._row_arguments(metadata, host.rows), **_embeds(batch))
            elif mode == "replay" and (plan := self._plan(bucket, host, batch)) is not None:
                assert bucket is not None
                variant = plan.variant
                plan.replay()
                hidden = plan.outputs[self._buckets[bucket].hidden]
            else:
                hidden = self._uncaptured(metadata, host, bucket, batch)
            hidden = hidden[: host.rows]
            if variant is not None and not self.options.static_outputs:
                hidden = hidden.clone()
            last = torch.tensor(host.last_rows, device=self.device)
            logits = self.model.head(hidden[last])  # type: ignore[operator]
        return PrefillOutput(logits, hidden, bucket if variant else None, variant)

    def _plan(self, bucket: int | None, host: HostBatch, batch: Batch) -> Plan | None:
        """The plan for this batch; None, with the reason counted, where there is none."""
        refusal = self._refusal(bucket, host, batch)
        if refusal is not None or bucket is None:
            self._leave(*(refusal or ("size", "no bucket")))
            return None
        plans = self._buckets[bucket].plans
        if self.options.debug_checks:
            self._buckets[bucket].graph.poison()
        return plans["short"] if self._is_short(host) and "short" in plans else plans["cut"]

    def _is_short(self, host: HostBatch) -> bool:
        """Whether every row selects all it sees: a matter of kv lengths, never of how many rows there are."""
        return host.max_kv_len <= self.index_topk

    def _refusal(self, bucket: int | None, host: HostBatch, batch: Batch) -> tuple[str, str] | None:
        """Why no captured graph serves this batch: the reason it is counted under, and a sentence."""
        if batch.input_embeds is not None:
            return "multimodal", "a batch with input_embeds runs uncaptured"
        if bucket is None:
            return "size", f"no bucket for {host.rows} rows in {self.sizes[0]}..{self.sizes[-1]}"
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

    def _uncaptured(self, metadata: BatchMetadata, host: HostBatch, bucket: int | None, batch: Batch) -> torch.Tensor:
        """The compiled pieces without graphs: over the bucket's rows, or over the batch's own where none fits."""
        known = self._buckets.get(bucket) if bucket is not None else None
        if known is not None:
            return known.graph.program.run(known.inputs)[known.hidden]
        if batch.input_embeds is not None:
            return self.model(**self._row_arguments(metadata, host.rows), **_embeds(batch))
        rows = min(max(bucket or host.rows, 2), metadata.positions.shape[0])  # one row would be a graph of its own
        with session.watching(lambda graph, inputs, outputs: None):
            return self._call_compiled(metadata, rows)

    def _call_compiled(self, metadata: BatchMetadata, rows: int) -> torch.Tensor:
        # Dynamo counts what it compiled per code object: every runner of one model class adds to it.
        with torch._dynamo.config.patch(recompile_limit=64):
            return self._compiled(**self._row_arguments(metadata, rows, mark=True))

    def verify(self) -> Verification:
        """Replay every captured graph against uncaptured and eager, on batches of its own in free pages."""
        return verify(self)

    # Addresses.

    def refresh(self) -> None:
        """Look again where weights and caches are; if any moved, capture anew (after ``freeze()``: uncaptured)."""
        with self._lock:
            now = self._static_addresses()
            if now == self._addresses or not self._buckets:
                return
            moved = [name for name, address in now.items() if self._addresses.get(name) != address]
            logger.warning("moved after capture: %s", ", ".join(moved[:8]))
            self.drop()
            if session.frozen():
                self._leave("moved_static", f"{', '.join(moved[:8])} moved after freeze()")
            else:
                self.capture(progress=False)

    def drop(self) -> None:
        """Drop the captured graphs (part of ``reset``); batches run uncaptured until ``capture()``."""
        with self._lock:
            for bucket in self._buckets.values():
                bucket.graph.drop()
            self._buckets.clear()
            self.captured.clear()

    def bucket_sizes(self) -> list[int]:
        """The captured buckets."""
        return sorted(self._buckets)

    def variants(self, bucket: int) -> list[str]:
        """The variants captured for a bucket."""
        return list(self._buckets[bucket].plans)

    def plan_of(self, output: PrefillOutput) -> Plan | None:
        """The plan that gave ``output``; None if it was not a replay, or the plan is gone."""
        bucket = self._buckets.get(output.bucket) if output.bucket is not None else None
        return bucket.plans.get(output.variant or "") if bucket is not None else None

    def graphs(self) -> list[CompiledGraph]:
        """The split graphs behind the captured buckets (one, unless the model traces differently by size)."""
        return list({id(b.graph): b.graph for b in self._buckets.values()}.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes of the graph pool that all buckets share."""
        return sum(g.pool_bytes() for g in self.graphs())

    def _static_addresses(self) -> dict[str, int]:
        found = {name: t.data_ptr() for name, t in self.model.named_parameters()}
        found |= {name: t.data_ptr() for name, t in self.model.named_buffers()}
        context = self._context(self.metadata)
        found |= {f"latent_kv[{i}]": t.data_ptr() for i, t in context.latent_kv.items()}
        found |= {f"index_k[{i}]": t.data_ptr() for i, t in context.index_k.items()}
        return found

    # Small parts.

    def _context(self, metadata: BatchMetadata) -> ForwardContext:
        return self.kv.context(metadata, self.options.workspace_bytes)

    def _larger(self, host: HostBatch) -> BatchMetadata:
        """Buffers of its own for a batch above the largest bucket."""
        requests = len(host.new_lens)
        return BatchMetadata.allocate(host.rows, requests, self.kv.num_pages, self.index_topk, self.device)

    def _row_arguments(self, metadata: BatchMetadata, rows: int, mark: bool = False) -> dict[str, torch.Tensor]:
        arguments = {name: getattr(metadata, name)[:rows] for name in self._rows}
        if mark:
            for tensor in arguments.values():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return arguments

    def _empty(self) -> PrefillOutput:
        weight = next(iter(self.model.parameters()))
        hidden = torch.empty(0, self.model.config.hidden_size, dtype=weight.dtype, device=self.device)  # type: ignore[union-attr,arg-type]
        return PrefillOutput(self.model.head(hidden), hidden)  # type: ignore[operator]


def _embeds(batch: Batch) -> dict[str, torch.Tensor]:
    return {} if batch.input_embeds is None else {"input_embeds": batch.input_embeds}


def _row_parameters(model: torch.nn.Module) -> list[str]:
    rows = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name in ROW_BUFFERS:
            rows.append(name)
        elif parameter.default is inspect.Parameter.empty:
            raise ValueError(f"model.forward: no row buffer for required parameter {name!r}, there are {ROW_BUFFERS}")
    return rows


@contextmanager
def _no_grad() -> Iterator[None]:
    """One grad mode for compiling, capturing and serving: Dynamo makes a graph per mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _tracked(sizes: list[int], progress: bool) -> Any:
    if not progress or not sizes:
        return sizes
    from rich.progress import track

    return track(sizes, description="capturing", transient=True)


__all__ = ["MODES", "Captured", "PrefillOutput", "PrefillRunner"]
