"""SGLang's ``tc_piecewise`` prefill graphs: its compile path with our backend as ``backend_factory``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.runner_backend.tc_piecewise_cuda_graph_backend import TcPiecewiseCudaGraphBackend

from .compiled_prefill import CompiledPrefill
from .deployment import Serving
from .variants import Variants


class SparsePCGPiecewiseBackend(TcPiecewiseCudaGraphBackend):  # type: ignore[misc]
    """A drop-in for SGLang's backend of the same flag."""

    def __init__(self, cuda_graph_runner: Any, serving: Serving) -> None:
        self.serving = serving
        self.prefill = CompiledPrefill(cuda_graph_runner, serving)
        super().__init__(cuda_graph_runner)

    @property
    def variants(self) -> Variants | None:
        """The two graphs per bucket; None where attention stays a cut."""
        return self.prefill.variants

    def install_compile(self, language_model: Any, **kwargs: Any) -> None:
        """SGLang's installation, with our backend."""
        self.prefill.install(language_model, **kwargs)

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """SGLang's, and one line in the log when all buckets are captured."""
        with super().capture_session(stream):
            yield
        self.prefill.report("tc_piecewise")

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        """SGLang's."""
        with self.prefill.capturing(shape_key.size):
            super().capture_one(shape_key, forward_fn, *args, **kwargs)

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """SGLang's, around a replay of the body; the head runs as SGLang runs it."""
        # 0.5.14 gives the bucket itself.
        with self.prefill.replaying(getattr(shape_key, "size", shape_key)):
            return super().replay(shape_key, static_forward_batch, **kwargs)

    def cleanup(self) -> None:
        """Drop every graph."""
        self.prefill.drop()
        super().cleanup()
