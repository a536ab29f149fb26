"""The cut-cost model on SGLang's own graph backends beside ours, in one run: time, start-up, graph memory.

Peers: ``sglang_eager`` and ``sglang_inductor`` (its ``install_torch_compiled`` with its ``CUDAPiecewiseBackend``),
``sglang_breakable`` (its breakable graphs), ``ours`` (a plan of this backend). SGLang must be installed.
"""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from .. import backend, session
from ..compiled_graph import CompiledGraph
from .cut_cost import _Layer, _measure, _Model
from .timing import device, provenance

PEERS = ("sglang_eager", "sglang_inductor", "sglang_breakable", "ours")
_TOUCH = "sparse_pcg_bench.touch"


@dataclass
class Peer:
    """run: one forward; its result lies in ``output()``. build_s: seconds from Dynamo's graph to the last capture.

    pool_bytes: what its graphs' memory pool holds.
    """

    run: Callable[[], Any]
    output: Callable[[], torch.Tensor]
    build_s: float
    pool_bytes: int


def run_peers(
    *,
    layers: int = 60,
    hidden: int = 1024,
    tokens: int = 512,
    repeats: int = 40,
    peers: tuple[str, ...] = PEERS,
    compiler: str = "inductor",
) -> dict[str, Any]:
    """Build each peer with empty compiler caches, then time one forward of each, turn by turn.

    Returns per peer ``host_us``, ``elapsed_us``, ``gpu_us`` (medians, as in cut-cost), ``build_s`` (compile and
    capture; Dynamo's trace not counted), ``pool_bytes`` and ``differs_from_eager``; the head has machine, versions,
    commit and command. compiler: what compiles our pieces.

    Raises ValueError for an unknown peer, a size that is not positive, or a SGLang that is not installed.
    """
    for name, value in (("layers", layers), ("hidden", hidden), ("tokens", tokens), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"peers: {name} must be at least 1, got {value}")
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise ValueError(f"peers: must be among {PEERS}, got {unknown}")
    where = device()
    result: dict[str, Any] = {"bench": "peers", **provenance(), "sglang": _sglang_version()}
    result["model"] = {"layers": layers, "hidden": hidden, "tokens": tokens, "cuts": layers, "compiler": compiler}
    with torch.no_grad(), _one_process_group():
        model = _Model(layers, hidden).to(where, torch.bfloat16)
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=where)
        want = model(x).float()
        _warm_compiler(x)
        built = {name: _build(name, model, x, compiler) for name in peers}
        with torch.compiler.set_stance("fail_on_recompile"):
            times: dict[str, dict[str, Any]] = _measure({name: peer.run for name, peer in built.items()}, repeats)  # type: ignore[assignment]
        for name, peer in built.items():
            peer.run()
            differs = float((peer.output().float() - want).norm() / want.norm())
            times[name].update(build_s=peer.build_s, pool_bytes=peer.pool_bytes, differs_from_eager=differs)
    result["peers"] = times
    return result


def _sglang_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        raise ValueError("peers: SGLang is not installed here; its own backends are what ours is measured by") from None


@contextmanager
def _one_process_group() -> Iterator[None]:
    """SGLang's compile path asks for the rank of this process."""
    made = not torch.distributed.is_initialized()
    if made:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if made:
            torch.distributed.destroy_process_group()


def _build(name: str, model: nn.Module, x: torch.Tensor, compiler: str) -> Peer:
    before = _pool_bytes()
    with _empty_caches():
        if name == "ours":
            run, output, started = _ours(model, x, compiler)
        elif name == "sglang_breakable":
            run, output, started = _breakable(model, x)
        else:
            run, output, started = _piecewise(model, x, name.removeprefix("sglang_"))
    taken = time.perf_counter() - started
    return Peer(run, output, taken, _pool_bytes() - before)


@contextmanager
def _empty_caches() -> Iterator[None]:
    """Folders of compiled code that nothing was written to yet, SGLang's included."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"SGLANG_CACHE_DIR": folder}),
        fresh_cache(),
    ):
        yield


def _pool_bytes() -> int:
    """Bytes in graph memory pools of the allocator."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    found = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in found if tuple(s["segment_pool_id"]) != (0, 0))


def _warm_compiler(x: torch.Tensor) -> None:
    """What a process pays once (imports, the compiler's helpers) is on nobody's account."""
    with _empty_caches():
        torch.compile(lambda y: torch.nn.functional.silu(y * 2 + 1).sum(), dynamic=False)(x)


Built = tuple[Callable[[], Any], Callable[[], torch.Tensor], float]


def _ours(model: nn.Module, x: torch.Tensor, compiler: str) -> Built:
    options: dict[str, Any] = {"capture_sizes": [x.shape[0]], "static_outputs": True, "compiler": compiler}
    compiled = torch.compile(model, backend=backend.sparse_pcg, fullgraph=True, dynamic=False, options=options)
    seen: list[tuple[CompiledGraph, list[Any]]] = []
    with session.watching(lambda graph, inputs, outputs: seen.append((graph, inputs))):
        compiled(x)
    graph, inputs = seen[0]
    plan = graph.plan(inputs)
    assert plan is not None
    return plan.replay, lambda: plan.outputs[0], graph.started


def _piecewise(model: nn.Module, x: torch.Tensor, compiler: str) -> Built:
    """SGLang's phases: trace, compile warm-up, one warm-up and one capture; then its trampoline at each call."""
    from sglang.srt.compilation.backend import SGLangBackend
    from sglang.srt.compilation.compilation_config import CompilationConfig
    from sglang.srt.compilation.compile import install_torch_compiled
    from sglang.srt.compilation.compile_phase import enable_torch_compile_warmup, set_pcg_capture_stream
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import enable_tc_piecewise_cuda_graph

    config = CompilationConfig([x.shape[0]], compiler, False)
    config.add_split_op(_TOUCH)
    pool, stream = _pool_and_stream()
    handed: list[float] = []

    def factory(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        handed.append(time.perf_counter())
        return SGLangBackend(config, pool)(gm, examples)

    body = _with_code_of_its_own(model)
    install_torch_compiled(body, compile_config=config, graph_pool=pool, backend_factory=factory)
    result: list[torch.Tensor] = []

    def run() -> None:
        with enable_tc_piecewise_cuda_graph():
            result[:] = [body(x)]

    with enable_torch_compile_warmup():
        run()
    with set_pcg_capture_stream(stream):
        run()
        run()
    return run, lambda: result[0], handed[0]


def _with_code_of_its_own(model: nn.Module) -> nn.Module:
    """A copy that Dynamo caches apart: SGLang drops what is cached for the code that it compiles."""
    given = _Model.forward
    forward = types.FunctionType(given.__code__.replace(), given.__globals__, given.__name__)
    forward.__annotations__ = dict(given.__annotations__)
    body = copy.deepcopy(model)
    body.__class__ = type("_Model", (_Model,), {"forward": forward})
    return body


def _breakable(model: nn.Module, x: torch.Tensor) -> Built:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        eager_on_graph,
        enable_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (
        BreakableCUDAGraph,
        BreakableCUDAGraphCapture,
    )

    started = time.perf_counter()
    touch = eager_on_graph(True)(lambda y: torch.ops.sparse_pcg_bench.touch(y))

    class Broken(_Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.silu(self.up(self.norm(x)))
            touch(y)
            return x + self.down(y)

    body = copy.deepcopy(model)
    for layer in body.layers:  # type: ignore[union-attr]
        layer.__class__ = Broken
    graph = BreakableCUDAGraph()
    pool, stream = _pool_and_stream()
    for _ in range(2):
        body(x)
    with (
        enable_breakable_cuda_graph(),
        BreakableCUDAGraphCapture(cuda_graph=graph, pool=pool, stream=stream),
    ):
        out = body(x)

    def run(_weights: nn.Module = body) -> None:  # a graph does not keep what it reads alive
        graph.replay()

    return run, lambda: out, started


def _pool_and_stream() -> tuple[Any, Any]:
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream()
