"""SGLang 0.5.13's piecewise prefill graphs: one class is what later releases split into a runner and its backends."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor import piecewise_cuda_graph_runner as sglang_runner

from .compiled_prefill import CompiledPrefill
from .deployment import Serving
from .recording import replaced

logger = logging.getLogger("sparse_pcg")


class SparsePCGPiecewiseRunner(sglang_runner.PiecewiseCudaGraphRunner):  # type: ignore[misc]
    """A drop-in for SGLang's runner: its buffers, batches and compile path, with our backend.

    prefill: None where ours cannot serve, and SGLang's own backend compiles.
    """

    prefill: CompiledPrefill | None = None

    def __init__(self, model_runner: Any, release: str) -> None:
        own = sglang_runner.install_torch_compiled

        def install(body: Any, **kwargs: Any) -> None:
            try:
                self.prefill = CompiledPrefill(self, Serving(self, release))
            except Exception:
                logger.exception("sparse_pcg: SGLang %s: cannot serve, SGLang's own graphs are used", release)
                own(body, **kwargs)
            else:
                self._init_forward_metadata: Callable[[Any], None] = model_runner.attn_backend.init_forward_metadata
                self.prefill.install(body, **kwargs)

        with replaced(sglang_runner, "install_torch_compiled", install):
            super().__init__(model_runner)  # compiles and captures

    def capture(self) -> None:
        """SGLang's, and one line in the log when all buckets are captured."""
        super().capture()
        if self.prefill is not None:
            self.prefill.report("piecewise")

    def capture_one_batch_size(self, num_tokens: int) -> None:
        """SGLang's."""
        if self.prefill is None:
            return super().capture_one_batch_size(num_tokens)
        with self.prefill.capturing(num_tokens):
            super().capture_one_batch_size(num_tokens)
        return None

    def _prepare_forward_metadata_for_replay(self, forward_batch: Any, static_forward_batch: Any, size: int) -> None:
        """What runners of later releases call, and ``Variants`` stands in for."""
        self._init_forward_metadata(forward_batch)

    def replay(self, forward_batch: Any, **kwargs: Any) -> Any:
        """SGLang's, around a replay of the body; the head runs as SGLang runs it."""
        if self.prefill is None:
            return super().replay(forward_batch, **kwargs)
        # As SGLang looks it up.
        bucket = self.capture_num_tokens[bisect_left(self.capture_num_tokens, len(forward_batch.input_ids))]

        def prepare(batch: Any) -> None:
            self._prepare_forward_metadata_for_replay(batch, None, bucket)

        with (
            replaced(self.model_runner.attn_backend, "init_forward_metadata", prepare),
            self.prefill.replaying(bucket),
        ):
            return super().replay(forward_batch, **kwargs)
