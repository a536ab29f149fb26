"""SGLang's ``breakable`` prefill graphs with fewer breaks: two variants per bucket behind its own backend interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

from .deployment import Serving
from .draft import Draft, write_seed
from .recording import CUT, replaced
from .segments import RecordedPrefill, pool_scope, record_prefill
from .variants import Variants


@contextmanager
def _experts_in_order(body: Any) -> Iterator[None]:
    """Inside the block shared experts are launched before routed ones that write over the input of both.

    Some releases launch them after, on a stream beside. In a graph both start at once, and the shared ones have read
    long before the routed ones write; launched one by one they come too late.
    """
    streams = {}
    for block in body.modules():
        config = getattr(getattr(block, "experts", None), "moe_runner_config", None)
        if hasattr(block, "forward_normal_dual_stream") and getattr(config, "inplace", False):
            streams[block] = block.alt_stream
    try:
        for block in streams:
            block.alt_stream = None
        yield
    finally:
        for block, stream in streams.items():
            block.alt_stream = stream


class SparsePCGBreakableBackend(BreakableCudaGraphBackend):  # type: ignore[misc]
    """A drop-in for SGLang's backend of the same flag.

    Per bucket a ``cut`` graph, and a ``short`` one without any cut for batches in which no request has more than
    ``index_topk`` tokens. A bucket below the floor of its attention kernel is captured as SGLang does.
    """

    _shared_output_buffer: Any

    def __init__(self, cuda_graph_runner: Any, serving: Serving, **kwargs: Any) -> None:
        super().__init__(cuda_graph_runner, **kwargs)
        self.serving = serving
        self._runner = cuda_graph_runner
        self.variants = Variants(cuda_graph_runner, serving)
        self.draft = Draft(cuda_graph_runner) if serving.draft else None
        self._forward_fns: dict[int, Callable[[], Any]] = {}
        self._body_forward: Any = None
        self._kept: list[Any] = []
        self._replaying = pool_scope("replay")

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """SGLang's, and one line in the log when all buckets are captured."""
        with super().capture_session(stream):
            yield
        self.variants.report("breakable")

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Warm up as SGLang does, then record the variants. ``capture_inputs`` are only kept alive."""
        size = shape_key.size
        if not self.serving.serves(size):
            with self._selection_kept(size, CUT):
                return super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)
        for _ in range(2):
            warm = self._settled(forward_fn)
            if post_warmup_hook is not None:
                post_warmup_hook()
        if self._shared_output_buffer is None:
            capacity = getattr(self._runner, "cuda_graph_output_capacity_rows", lambda output: None)(warm)
            self._shared_output_buffer = self._alloc_full_buffer(warm, size if capacity is None else capacity)
        recorded: dict[str, RecordedPrefill] = {}
        for variant in self.variants.wanted:
            with self.variants.static_metadata(variant, size):
                self._settled(forward_fn)  # what only this variant launches warms up uncaptured
                with (
                    self._selection_kept(size, variant),
                    record_prefill(
                        variant, pool=self._pool, stream=self._capture_stream, barrier=self._tp_group.barrier
                    ) as recorded[variant],
                ):
                    rows = self._write_output(forward_fn(), size)
        self.variants.graphs[size] = recorded
        self._graphs[shape_key] = recorded[CUT]
        self._outputs[shape_key] = self._slice_output(self._shared_output_buffer, rows)
        self._forward_fns[size], self._body_forward = forward_fn, self._runner.layer_model.forward
        self._kept.append(capture_inputs)
        return None

    def _selection_kept(self, size: int, variant: str) -> AbstractContextManager[None]:
        return nullcontext() if self.draft is None else self.draft.captured(size, variant)

    def _settled(self, forward_fn: Callable[[], Any]) -> Any:
        self._device_module.synchronize()
        self._tp_group.barrier()
        return forward_fn()

    def _write_output(self, output: Any, size: int) -> int:
        rows: int = self._output_rows(output, size)
        self._copy_output_to_buffer(output, self._shared_output_buffer, rows)
        return rows

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replay the variant chosen for the batch; a draft's seed is written after it."""
        size, draft = shape_key.size, self.draft
        served = size in self.variants.graphs
        if served and self.serving.uncaptured:
            selection = self._run_uncaptured(size, static_forward_batch)
        else:
            if served:
                with self._replaying():
                    self.variants.graph(size).replay()
            else:
                super().replay(shape_key, static_forward_batch, **kwargs)
            selection = None if draft is None else draft.selections[size, self.variants.chosen]
        if draft is not None:
            write_seed(static_forward_batch, selection)
        return self._outputs[shape_key]

    def _run_uncaptured(self, size: int, static_forward_batch: Any) -> Any:
        """The same kernels on the same buffers, launched one by one: what a replay must equal bitwise.

        Gives a draft's selection.
        """
        body = self._runner.layer_model
        with (
            self.variants.static_metadata(self.variants.chosen, size, static_forward_batch),
            self.serving.keeping_context(),
            replaced(body, "forward", self._body_forward),  # which is this ``replay`` while SGLang replays
            _experts_in_order(body),
            nullcontext([None]) if self.draft is None else self.draft.selection() as found,
        ):
            self._write_output(self._forward_fns[size](), size)
        return found[-1]

    def cleanup(self) -> None:
        """Drop every graph."""
        self.variants.drop()
        self._forward_fns.clear()
        self._kept.clear()
        super().cleanup()
