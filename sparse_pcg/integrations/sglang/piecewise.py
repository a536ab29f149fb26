"""SGLang's ``tc_piecewise`` prefill graphs: our backend compiles what Dynamo traced, and records it with fewer cuts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.compilation.compile import install_torch_compiled
from sglang.srt.compilation.compile_phase import get_pcg_capture_stream, is_in_torch_compile_warmup
from sglang.srt.model_executor.runner_backend.tc_piecewise_cuda_graph_backend import TcPiecewiseCudaGraphBackend
from torch import fx

from .deployment import Serving
from .segments import RecordedPrefill, record_prefill
from .served_graph import ServedGraph
from .variants import Variants, forward_as

logger = logging.getLogger("sparse_pcg")


class SparsePCGPiecewiseBackend(TcPiecewiseCudaGraphBackend):  # type: ignore[misc]
    """A drop-in for SGLang's backend of the same flag: its compile path with our backend as ``backend_factory``."""

    def __init__(self, cuda_graph_runner: Any, serving: Serving) -> None:
        self.serving = serving
        self.variants = Variants(cuda_graph_runner, serving) if serving.attention else None
        self._results: dict[int, Any] = {}
        self._bodies: dict[int, Any] = {}
        self._uncaptured: dict[int, Callable[[], Any]] = {}
        self._bucket = 0
        self._inner: Any = None
        self._pool_given: Any = None
        super().__init__(cuda_graph_runner)

    def install_compile(self, language_model: Any, *, compile_config: Any, graph_pool: Any, **kwargs: Any) -> None:
        """SGLang's installation, with our backend."""
        self._inner, self._pool_given = language_model, graph_pool

        def factory(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            try:
                return ServedGraph(gm, examples, compile_config, self._record, self._tokens)
            except Exception:
                logger.exception("sparse_pcg: SGLang %s tc_piecewise: its own backend is used", self.serving.release)
                from sglang.srt.compilation.backend import SGLangBackend

                self.variants = None
                return SGLangBackend(compile_config, graph_pool)(gm, examples)

        install_torch_compiled(
            language_model, compile_config=compile_config, graph_pool=graph_pool, backend_factory=factory, **kwargs
        )

    def _tokens(self) -> int:
        """The bucket of the running forward; 0 while SGLang warms its compiler up."""
        return 0 if is_in_torch_compile_warmup() else self._bucket

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """SGLang's, and one line in the log when all buckets are captured."""
        with super().capture_session(stream):
            yield
        if self.variants is not None:
            self.variants.report("tc_piecewise")

    def _record(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any] | None:
        """Record ``run`` where SGLang is capturing, and give what replays it; None where it is not."""
        stream = get_pcg_capture_stream()
        if stream is None:
            return None
        size, variants = self._bucket, self.variants
        if variants is None or not self.serving.serves(size):
            with record_prefill("cut", pool=self._pool_given, stream=stream, barrier=self._tp_group.barrier) as graph:
                result = run()
            return graph.replay, result
        recorded: dict[str, RecordedPrefill] = {}
        for variant in reversed(variants.wanted):
            with variants.static_metadata(variant, size):
                self._device_module.synchronize()
                run()  # what only this variant launches warms up uncaptured
                with record_prefill(
                    variant, pool=self._pool_given, stream=stream, barrier=self._tp_group.barrier
                ) as recorded[variant]:
                    result = self._into(size, run())
        variants.graphs[size] = recorded
        self._uncaptured[size] = lambda: self._into(size, run())
        return (lambda: variants.graph(size).replay()), result

    def _into(self, size: int, outputs: Sequence[Any]) -> Sequence[Any]:
        """Both variants leave their outputs in the same buffers."""
        held = self._results.get(size)
        if held is None:
            # Allocated here, while capturing: memory of the graphs' pool, at an address that stays.
            held = self._results[size] = [torch.empty_like(o) if isinstance(o, torch.Tensor) else o for o in outputs]
        for target, output in zip(held, outputs, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(output)
        return held

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        """SGLang's, remembering what the model's body returned for this bucket."""
        self._bucket = shape_key.size
        forward = self._inner.forward
        with forward_as(self._inner, lambda *a, **k: self._remember(shape_key.size, forward(*a, **k))):
            super().capture_one(shape_key, forward_fn, *args, **kwargs)

    def _remember(self, size: int, result: Any) -> Any:
        self._bodies[size] = result
        return result

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replay the variant chosen for the batch, past Dynamo's guards; the head runs as SGLang runs it."""
        size = self._bucket = shape_key.size
        variants = self.variants
        if variants is None or size not in variants.graphs:
            return super().replay(shape_key, static_forward_batch, **kwargs)
        graph = variants.graph(size)

        def body(*args: Any, **kwargs: Any) -> Any:
            if self.serving.uncaptured:
                with variants.static_metadata(variants.chosen, size, static_forward_batch):
                    self._uncaptured[size]()
            else:
                graph.replay()
            return self._bodies[size]

        with forward_as(self._inner, body):
            return super().replay(shape_key, static_forward_batch, **kwargs)

    def cleanup(self) -> None:
        """Drop every graph."""
        if self.variants is not None:
            self.variants.drop()
        self._results.clear()
        self._bodies.clear()
        self._uncaptured.clear()
        super().cleanup()
