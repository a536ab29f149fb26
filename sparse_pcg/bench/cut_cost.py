"""What a cut costs: a model of identical layers with one in-place op between pieces, run in every way there is.

The model: per layer an RMS norm, two products of hidden size, a residual, and ``touch``, an op that halves its argument
in place and is tagged ``cudagraph_unsafe``. The peers run the same weights: PyTorch eager, ``torch.compile`` as it is
and with ``reduce-overhead`` and graph partition, one full graph with no cut, a hand-written loop over graphs and the
op, the same with the op's Python function in place of the op (``bare_loop``: possible where one has written the op),
and this backend, as a plan and as a plain call of the compiled module.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import backend, session
from ..compiled_graph import CompiledGraph
from ..plan import Program
from ..split import CUT, PIECE
from .timing import device, provenance

PEERS = ("eager", "compile", "reduce_overhead", "full_graph", "loop", "bare_loop", "plan", "call")
_LIBRARY = torch.library.Library("sparse_pcg_bench", "FRAGMENT")
_HEAD_START_CYCLES = 20_000_000  # of the GPU's clock, about 11 ms: longer than the host takes for one forward


def _touch(x: torch.Tensor) -> None:
    x.mul_(0.5)


_LIBRARY.define("touch(Tensor(a!) x) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
_LIBRARY.impl("touch", _touch, "CompositeExplicitAutograd")
_LIBRARY._register_fake("touch", lambda x: None)


class _Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, hidden, bias=False)
        self.down = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(self.up(self.norm(x)))
        torch.ops.sparse_pcg_bench.touch(y)
        return x + self.down(y)


class _Model(nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_cut_cost(
    *,
    layers: int = 60,
    hidden: int = 1024,
    tokens: int = 512,
    repeats: int = 40,
    peers: tuple[str, ...] = PEERS,
    compiler: str = "inductor",
) -> dict[str, Any]:
    """Time one forward of each peer, turn by turn.

    Returns per peer ``host_us`` (until the call returns), ``elapsed_us`` (on the GPU, from an idle start) and
    ``gpu_us`` (the same with the host far ahead), medians, and per cut what the GPU takes over the full graph; the head
    has machine, versions, commit and command. Without a GPU all are wall-clock times, of emulated graphs.

    Raises ValueError for an unknown peer or a size that is not positive.
    """
    for name, value in (("layers", layers), ("hidden", hidden), ("tokens", tokens), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"cut_cost: {name} must be at least 1, got {value}")
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise ValueError(f"cut_cost: peers must be among {PEERS}, got {unknown}")
    where = device()
    with torch.no_grad():
        model = _Model(layers, hidden).to(where, torch.bfloat16)
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=where)
        runs, wrong = _peers(model, x, peers, compiler)
        with torch.compiler.set_stance("fail_on_recompile"):
            times = _measure(runs, repeats)
    result: dict[str, Any] = {"bench": "cut-cost", **provenance()}
    result["model"] = {"layers": layers, "hidden": hidden, "tokens": tokens, "cuts": layers, "dtype": "bfloat16"}
    result["model"]["compiler"] = compiler
    result["peers"] = times
    result["differs_from_eager"] = wrong
    if "full_graph" in times:
        for row in times.values():
            row["gpu_us_per_cut"] = (row["gpu_us"] - times["full_graph"]["gpu_us"]) / layers
            row["elapsed_us_per_cut"] = (row["elapsed_us"] - times["full_graph"]["elapsed_us"]) / layers
    for loop in ("loop", "bare_loop"):
        if loop in times and "plan" in times:
            result[f"host_of_plan_over_{loop}"] = times["plan"]["host_us"] / times[loop]["host_us"]
    return result


def _peers(
    model: nn.Module, x: torch.Tensor, wanted: tuple[str, ...], compiler: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What runs each peer, and by how much its result differs from eager's, relative to it."""
    want = model(x).float()
    scale = want.norm()
    runs: dict[str, Callable[[], Any]] = {}
    wrong: dict[str, float] = {}

    def take(name: str, run: Callable[[], torch.Tensor]) -> None:
        if name in wanted:
            got = [run() for _ in range(3)][-1]  # warmed up, captured, replayed
            wrong[name] = float((got.float() - want).norm() / scale)
            runs[name] = run

    take("eager", lambda: model(x))
    torch._dynamo.reset()  # here only: it would throw away what a peer below has compiled
    if "compile" in wanted:
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        take("compile", lambda: compiled(x))
    if "reduce_overhead" in wanted and x.is_cuda:
        with torch._inductor.config.patch(graph_partition=True):
            reduced = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
            for _ in range(4):
                reduced(x)
        take("reduce_overhead", lambda: reduced(x))
    options: dict[str, Any] = {"capture_sizes": [x.shape[0]], "static_outputs": True, "compiler": compiler}
    ours = torch.compile(model, backend=backend.sparse_pcg, fullgraph=True, dynamic=False, options=options)
    seen: list[tuple[CompiledGraph, list[Any]]] = []
    with session.watching(lambda graph, inputs, outputs: seen.append((graph, inputs))):
        ours(x)
    graph, inputs = seen[0]
    take("call", lambda: ours(x))
    plan = graph.plan(inputs)
    assert plan is not None

    def replay() -> torch.Tensor:
        plan.replay()
        return plan.outputs[0]

    take("plan", replay)
    runs.update({"plan": plan.replay} if "plan" in runs else {})
    if x.is_cuda:
        for name, body in (("loop", torch.ops.sparse_pcg_bench.touch.default), ("bare_loop", _touch)):
            loop, out = _hand_written(graph.program, inputs, body)
            take(name, lambda loop=loop, out=out: (loop(), out)[1])  # type: ignore[misc]
            runs.update({name: loop} if name in runs else {})
        full, whole = _full_graph(graph.program, inputs)
        take("full_graph", lambda: (full(), whole)[1])
        runs.update({"full_graph": full} if "full_graph" in runs else {})
    return {name: runs[name] for name in wanted if name in runs}, wrong


def _hand_written(
    program: Program, inputs: list[Any], body: Callable[[torch.Tensor], None]
) -> tuple[Callable[[], None], torch.Tensor]:
    """The loop that one would write: a list of (graph, op body, argument), the same pieces captured once more."""
    values: list[Any] = [*inputs, *([None] * (program.size - program.inputs))]
    pairs: list[tuple[Any, Any, Any]] = []
    pool = torch.cuda.graph_pool_handle()
    for step in program.steps:
        args, kwargs = step.bind(values)
        if step.kind == PIECE:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = step.run(*args, **kwargs)
            graph.replay()
            step.store(result, values)
            pairs.append((graph, None, None))
        else:
            assert step.kind == CUT and pairs
            step.run(*args, **kwargs)
            pairs[-1] = (pairs[-1][0], body, args[0])

    def loop() -> None:
        for graph, between, x in pairs:
            graph.replay()
            if between is not None:
                between(x)

    loop.keep = values  # type: ignore[attr-defined]
    return loop, program.results(values)[0]


def _full_graph(program: Program, inputs: list[Any]) -> tuple[Callable[[], None], torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = program.run(inputs)[0]
    graph.replay()
    return graph.replay, out


def _measure(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Medians, peers turn by turn, so that a drift of the clocks meets them all."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    with _no_gc():
        for turn in range(repeats + 3):
            for name, run in runs.items():
                once = _once(run)
                if turn >= 3:
                    for what, value in once.items():
                        times[name].setdefault(what, []).append(value)
    return {name: {what: statistics.median(v) for what, v in row.items()} for name, row in times.items()}


def _once(run: Callable[[], Any]) -> dict[str, float]:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        taken = (time.perf_counter() - start) * 1e6
        return {"host_us": taken, "elapsed_us": taken, "gpu_us": taken}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    run()
    host = (time.perf_counter() - start) * 1e6
    end.record()
    torch.cuda.synchronize()
    elapsed = begin.elapsed_time(end) * 1000
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return {"host_us": host, "elapsed_us": elapsed, "gpu_us": begin.elapsed_time(end) * 1000}


@contextmanager
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
