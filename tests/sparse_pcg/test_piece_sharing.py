"""Identical pieces are compiled once, whatever weights and caches they get; pieces that differ are not."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparse_pcg
from sparse_pcg import session
from sparse_pcg.compiled_graph import CompiledGraph
from sparse_pcg.split import PIECE
from tests.sparse_pcg.toys import Toy, inputs, same, state

ROWS, WIDTH, POOL = 8, 8, 32

pytestmark = pytest.mark.usefixtures("fresh")


def graph_of(fn: Callable[..., Any], *args: Any) -> CompiledGraph:
    """The split graph behind a compiled module, after one call with ``args``."""
    seen: list[CompiledGraph] = []
    with session.watching(lambda graph, inputs, outputs: seen.append(graph)):
        fn(*args)
    assert len(seen) == 1
    return seen[0]


def numbers(graph: CompiledGraph) -> list[int]:
    """Per captured piece, which of the compiled ones it is."""
    pairs = zip(graph.segments, graph.distinct, strict=True)
    return [d.number for s, d in pairs if s.kind == PIECE and d is not None]


class Block(nn.Module):
    """One piece: a projection, two stores, a read of both; then the cut. All its tensors are buffers.

    kind: in what a block differs from a plain one; see ``DIFFERENT`` and ``ALIKE``.
    """

    def __init__(self, kind: str, shared: torch.Tensor, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        weight, bias = (
            torch.randn(WIDTH, WIDTH, generator=generator) / 3,
            torch.randn(WIDTH, generator=generator),
        )
        k, v = torch.zeros(POOL, WIDTH), torch.zeros(POOL, WIDTH)
        both = torch.zeros(POOL + 4, WIDTH)
        if kind == "views of one pool":
            k, v = shared[2 * index], shared[2 * index + 1]
        elif kind == "views of a pool of its own":
            k, v = torch.zeros(2, POOL, WIDTH).unbind()
        elif kind == "overlapping caches":
            k, v = both[:POOL], both[4:]
        elif kind == "caches that overlap by more":
            k, v = both[2 : POOL + 2], both[4:]
        elif kind == "one cache twice":
            v = k
        elif kind == "strided cache":
            k = torch.zeros(POOL, 2 * WIDTH)[:, :WIDTH]
        elif kind == "transposed weight":
            weight = weight.t().contiguous().t()
        elif kind == "another dtype":
            bias = bias.bfloat16()
        elif kind == "another shape":
            bias = bias[:1]
        self.scale = 3.0 if kind == "another literal" else 2.0
        self.relu = kind == "another op"
        for name, tensor in {"weight": weight, "bias": bias, "k": k, "v": v}.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight + self.bias
        y = torch.relu(y) if self.relu else torch.tanh(y)
        torch.ops.toy.store(y, slots, self.k)
        torch.ops.toy.store(y * self.scale, slots.flip(0), self.v)
        out = torch.empty_like(y)
        torch.ops.toy.mix_into(self.k[slots] + self.v[slots], out)
        return out


ALIKE = ["plain", "views of one pool", "views of a pool of its own"]
DIFFERENT = [
    "overlapping caches",
    "caches that overlap by more",
    "one cache twice",
    "strided cache",
    "transposed weight",
    "another dtype",
    "another shape",
    "another literal",
    "another op",
]


class Blocks(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        shared = torch.zeros(2 * len(kinds), POOL, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, shared, i) for i, kind in enumerate(kinds))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, slots)
        return x


def right(model: nn.Module, fn: Callable[..., Any], calls: int, close: float = 0.0) -> None:
    """``fn`` equals ``model`` eager, results and caches; bit for bit, or within ``close`` of their size."""
    reference = copy.deepcopy(model)
    for seed in range(calls):
        got, want = fn(*inputs(ROWS, WIDTH, POOL, seed)), reference(*inputs(ROWS, WIDTH, POOL, seed))
        if close:
            torch.testing.assert_close(
                [got, *state(model)], [want, *state(reference)], rtol=close, atol=close
            )
        else:
            assert same(got, want) and same(state(model), state(reference))


@settings(max_examples=max(5, settings.default.max_examples // 3))  # each traces a model anew
@given(st.lists(st.sampled_from(ALIKE + DIFFERENT), min_size=2, max_size=4))
def test_blocks_share_a_piece_exactly_when_they_are_of_one_kind(kinds: list[str]) -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    model = Blocks(kinds)
    fn = sparse_pcg.compile(copy.deepcopy(model), capture_sizes=[ROWS], compiler="eager")
    found = numbers(graph_of(fn, *inputs(ROWS, WIDTH, POOL)))
    groups = ["plain" if kind in ALIKE else kind for kind in kinds]
    assert found == [list(dict.fromkeys(groups)).index(group) for group in groups]


@pytest.mark.parametrize("kind", DIFFERENT)
def test_one_block_that_differs_is_compiled_apart_and_right(kind: str) -> None:
    model = Blocks(["plain", kind, "views of one pool", "plain"])
    fn = sparse_pcg.compile(model, capture_sizes=[ROWS], compiler="eager")
    reference = copy.deepcopy(model)
    for seed in range(4):
        args = inputs(ROWS, WIDTH, POOL, seed)
        assert same(fn(*args), reference(*args)) and same(state(model), state(reference))
    assert numbers(graph_of(fn, *inputs(ROWS, WIDTH, POOL))) == [0, 1, 0, 0]


@pytest.mark.parametrize("overlapping", [False, True])
def test_caches_given_as_arguments(overlapping: bool) -> None:
    """Views of one pool as arguments of the forward: apart they share a piece, overlapping they do not."""

    def body(x: torch.Tensor, slots: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        for k, v in zip(caches[::2], caches[1::2], strict=True):
            torch.ops.toy.store(torch.tanh(x), slots, k)
            torch.ops.toy.store(x * 2, slots, v)
            out = torch.empty_like(x)
            torch.ops.toy.mix_into(k[slots] + v[slots], out)
            x = out
        return x

    def caches(pool: torch.Tensor) -> list[torch.Tensor]:
        rows = pool.view(-1, WIDTH)
        last = [rows[:POOL], rows[1 : POOL + 1]] if overlapping else [pool[0], pool[1]]
        return [*last, *(pool[i] for i in range(2, 6))]

    fn = torch.compile(
        body, backend="sparse_pcg", fullgraph=True, options={"capture_sizes": [ROWS], "compiler": "eager"}
    )
    ours, theirs = torch.zeros(6, POOL, WIDTH), torch.zeros(6, POOL, WIDTH)
    with torch.no_grad():
        for seed in range(4):
            x, slots = inputs(ROWS, WIDTH, POOL, seed)
            assert same(fn(x, slots, caches(ours)), body(x, slots, caches(theirs))) and same(ours, theirs)
        found = numbers(graph_of(fn, x, slots, caches(ours)))
    assert found == ([0, 1, 1] if overlapping else [0, 0, 0])


def test_sixty_layers_are_at_most_four_pieces() -> None:
    model = Toy(layers=60, width=64, rows=POOL)
    fn = sparse_pcg.compile(model, capture_sizes=[ROWS], compiler="eager")
    reference = copy.deepcopy(model)
    with sparse_pcg.stats().expect(captures=61, replays=1):
        for seed in range(3):
            args = inputs(ROWS, 64, POOL, seed)
            assert same(fn(*args), reference(*args)) and same(state(model), state(reference))
    graph = graph_of(fn, *inputs(ROWS, 64, POOL))
    assert (graph.cut_count, graph.piece_count) == (60, 61) and graph.distinct_count <= 4


def without_caches() -> Any:
    return torch._inductor.config.patch(force_disable_caches=True)


def test_compiled_layers_of_one_pool_are_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One compiled piece serves views at every offset, two of one pool at a time; an overlap has its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Blocks(["views of one pool", "overlapping caches", "views of one pool", "views of one pool"])
    fn = sparse_pcg.compile(model, capture_sizes=[ROWS])
    with without_caches():
        right(model, fn, 2, close=1e-4)
    assert numbers(graph_of(fn, *inputs(ROWS, WIDTH, POOL))) == [0, 1, 0, 0]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", DIFFERENT)
def test_compiled_pieces_that_differ_are_right(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Blocks(["views of one pool", kind, "plain"])
    fn = sparse_pcg.compile(model, capture_sizes=[ROWS])
    with without_caches():
        right(model, fn, 2, close=1e-2 if kind == "another dtype" else 1e-4)


@pytest.mark.heavy
def test_compile_time_is_at_most_a_quarter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """60 layers, against each piece compiled on its own; no cache on either side."""
    from sparse_pcg.inductor_fixes import compile_piece

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "warm-up"))
    compile_toy(layers=1)  # what only a process's first compile costs
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "shared"))
    graph = compile_toy(layers=60)
    distinct = {d.number: d for d in graph.distinct if d is not None and d.key}
    together = sum(d.seconds for d in distinct.values())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "apart"))
    start = time.perf_counter()
    with without_caches():
        for segment in graph.segments:
            if segment.kind == PIECE and segment.module is not None:
                placeholders = [n for n in segment.module.graph.nodes if n.op == "placeholder"]
                compile_piece(segment.module, [n.meta["example_value"] for n in placeholders])
    apart = time.perf_counter() - start
    assert together <= apart / 4, f"{together:.1f} s for {len(distinct)} pieces, {apart:.1f} s for each apart"


def compile_toy(layers: int) -> CompiledGraph:
    torch._dynamo.reset()
    fn = sparse_pcg.compile(Toy(layers=layers, width=64, rows=POOL), capture_sizes=[ROWS])
    with without_caches():
        return graph_of(fn, *inputs(ROWS, 64, POOL))
