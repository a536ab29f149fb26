"""The class that a SGLang platform may name as its piecewise backend (``get_piecewise_backend_cls``).

SGLang splits and compiles; one ``Piece`` stands for each part between two split ops, and captures it once per token
count. The plug-in itself needs none of it: it is for platforms that keep SGLang's own split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparse_pcg.counters import COUNTS, count_fallback
from sparse_pcg.errors import CaptureError


class _Captured:
    """One token count: visits before the capture, then its graph, what it returns, and where it read its inputs."""

    def __init__(self) -> None:
        self.visits = 0
        self.graph: Any = None
        self.output: Any = None
        self.addresses: tuple[int, ...] = ()


class Piece:
    """Nine positional arguments, then called with the piece's flat arguments, in SGLang's phases.

    The first call of all and token counts that are not captured run the general graph, as does a piece without a
    symbolic size. During SGLang's compile warm-up nothing is captured. Then one visit per token count warms up, the
    next captures into the given pool on SGLang's capture stream (without one it runs uncaptured, and says so once),
    and every later one replays.
    Raises CaptureError where a replay is handed a tensor at another address than the capture read: inputs are not
    copied, so it would compute from stale memory.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        compile_config: Any,
        inductor_config: dict[str, Any],
        graph_pool: Any,
        piecewise_compile_index: int,
        total_piecewise_compiles: int,
        sym_shape_indices: list[int],
        compiled_graph_for_general_shape: Callable[..., Any],
        sglang_backend: Any,
    ) -> None:
        self._index, self._last = piecewise_compile_index, piecewise_compile_index == total_piecewise_compiles - 1
        self._pool = graph_pool
        self._sizes = {size: _Captured() for size in compile_config.get_capture_sizes()}
        self._row_arguments = sym_shape_indices
        self._general = compiled_graph_for_general_shape
        self._sglang_backend = sglang_backend
        self._started = False

    def __call__(self, *args: Any) -> Any:
        from . import layout

        if not self._started:
            self._started = True
            if self._last:
                self._sglang_backend.compiler_manager.save_to_file()
            return self._general(*args)
        held = self._sizes.get(args[self._row_arguments[0]]) if self._row_arguments else None
        if held is None or layout.warms_up():
            return self._general(*args)
        if held.graph is not None:
            if _addresses(args) != held.addresses:
                raise CaptureError(
                    f"piece {self._index}: an input of the graph for {args[self._row_arguments[0]]} tokens has moved "
                    "since the capture; captured inputs must stay where they are"
                )
            held.graph.replay()
            return held.output
        held.visits += 1
        if held.visits == 1:
            return self._general(*args)
        stream = layout.capture_stream()
        if stream is None:
            count_fallback("recompile", f"SGLang compiled piece {self._index} while serving")
            return self._general(*args)
        return self._capture(held, stream, args)

    def _capture(self, held: _Captured, stream: Any, args: tuple[Any, ...]) -> Any:
        from sglang.srt.compilation.weak_ref_tensor import weak_ref_tensors

        held.addresses = _addresses(args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = self._general(*args)
            if self._last:  # nothing captured later reads it: its memory may be used again within the pool
                output = weak_ref_tensors(output)
        held.output, held.graph = weak_ref_tensors(output), graph
        COUNTS.captures += 1
        # The owning tensors, so that the pieces captured next get other memory.
        return output


def _addresses(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(a.data_ptr() for a in args if isinstance(a, torch.Tensor))
