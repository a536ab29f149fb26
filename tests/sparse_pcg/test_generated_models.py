"""Models made up at random, called at random sizes, against an untouched copy: results, buffers and arguments.

With ``compiler="eager"`` everything is bit for bit the same; what graphs wrote is poisoned before each call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparse_pcg
from sparse_pcg import session
from sparse_pcg.compiled_graph import CompiledGraph
from sparse_pcg.counters import LIVE
from sparse_pcg.memory import overlaps
from tests.sparse_pcg.toys import context, inputs, same, state

SIZES = [4, 8]
WIDTH, POOL, MOST = 6, 24, 12


class Run:
    """What the steps of one forward share: the arguments, the current value, what will be returned."""

    def __init__(self, model: Generated, x: torch.Tensor, slots: torch.Tensor, extra: torch.Tensor) -> None:
        self.model, self.argument, self.x, self.slots, self.extra = model, x, x, slots, extra
        self.kept: list[torch.Tensor] = []


def into(run: Run, out: torch.Tensor) -> torch.Tensor:
    torch.ops.toy.mix_into(run.x, out)
    return out


def linear(run: Run, i: int) -> None:
    run.x = run.x @ run.model.weights[i % len(run.model.weights)]


def relu(run: Run, i: int) -> None:
    run.x = torch.relu(run.x) - 0.5


def flat(run: Run, i: int) -> None:
    run.x = (run.x.reshape(-1) * 0.75).view(-1, WIDTH)


def transpose(run: Run, i: int) -> None:
    run.x = (run.x.t().contiguous() + i).t()


def columns(run: Run, i: int) -> None:
    run.x = run.x.clone()
    run.x[:, i % 3 :: 2] *= 2


def flip(run: Run, i: int) -> None:
    run.x = torch.cat([run.x.flip(0)[:, :2], run.x[:, 2:]], 1)


def accumulate(run: Run, i: int) -> None:
    run.model.total.add_(run.x.sum(0))
    run.x = run.x + run.model.total


def store(run: Run, i: int) -> None:
    torch.ops.toy.store(run.x, run.slots, run.model.pool[i % 2])


def read(run: Run, i: int) -> None:
    run.x = run.x + run.model.pool[i % 2][run.slots]


def write_argument(run: Run, i: int) -> None:
    run.argument.add_(0.25 + i)


def write_extra(run: Run, i: int) -> None:
    run.extra[:, 1:3] -= 1
    run.x = run.x + run.extra.sum(0)


def use_extra(run: Run, i: int) -> None:
    run.x = run.x * run.extra.shape[0] - run.extra[-1:].sum(0)


def sizes(run: Run, i: int) -> None:
    size = run.x.size()
    run.x = run.x.new_full(size, 1.5) + run.x * size[0] + run.x.shape[1]


def autocast(run: Run, i: int) -> None:
    """A region with a cut inside."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run.x @ run.model.weights[0]
        run.x = torch.tanh(y)
        out = into(run, torch.empty_like(run.x))
        run.x = out.float() + (out.float() @ run.model.weights[-1]).float()


def cut(run: Run, i: int) -> None:
    run.x = into(run, torch.empty_like(run.x))


def residual(run: Run, i: int) -> None:
    run.x = run.x + into(run, torch.empty_like(run.x))


def adjacent(run: Run, i: int) -> None:
    a, b = torch.empty_like(run.x), torch.empty_like(run.x)
    run.x = into(run, a)
    run.x = into(run, b)


def in_buffer(run: Run, i: int) -> None:
    """A cut whose output is some rows of a buffer of the model."""
    run.x = into(run, run.model.scratch[: run.x.shape[0], :WIDTH]) + 1


def in_columns(run: Run, i: int) -> None:
    """A cut whose output is some columns of a wider tensor."""
    wide = run.x.new_zeros(run.x.shape[0], 2 * WIDTH)
    into(run, wide[:, WIDTH:])
    run.x = wide[:, 2 : 2 + WIDTH]


def returning(run: Run, i: int) -> None:
    run.x = torch.ops.toy.scaled(run.x)


def several(run: Run, i: int) -> None:
    half, row = torch.ops.toy.halves(run.x)
    run.kept.append(row)
    run.x = half + row[:, None]


def keep(run: Run, i: int) -> None:
    run.kept.append(run.x)


def keep_views(run: Run, i: int) -> None:
    run.kept += [run.x.t(), run.x[:, 1], run.argument, run.model.total]


CUTS = {autocast: 1, cut: 1, residual: 1, adjacent: 2, in_buffer: 1, in_columns: 1, returning: 1, several: 1}
OTHERS = [linear, relu, flat, transpose, columns, flip, accumulate, store, read, write_argument]
OTHERS += [write_extra, use_extra, sizes, keep, keep_views]
STEPS = st.lists(st.sampled_from([*CUTS, *OTHERS]), min_size=1, max_size=10)


class Generated(nn.Module):
    """The steps in order, with the tensors that they use; with ``shared`` all linear steps have one weight."""

    def __init__(self, steps: list[Callable[[Run, int], None]], shared: bool) -> None:
        super().__init__()
        self.steps = tuple(steps)
        generator = torch.Generator().manual_seed(len(steps))
        weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 3 for _ in range(1 if shared else 3)]
        self.weights = nn.ParameterList(weights)
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("pool", torch.zeros(2, POOL, WIDTH))
        self.register_buffer("scratch", torch.zeros(MOST, WIDTH + 2))

    @property
    def cuts(self) -> int:
        return sum(CUTS.get(step, 0) for step in self.steps)

    def forward(self, x: torch.Tensor, slots: torch.Tensor, extra: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run = Run(self, x, slots, extra)
        for i, step in enumerate(self.steps):
            step(run, i)
        return *run.kept, run.x


def arguments(rows: int, others: int, seed: int) -> tuple[torch.Tensor, ...]:
    x, slots = inputs(rows, WIDTH, POOL, seed)
    return x, slots, torch.randn(others, WIDTH, generator=torch.Generator().manual_seed(seed))


def run_model(model: Generated, calls: list[tuple[int, int]], close: float = 0.0, **options: Any) -> None:
    """Call the compiled model and its copy at (rows, rows of the third argument) in turn, and compare."""
    torch._dynamo.reset()
    sparse_pcg.reset()
    reference = copy.deepcopy(model)
    fn = sparse_pcg.compile(model, capture_sizes=SIZES, **options)

    def check(rows: int, others: int, seed: int) -> None:
        ours, theirs = arguments(rows, others, seed), arguments(rows, others, seed)
        for graph in LIVE:
            graph.poison()
        with context(kv_len=1 + seed % 3), torch.no_grad():
            got, want = fn(*ours), reference(*theirs)
        if not close:  # results alias each other, the arguments and the buffers as in PyTorch
            assert overlaps([*got, *ours, *model.buffers()]) == overlaps([*want, *theirs, *reference.buffers()])
        ours, theirs = (*got, *ours, *state(model)), (*want, *theirs, *state(reference))
        if close:
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close, equal_nan=True)
        else:
            assert same(ours, theirs)
        assert [g.dtype for g in got] == [w.dtype for w in want]

    for seed, (rows, others) in enumerate(calls):
        check(rows, others, seed)
    seen: list[CompiledGraph] = []
    with session.watching(lambda graph, inputs, outputs: seen.append(graph)):
        check(8, 3, 90)
    if not seen:
        return  # not a single operator: nothing for a backend to do
    graph = seen[0]
    assert graph.cut_count == model.cuts
    check(8, 3, 91)
    check(8, 3, 92)
    with sparse_pcg.stats().expect(replays=int(graph.piece_count > 0), captures=0, graphs=0):
        check(8, 3, 93)


CALLS = st.lists(
    st.tuples(st.sampled_from([4, 4, 8, 8, 0, 1, 2, 5, 9, 12]), st.sampled_from([3, 3, 5, 1])),
    min_size=2,
    max_size=8,
)


@given(STEPS, CALLS, st.booleans())
def test_a_generated_model_equals_its_copy(steps: list[Any], calls: list[tuple[int, int]], shared: bool) -> None:
    run_model(Generated(steps, shared), calls, compiler="eager")


@pytest.mark.parametrize("step", [*CUTS, *OTHERS], ids=lambda step: step.__name__)
def test_each_step_between_two_cuts(step: Callable[[Run, int], None]) -> None:
    """First in a graph, last in it, and alone between cuts."""
    run_model(Generated([step, cut, step, returning, step], True), [(8, 3), (8, 3), (4, 3)], compiler="eager")


def test_a_compiled_model_is_within_float_error() -> None:
    steps = [linear, store, cut, read, columns, in_buffer, write_argument, several, write_extra, keep_views, relu]
    run_model(Generated(steps, False), [(8, 3), (5, 3), (4, 3)], close=1e-4)


@pytest.mark.heavy
@settings(max_examples=max(6, settings.default.max_examples // 4))
@given(STEPS, CALLS, st.booleans())
def test_a_compiled_generated_model(steps: list[Any], calls: list[tuple[int, int]], shared: bool) -> None:
    close = 5e-2 if autocast in steps else 1e-3
    run_model(Generated(steps, shared), calls[:4], close)
