"""Which of a bucket's two graphs serves a batch, and the state that both find at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .deployment import Serving
from .layout import segmented
from .recording import CUT, SHORT, Recording, recording
from .segments import RecordedPrefill


class Variants:
    """The recorded graphs of one prefill runner.

    graphs: bucket -> variant -> recorded prefill. chosen: the variant that ``prepare`` chose for the running batch.
    """

    def __init__(self, cuda_graph_runner: Any, serving: Serving) -> None:
        self.serving = serving
        self.graphs: dict[int, dict[str, RecordedPrefill]] = {}
        self.chosen = CUT
        self._held: list[Any] = []
        self._prepare = cuda_graph_runner._prepare_forward_metadata_for_replay
        cuda_graph_runner._prepare_forward_metadata_for_replay = self.prepare

    @property
    def wanted(self) -> tuple[str, ...]:
        """The variants to record, in order."""
        return (CUT, SHORT) if self.serving.short else (CUT,)

    def prepare(self, forward_batch: Any, static_forward_batch: Any, size: Any) -> Any:
        """In place of the runner's preparation of attention metadata: refresh the rows, and choose the variant.

        size: the bucket, or SGLang's key of it.
        """
        bucket = getattr(size, "size", size)
        kept = self.graphs.get(bucket)
        self.chosen = CUT
        if kept is None:
            return self._prepare(forward_batch, static_forward_batch, size)
        self.serving.rows.fill(forward_batch, bucket)
        if SHORT in kept and self.serving.is_short(forward_batch):
            self.chosen = SHORT
        result = None
        if self.chosen == CUT or self.serving.needs_metadata or self.serving.uncaptured:
            result = self._prepare(forward_batch, static_forward_batch, size)
        self.serving.wait_for_loads()
        return result

    def graph(self, bucket: int) -> RecordedPrefill:
        """The graph for the running batch; its first use is logged."""
        found = self.graphs[bucket][self.chosen]
        self.serving.note(bucket, self.chosen, found.plan)
        return found

    @contextmanager
    def static_metadata(self, variant: str, bucket: int, batch: Any = None) -> Iterator[None]:
        """Inside the block attention reads its row lengths from the static buffers, and the variant is recorded.

        batch: the batch that runs, for an uncaptured run; None while capturing, where the dummy sits on slot 0.
        """
        serving = self.serving
        backend, before = serving.attn_backend, serving.attn_backend.forward_metadata
        lens = serving.rows.select_lens[:bucket]
        if batch is None:
            lens.fill_(1)
            # Releases before 0.5.23 drop it for a larger one, and graphs have its address.
            self._held.append(getattr(backend, "_multi_ctas_kv_counter_buffer", None))
        longest = max(before.max_seq_len_k, serving.index_topk)
        backend.forward_metadata = replace(before, dsa_cache_seqlens_int32=lens, max_seq_len_k=longest)
        state = Recording(variant, serving.indexer, serving.rows, segmented._current_capture_var, batch)
        try:
            with recording(state):
                yield
        finally:
            backend.forward_metadata = before

    def report(self, flag: str) -> None:
        """One line in the log."""
        plans = {bucket: kept[CUT].plan for bucket, kept in self.graphs.items()}
        self.serving.report(flag, plans, [kept[SHORT].plan for kept in self.graphs.values() if SHORT in kept])

    def drop(self) -> None:
        """Drop every graph."""
        for kept in self.graphs.values():
            for graph in kept.values():
                graph.drop()
        self.graphs.clear()
        self._held.clear()
