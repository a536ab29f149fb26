"""``record``: a plan without Dynamo. New values written in place, cuts, views, effects, errors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import sparse_pcg
from sparse_pcg.counters import LIVE
from tests.sparse_pcg.toys import Context, Toy, context, inputs, same, state

pytestmark = pytest.mark.usefixtures("fresh")


def poison(plan: sparse_pcg.Plan) -> None:
    """Overwrite the memory that the plan's graphs write: a replay owes nothing to what it finds there."""
    plan.owner._pool.poison()


def check(fn: Callable[..., Any], make: Callable[[int], tuple[torch.Tensor, ...]], replays: int = 3) -> sparse_pcg.Plan:
    """Record ``fn`` and replay it on new values: results and arguments equal those of ``fn``, bit for bit."""
    static, theirs = make(0), make(0)
    plan = sparse_pcg.record(fn, *static)
    want = pytree.tree_leaves(fn(*theirs))
    assert same(plan.outputs, want) and same(static, theirs)
    addresses = [o.data_ptr() for o in plan.outputs]
    for seed in range(1, replays + 1):
        fresh = make(seed)
        for ours, other, value in zip(static, theirs, fresh, strict=True):
            ours.copy_(value)
            other.copy_(value)
        poison(plan)
        with context(kv_len=seed + 1):  # what the cuts read is of the replay, not of the recording
            want = pytree.tree_leaves(fn(*theirs))
            plan.replay()
        assert same(plan.outputs, want) and same(static, theirs)
        assert [o.data_ptr() for o in plan.outputs] == addresses
    return plan


def one(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 4)), generator=torch.Generator().manual_seed(seed))


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return one(seed), one(seed + 50)


def mixed(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.toy.mix_into(x, out)
    return out


def nested(x: torch.Tensor, y: torch.Tensor) -> Any:
    a, b = torch.ops.toy.halves(x + y)
    return {"a": a, "rest": [b, (mixed(y), x * 2)]}


def views(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * y
    z[1:3] += mixed(z)[2:4]
    return z, z.t(), z[:, 1], z.view(-1)[3:], x[1:], y.t()


def mutating(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    y[:, :2] += mixed(x)[:, 2:]
    torch.ops.toy.mix_into(x.clone(), y)
    x.view(-1)[::3] = 7
    return x + y, x


def returning(x: torch.Tensor) -> Any:
    first = torch.ops.toy.scaled(x)
    second = torch.ops.toy.scaled(first + 1)
    return first, second, first - second


def adjacent(x: torch.Tensor) -> Any:
    a, b = torch.empty_like(x), torch.empty_like(x)
    torch.ops.toy.mix_into(x, a)
    torch.ops.toy.mix_into(a, b)
    return torch.ops.toy.scaled(b), a


def allocating(x: torch.Tensor) -> Any:
    where = {"device": x.device}
    filled, counted, ones = torch.full((3,), 2.0, **where), torch.arange(4, **where), torch.ones(2, **where)
    return filled, counted, torch.zeros_like(x).add_(x), ones * x[0, 0]


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[torch.Tensor, ...]], int, int]] = {
    # function, arguments by seed, pieces, cuts
    "nested": (nested, pair, 2, 2),
    "views": (views, pair, 2, 1),
    "mutating": (mutating, pair, 3, 2),
    "returning": (returning, lambda seed: (one(seed),), 2, 2),
    "adjacent": (adjacent, lambda seed: (one(seed),), 0, 3),
    "allocating": (allocating, lambda seed: (one(seed),), 1, 0),
    "argument back": (lambda x: (x, mixed(x)), lambda seed: (one(seed),), 0, 1),
    "no rows": (nested, lambda seed: (one(seed, 0, 4), one(seed + 50, 0, 4)), 2, 2),
    "one tensor, a strided view of another": (nested, lambda seed: (one(seed), one(seed, 4, 5).t()), 2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_equal_the_function_on_new_values(case: str) -> None:
    fn, make, pieces, cuts = CASES[case]
    plan = check(fn, make)
    assert (plan.captures, plan.cuts) == (pieces, cuts)


@given(st.lists(st.sampled_from(["mix", "scale", "halves", "store", "relu", "slice", "add"]), min_size=1, max_size=8))
def test_any_sequence_of_ops(names: list[str]) -> None:
    def fn(x: torch.Tensor, pool: torch.Tensor) -> Any:
        held = [x]
        for i, name in enumerate(names):
            if name == "mix":
                x = mixed(x)
            elif name == "scale":
                x = torch.ops.toy.scaled(x)
            elif name == "halves":
                x, row = torch.ops.toy.halves(x)
                held.append(row)
            elif name == "store":
                torch.ops.toy.store(x + 1, torch.arange(x.shape[0]) + i, pool)
                x = pool[i : i + x.shape[0]]
            elif name == "relu":
                x = torch.relu(x)
            elif name == "slice":
                x[:, ::2] *= 3
            else:
                x = x + held[-1].reshape(x.shape[0], -1)[:, :1]
            held.append(x)
        return held

    check(fn, lambda seed: (one(seed), one(seed + 9, 16, 4)), replays=2)


@given(st.integers(0, 9))
def test_the_dynamo_route_gives_the_same_bits(rows: int) -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    model = Toy()
    compiled, recorded, reference = (copy.deepcopy(model) for _ in range(3))
    fn = sparse_pcg.compile(compiled, capture_sizes=[max(rows, 1)], compiler="eager")
    static = inputs(rows)
    plan = sparse_pcg.record(recorded, *static)
    reference(*inputs(rows))
    fn(*inputs(rows))
    for seed in range(1, 4):
        for ours, value in zip(static, inputs(rows, seed=seed), strict=True):
            ours.copy_(value)
        poison(plan)
        plan.replay()
        want = reference(*inputs(rows, seed=seed))
        assert same(plan.outputs, [want]) and same(fn(*inputs(rows, seed=seed)), want)
        assert same(state(recorded), state(reference)) and same(state(compiled), state(reference))
    assert plan.cuts == 3 and plan.captures == 4


def test_effects_take_place_once_at_recording_and_once_per_replay() -> None:
    count = torch.zeros(1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return mixed(x)

    Context.calls = 0
    plan = sparse_pcg.record(fn, one(0))
    assert count.item() == 1 and Context.calls == 1
    for call in range(2, 5):
        plan.replay()
        assert count.item() == call and Context.calls == call


def test_weights_updated_in_place_are_seen() -> None:
    model = Toy(layers=1)
    static = inputs(6)
    plan = sparse_pcg.record(model, *static)
    with torch.no_grad():
        model.layers[0].lin.weight.mul_(3)
    plan.replay()
    assert same(plan.outputs, [model(*inputs(6)).detach()])


def test_ops_named_as_cuts_are_cuts() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.mix_untagged(x + 1, out)
        return out

    x = one(0)
    assert sparse_pcg.record(fn, x).cuts == 0
    plan = sparse_pcg.record(fn, x, cut_ops=["toy::mix_untagged"])
    assert plan.cuts == 1
    with context(rows=2, kv_len=5):
        plan.replay()
        want = fn(x)
    assert same(plan.outputs, [want])


def test_recorded_under_inference_mode_and_replayed_outside() -> None:
    """The grad mode of the recording does not bind the one of the replay, either way round."""
    for recording in (True, False):
        x = one(0)
        with torch.inference_mode(recording):
            plan = sparse_pcg.record(lambda x: mixed(x * 2), x)
        x.copy_(one(1))
        with torch.inference_mode(not recording):
            plan.replay()
        assert same(plan.outputs, [mixed(one(1) * 2)])


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x if bool((x > 0).all()) else -x, "_local_scalar_dense"),
        (lambda x: torch.nonzero(x), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: torch.unique(x), "unique"),
    ],
    ids=["item", "bool", "nonzero", "mask", "masked_select", "unique"],
)
def test_a_read_on_the_host_names_the_op(fn: Callable[..., Any], op: str) -> None:
    before = sparse_pcg.stats()
    with pytest.raises(sparse_pcg.CaptureError, match=op):
        sparse_pcg.record(fn, one(0))
    assert sparse_pcg.stats() == before


class TestErrors:
    def test_indexing_by_numbers_is_no_read(self) -> None:
        check(lambda x: x[torch.tensor([2, 0])], lambda seed: (one(seed),))

    def test_an_error_of_the_function_passes_as_it_is(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            sparse_pcg.record(fn, one(0))
        assert same(sparse_pcg.record(mixed, one(0)).outputs, [mixed(one(0))])

    def test_after_freeze_nothing_is_recorded_and_plans_replay(self) -> None:
        x = one(0)
        plan = sparse_pcg.record(mixed, x)
        sparse_pcg.freeze()
        with pytest.raises(sparse_pcg.FrozenError, match="record"):
            sparse_pcg.record(mixed, one(0))
        x.copy_(one(1))
        plan.replay()
        assert same(plan.outputs, [mixed(one(1))])

    def test_a_dropped_plan_says_so(self) -> None:
        plan = sparse_pcg.record(mixed, one(0))
        sparse_pcg.reset()
        with pytest.raises(sparse_pcg.CaptureError, match=r"reset\(\)"):
            plan.replay()
        assert sparse_pcg.stats().pool_bytes == 0

    def test_graphs_off_leaves_nothing_to_record(self) -> None:
        with pytest.raises(sparse_pcg.CaptureError, match="graphs"):
            sparse_pcg.record(mixed, one(0), graphs="off")

    def test_a_bad_option_is_named(self) -> None:
        with pytest.raises(ValueError, match="cut_op"):
            sparse_pcg.record(mixed, one(0), cut_op=["toy::mix_into"])


def test_counters_and_the_registry() -> None:
    gc.collect()  # graphs of other tests leave the registry when they are collected
    with sparse_pcg.stats().expect(graphs=1, captures=2, replays=2, cuts=1, pieces=2, fallbacks={}):
        plan = sparse_pcg.record(lambda x: mixed(x * 2) + 1, one(0))
        plan.replay()
        plan.replay()
    assert plan.owner in LIVE and sparse_pcg.stats().pool_bytes > 0
