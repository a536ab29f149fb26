"""A prefill that SGLang traces with ``torch.compile``: compiled by our backend, recorded per bucket, replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.compilation.compile import install_torch_compiled
from torch import fx

from . import layout
from .deployment import Serving
from .recording import replaced
from .segments import RecordedPrefill, record_prefill
from .served_graph import ServedGraph
from .variants import Variants

logger = logging.getLogger("sparse_pcg")


class CompiledPrefill:
    """The model's body of one prefill runner, from its compilation to its replays.

    variants: the two graphs per bucket; None where attention stays a cut, or SGLang's own backend compiles.
    """

    def __init__(self, cuda_graph_runner: Any, serving: Serving) -> None:
        self.serving = serving
        self.variants = Variants(cuda_graph_runner, serving) if serving.attention else None
        self._plain: dict[int, RecordedPrefill] = {}  # buckets with SGLang's cuts
        self._results: dict[int, Any] = {}
        self._bodies: dict[int, Any] = {}
        self._uncaptured: dict[int, Callable[[], Any]] = {}
        self._bucket = 0
        self._body: Any = None
        self._pool: Any = None
        self._synchronize = cuda_graph_runner.device_module.synchronize
        self._barrier = cuda_graph_runner.model_runner.tp_group.barrier

    def install(self, body: Any, *, compile_config: Any, graph_pool: Any, **kwargs: Any) -> None:
        """SGLang's installation, with our backend."""
        self._body, self._pool = body, graph_pool

        def factory(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            try:
                return ServedGraph(gm, examples, compile_config, self._record, self._tokens)
            except Exception:
                logger.exception("sparse_pcg: SGLang %s: its own backend compiles the prefill", self.serving.release)
                from sglang.srt.compilation.backend import SGLangBackend

                self.variants = None
                return SGLangBackend(compile_config, graph_pool)(gm, examples)

        install_torch_compiled(
            body, compile_config=compile_config, graph_pool=graph_pool, backend_factory=factory, **kwargs
        )

    def _tokens(self) -> int:
        """The bucket of the running forward; 0 while SGLang warms its compiler up."""
        return 0 if layout.warms_up() else self._bucket

    def report(self, flag: str) -> None:
        """One line in the log, when all buckets are captured."""
        if self.variants is not None and self.variants.graphs:
            self.variants.report(flag)
        elif self._plain:
            self.serving.report(flag, {bucket: graph.plan for bucket, graph in self._plain.items()})

    def _record(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any] | None:
        """Record ``run`` where SGLang is capturing, and give what replays it; None where it is not."""
        stream = layout.capture_stream()
        if stream is None:
            return None
        size, variants = self._bucket, self.variants
        if variants is None or not self.serving.serves(size):
            with record_prefill("cut", pool=self._pool, stream=stream, barrier=self._barrier) as graph:
                result = run()
            self._plain[size] = graph
            return graph.replay, result
        recorded: dict[str, RecordedPrefill] = {}
        for variant in reversed(variants.wanted):
            with variants.static_metadata(variant, size):
                self._synchronize()
                run()  # what only this variant launches warms up uncaptured
                with record_prefill(variant, pool=self._pool, stream=stream, barrier=self._barrier) as graph:
                    result = self._into(size, run())
                recorded[variant] = graph
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

    @contextmanager
    def capturing(self, bucket: int) -> Iterator[None]:
        """Inside the block SGLang captures a bucket; what the body returned for it is kept."""
        self._bucket = bucket
        forward = self._body.forward

        def remember(*args: Any, **kwargs: Any) -> Any:
            self._bodies[bucket] = result = forward(*args, **kwargs)
            return result

        with replaced(self._body, "forward", remember):
            yield

    @contextmanager
    def replaying(self, bucket: int) -> Iterator[None]:
        """Inside the block the body is a replay of the variant chosen for the batch, past Dynamo's guards."""
        self._bucket = bucket
        variants = self.variants
        if variants is None or bucket not in variants.graphs:
            yield
            return

        def body(*args: Any, **kwargs: Any) -> Any:
            graph = variants.graph(bucket)
            if self.serving.uncaptured:
                with variants.static_metadata(variants.chosen, bucket, layout.running_batch()):
                    self._uncaptured[bucket]()
            else:
                graph.replay()
            return self._bodies[bucket]

        with replaced(self._body, "forward", body):
            yield

    def drop(self) -> None:
        """Drop every graph."""
        if self.variants is not None:
            self.variants.drop()
        for graph in self._plain.values():
            graph.drop()
        for held in (self._plain, self._results, self._bodies, self._uncaptured):
            held.clear()
