"""What SGLang's ``install_torch_compiled`` gets from our backend: a graph split at SGLang's ops, compiled, recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from sparse_pcg.compiled_graph import CompiledGraph
from sparse_pcg.counters import count_fallback
from sparse_pcg.options import Options
from sparse_pcg.plan import Step
from sparse_pcg.split import CUT

from .layout import eager_on_graph, segmented
from .recording import captured_attention, captured_indexer

ATTENTION = ("sglang.unified_attention_with_output", "sglang.mla_bmm_then_unified_attention")
INDEXER = ("sglang.pcg_dsa_indexer_prefill_split", "sglang.k_cache_and_topk_result")


class ServedGraph:
    """Callable with the graph's flat arguments, in SGLang's phases.

    Not recorded yet, warming up or without a capture stream: the compiled pieces run uncaptured. Second visit of a
    token count inside a capture session: recorded. Afterwards, at that token count: replayed.
    record, tokens: what records a run where SGLang captures, and the bucket of the running forward (0: warming up).
    A graph that Dynamo traces while serving is never recorded, since no capture session is open then.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        compile_config: Any,
        record: Callable[[Callable[[], Any]], tuple[Callable[[], Any], Any] | None],
        tokens: Callable[[], int],
    ) -> None:
        present = {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}
        self._options = Options(
            capture_sizes=tuple(compile_config.get_capture_sizes()),
            compiler=compile_config.compiler,
            cut_ops=tuple(sorted(present & set(compile_config.split_ops))),
            graphs="off",
        )
        self.graph = CompiledGraph(gm, examples, self._options)
        self._record, self._tokens = record, tokens
        self._visits: dict[int, int] = {}
        self._recorded: dict[int, tuple[Callable[[], Any], Any]] = {}
        self._bridges: list[Any] = []  # what live calls returned: graphs read it, and 0.5.14 and before let it go

    def __call__(self, *args: Any) -> Any:
        tokens = self._tokens()
        if tokens not in self._options.capture_sizes:
            return self.graph(*args)
        kept = self._recorded.get(tokens)
        if kept is not None:
            kept[0]()
            return tuple(kept[1])
        self._visits[tokens] = self._visits.get(tokens, 0) + 1
        if self._visits[tokens] > 1:
            inputs = self.graph._complete(args)
            with torch.no_grad():
                done = self._record(lambda: self.run_breaking(inputs))
            if done is not None:
                self._recorded[tokens] = done
                return tuple(done[1])
            count_fallback("recompile", f"SGLang compiled a graph while serving ({tokens} tokens)")
        return self.graph(*args)

    def run_breaking(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the pieces, each cut op as the current recording has it: captured, or between two graphs."""
        program = self.graph.program
        values = [*inputs, *([None] * (program.size - program.inputs))]
        with program.objects.in_table():
            for step, dead in zip(program.steps, program.dead, strict=True):
                args, kwargs = step.bind(values)
                result = _breaking(step)(*args, **kwargs) if step.kind == CUT else step.run(*args, **kwargs)
                if step.kind == CUT and result is not None and segmented._current_capture_var.get() is not None:
                    self._bridges.append(result)
                step.store(result, values)
                for index in dead:
                    values[index] = None
        return program.results(values)


def _breaking(step: Step) -> Callable[..., Any]:
    name = str(step.run).removesuffix(".default")

    def body(*args: Any, **kwargs: Any) -> Any:
        return step.run(*args, **kwargs)

    live = eager_on_graph(True)(body)
    if name not in (*ATTENTION, *INDEXER):
        return live
    hook = captured_attention if name in ATTENTION else captured_indexer
    names = [a.name for a in step.run._schema.arguments]  # type: ignore[attr-defined]
    return lambda *args, **kwargs: hook(live, **dict(zip(names, args, strict=False)), **kwargs)
