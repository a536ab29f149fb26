"""The backend on toy models: values at every size in every order, effects, addresses, freeze, reset."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparse_pcg
from sparse_pcg.counters import LIVE
from tests.sparse_pcg.rank_threads import Watched
from tests.sparse_pcg.toys import Context, Toy, context, inputs, same, state

SIZES = [4, 8, 16]

pytestmark = pytest.mark.usefixtures("fresh")


def compiled(module: Any, **options: Any) -> Any:
    options = {"capture_sizes": SIZES, "compiler": "eager", **options}
    return torch.compile(module, backend="sparse_pcg", fullgraph=True, options=options)


def check(module: Any, fn: Any, reference: Any, *args: Any) -> None:
    """One call equals the untouched copy's, in result and in buffers, bit for bit."""
    want = reference(*copy.deepcopy(args))
    got = fn(*args)
    assert same(got, want) and same(state(module), state(reference))


@settings(max_examples=6)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17]), min_size=4, max_size=14), st.booleans())
def test_every_size_in_any_order_equals_eager(sizes: list[int], freeze: bool) -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    module = Toy()
    reference = copy.deepcopy(module)
    fn = compiled(module)
    with torch.no_grad():
        for seed, rows in enumerate(sizes):
            if freeze and seed == len(sizes) // 2:
                sparse_pcg.freeze()
            check(module, fn, reference, *inputs(rows, seed=seed))


@pytest.mark.parametrize("grad", [False, True])
def test_big_small_big_small_replays_with_new_values(grad: bool) -> None:
    module = Toy()
    reference = copy.deepcopy(module)
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
    with torch.set_grad_enabled(grad):
        for seed, rows in enumerate([16, 16, 4, 4, 16, 4, 4, 8, 8, 16, 4]):
            check(module, fn, reference, *inputs(rows, seed=seed))
        before = sparse_pcg.stats()
        with before.expect(graphs=0, unique_pieces=0, captures=0, replays=4, fallbacks={}):
            for seed, rows in enumerate([16, 4, 8, 4]):
                check(module, fn, reference, *inputs(rows, seed=90 + seed))


def test_counts_of_a_toy() -> None:
    module = Toy(layers=3)
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
    with sparse_pcg.stats().expect(graphs=1, cuts=3, pieces=4, unique_pieces=3, captures=8, replays=1):
        for rows in (8, 8, 4, 4, 8):
            fn(*inputs(rows))


def test_a_static_graph_is_captured_for_its_one_size() -> None:
    fn = compiled(Toy())
    with torch.no_grad(), sparse_pcg.stats().expect(graphs=1, captures=4, replays=2, fallbacks={}):
        for _ in range(4):
            fn(*inputs(5))


def test_inductor_is_within_float_error() -> None:
    module = Toy(layers=2)
    reference = copy.deepcopy(module)
    fn = sparse_pcg.compile(module, capture_sizes=SIZES)
    for seed, rows in enumerate([8, 8, 8, 5, 4, 4, 4, 8]):
        args = inputs(rows, seed=seed)
        want = reference(*args)
        torch.testing.assert_close(fn(*args), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state(module), state(reference), rtol=1e-4, atol=1e-5)


def test_every_effect_takes_place_once_per_call() -> None:
    """A call that warms up or captures stores and cuts once, like any other."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            out = torch.empty_like(x)
            torch.ops.toy.mix_into(x, out)
            self.count += 1
            return out + self.count

    module = Counting()
    fn = compiled(module)
    for call in range(1, 6):
        Context.calls = 0
        fn(torch.zeros(4, 2))
        assert module.count.item() == 2 * call and Context.calls == 1


def test_the_cut_sees_the_context_of_each_call() -> None:
    module = Toy()
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
    reference = copy.deepcopy(module)
    for seed, (rows, kv_len) in enumerate([(8, 1), (8, 1), (3, 7), (5, 2), (0, 3), (8, 9)]):
        with context(rows, kv_len):
            check(module, fn, reference, *inputs(8, seed=seed))


def test_results_stay_when_the_next_call_comes() -> None:
    fn = sparse_pcg.compile(Toy(), capture_sizes=SIZES, compiler="eager")
    kept = []
    for seed in range(5):
        result = fn(*inputs(8, seed=seed))
        kept.append((result, result.clone()))
    assert all(torch.equal(a, b) for a, b in kept)


def test_static_outputs_are_the_graphs_own_buffers() -> None:
    fn = sparse_pcg.compile(Toy(), capture_sizes=SIZES, compiler="eager", static_outputs=True)
    for _ in range(2):
        fn(*inputs(8))
    one = fn(*inputs(8, seed=1))
    address, values = one.data_ptr(), one.clone()
    two = fn(*inputs(8, seed=2))
    assert two.data_ptr() == address and not torch.equal(one, values)


class TestFreeze:
    def test_nothing_is_compiled_or_captured_and_each_reason_is_counted(self) -> None:
        module = Toy()
        reference = copy.deepcopy(module)
        fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
        for rows in (8, 8):
            check(module, fn, reference, *inputs(rows))
        sparse_pcg.freeze()
        with sparse_pcg.stats().expect(captures=0, unique_pieces=0, fallbacks={"size": 4, "recompile": 1}):
            for seed, rows in enumerate([4, 4, 5, 16, 8]):
                check(module, fn, reference, *inputs(rows, seed=seed))
            x, slots = inputs(8)
            want = reference(x.double().float().requires_grad_(), slots)
            assert same(fn(x.clone().requires_grad_(), slots), want.detach())

    def test_another_grad_mode_is_counted_as_such(self) -> None:
        module = Toy()
        reference = copy.deepcopy(module)
        fn = compiled(module)
        with torch.no_grad():
            for _ in range(3):
                check(module, fn, reference, *inputs(8))
            sparse_pcg.freeze()
        with sparse_pcg.stats().expect(captures=0, unique_pieces=0, fallbacks={"grad_mode": 1}):
            check(module, fn, reference, *inputs(8))

    @pytest.mark.parametrize("rows", [4, 5])
    def test_strict_raises_and_what_is_captured_goes_on(self, rows: int) -> None:
        module = Toy()
        fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager", strict=True)
        want = fn(*inputs(8))
        fn(*inputs(8))
        sparse_pcg.freeze()
        with pytest.raises(sparse_pcg.FrozenError, match="size"):
            fn(*inputs(rows))
        assert fn(*inputs(8)).shape == want.shape


class TestMovedStatics:
    @pytest.mark.parametrize("how", ["data", "parameter", "buffer", "in place"])
    @pytest.mark.parametrize("frozen", [False, True])
    def test_new_values_are_used_at_once(self, how: str, frozen: bool) -> None:
        module = Toy(layers=1)
        reference = copy.deepcopy(module)
        fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
        for seed in range(3):
            check(module, fn, reference, *inputs(8, seed=seed))
        if frozen:
            sparse_pcg.freeze()
        new = torch.randn(8, 8)
        for m in (module, reference):
            layer = m.layers[0]
            if how == "data":
                layer.lin.weight.data = new.clone()
            elif how == "parameter":
                layer.lin.weight = nn.Parameter(new.clone())
            elif how == "buffer":
                layer.pool = torch.ones_like(layer.pool)
            else:
                layer.lin.weight.data.copy_(new)
        before = sparse_pcg.stats()
        for seed in range(4):
            check(module, fn, reference, *inputs(8, seed=10 + seed))
        after = sparse_pcg.stats()
        moved = after.fallbacks.get("moved_static", 0) - before.fallbacks.get("moved_static", 0)
        if how == "in place":
            assert moved == 0 and after.replays - before.replays == 4
        else:
            assert moved == (4 if frozen else 1)
            assert frozen == (after.captures == before.captures)


def test_instances_of_one_class_each_replay_their_own_graphs() -> None:
    """Dynamo runs one graph for all of them; what was captured for one must serve that one, by turns."""
    modules = [Toy(layers=2) for _ in range(3)]
    references = copy.deepcopy(modules)
    fns = [compiled(m) for m in modules]
    with torch.no_grad():
        before = sparse_pcg.stats()
        for seed in range(6):
            for module, fn, reference in zip(modules, fns, references, strict=True):
                check(module, fn, reference, *inputs(8, seed=seed))
    assert sparse_pcg.stats().replays - before.replays == 3 * 4
    sparse_pcg.freeze()
    with torch.no_grad(), sparse_pcg.stats().expect(fallbacks={}, replays=3):
        for module, fn, reference in zip(modules, fns, references, strict=True):
            check(module, fn, reference, *inputs(8, seed=9))


def test_what_was_traced_while_frozen_is_captured_after_reset() -> None:
    module = Toy(layers=1)
    reference = copy.deepcopy(module)
    fn = compiled(module)
    sparse_pcg.record(lambda x: x + 1, torch.zeros(2))  # another kind of live graph
    sparse_pcg.freeze()
    with torch.no_grad():
        with sparse_pcg.stats().expect(fallbacks={"recompile": 4}, captures=0):
            for seed, rows in enumerate([8, 4, 8, 4]):
                check(module, fn, reference, *inputs(rows, seed=seed))
        sparse_pcg.reset()
        for seed, rows in enumerate([8, 4, 8, 4, 8, 4]):
            check(module, fn, reference, *inputs(rows, seed=seed))
    assert sparse_pcg.stats().replays > 0 and not sparse_pcg.stats().fallbacks


def test_methods_that_return_the_module_return_the_compiled_one() -> None:
    fn = sparse_pcg.compile(Toy(layers=1), capture_sizes=SIZES, compiler="eager")
    assert fn.eval() is fn and fn.requires_grad_(False) is fn and not fn.training
    assert len(fn.state_dict()) == 3
    assert not hasattr(copy.copy(fn), "nothing")


def test_reset_drops_models_and_memory_and_modules_go_on() -> None:
    module = Toy()
    reference = copy.deepcopy(module)
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
    for _ in range(3):
        check(module, fn, reference, *inputs(8))
    assert sparse_pcg.stats().pool_bytes > 0
    sparse_pcg.reset()
    assert sparse_pcg.stats().pool_bytes == 0 and sparse_pcg.stats().captures == 0
    for seed in range(4):
        check(module, fn, reference, *inputs(8, seed=seed))
    assert sparse_pcg.stats().captures > 0
    alive = weakref.ref(module.layers[0].lin.weight)
    sparse_pcg.reset()
    torch._dynamo.reset()
    del module, fn
    gc.collect()
    assert alive() is None


class TestArguments:
    """Arguments of a plain call: mutated ones, aliased ones, strided ones, views of them as results."""

    CASES: ClassVar = {
        "one tensor twice": lambda buf: (buf[:8], buf[:8]),
        "overlapping rows": lambda buf: (buf[:8], buf[4:12]),
        "disjoint rows": lambda buf: (buf[:8], buf[8:16]),
        "columns": lambda buf: (buf[:8], torch.zeros(8, 40)[:, ::10]),
        "expanded": lambda buf: (buf[:8], torch.arange(4.0).expand(8, 4)),
        "transposed": lambda buf: (buf[:8], torch.arange(32.0).view(4, 8).t()),
    }

    @staticmethod
    def body(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.mul_(2)
        out = torch.empty_like(a)
        torch.ops.toy.mix_into(a + b, out)
        a.add_(out)
        return a.view(-1), out, b, a[:, 0], out.t()

    @pytest.mark.parametrize("case", CASES)
    def test_aliasing_and_mutation(self, case: str) -> None:
        fn = compiled(lambda a, b: self.body(a, b))
        make = self.CASES[case]
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            ours = torch.randint(-9, 9, (20, 4), generator=generator).float()
            theirs = ours.clone()
            got = fn(*make(ours))
            want = self.body(*make(theirs))
            assert torch.equal(ours, theirs) and same(got, want)
            assert [g.stride() for g in got] == [w.stride() for w in want]
            got[0].zero_()  # a view of the caller's tensor, as PyTorch returns it
            assert not ours[:8].any()
            assert got[1].data_ptr() == got[4].data_ptr()

    def test_aliasing_that_changes_between_calls(self) -> None:
        fn = compiled(lambda a, b: self.body(a, b))
        for seed in range(6):
            ours = torch.arange(80.0).view(20, 4) + seed
            theirs = ours.clone()
            case = ["disjoint rows", "overlapping rows"][seed // 2 % 2]
            assert same(fn(*self.CASES[case](ours)), self.body(*self.CASES[case](theirs)))
            assert torch.equal(ours, theirs)

    def test_a_graph_that_runs_as_it_is_is_watched_too(self) -> None:
        fn, ours = compiled(lambda a, b: self.body(a, b)), torch.arange(80.0).view(20, 4)
        for case in ["disjoint rows"] * 2 + ["overlapping rows"] * 2:
            ranks = Watched()
            for graph in LIVE:
                graph.ranks = ranks  # type: ignore[assignment]
            fn(*self.CASES[case](ours))
        assert ranks.runs == [("a run of the graph as it is", torch.device("cpu"))]

    def test_an_optional_argument_that_comes_and_goes(self) -> None:
        def body(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.toy.mix_into(x, out)
            return out if bias is None else out + bias

        fn = compiled(body)
        for seed in range(8):
            x, bias = torch.randn(8, 2), torch.randn(2) if seed % 3 else None
            assert same(fn(x, bias), body(x, bias))


def test_a_read_on_the_host_runs_live_and_stays_right() -> None:
    def body(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        out = torch.empty_like(x)
        torch.ops.toy.mix_into(x, out)
        scale = n.item()
        torch.ops.toy.mix_into(out * scale, out)
        return out + scale

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        fn = compiled(body)
        for seed in range(6):
            x = torch.randn(8, 2)
            assert same(fn(x, torch.tensor(seed)), body(x, torch.tensor(seed)))
        assert sparse_pcg.stats().replays > 0
        assert [p.kind for p in sparse_pcg.explain(fn, x, torch.tensor(2)).pieces].count("live") >= 1


def test_an_autocast_region_that_a_cut_divides() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            out = torch.empty_like(y)
            torch.ops.toy.mix_into(y, out)
            z = out.float() @ w
        return z, z.float() @ w

    fn = compiled(body)
    for _ in range(4):
        x, w = torch.randn(8, 4), torch.randn(4, 4)
        got, want = fn(x, w), body(x, w)
        assert [g.dtype for g in got] == [torch.bfloat16, torch.float32] and same(got, want)
        assert not torch.is_autocast_enabled("cpu")


def test_the_key_is_every_symbol_and_the_token_dim_is_found_by_symbol() -> None:
    """Two dynamic dims: a graph captured at (rows, pool rows) must not serve another pool."""

    def body(pool: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        torch.ops.toy.store(x, slots, pool)
        out = torch.empty_like(x)
        torch.ops.toy.mix_into(x, out)
        return out + pool.sum(0)

    fn = sparse_pcg.compile(body, dynamic_dims={"x": 0, "slots": 0, "pool": 0}, capture_sizes=SIZES, compiler="eager")
    for seed, (rows, pool_rows) in enumerate([(8, 32), (8, 32), (8, 48), (8, 48), (8, 32), (4, 48), (5, 8), (8, 48)]):
        pool = torch.randn(pool_rows, 3)
        x, slots = inputs(rows, width=3, pool=pool_rows, seed=seed)
        theirs = pool.clone()
        assert same(fn(pool, x, slots), body(theirs, x, slots)) and torch.equal(pool, theirs)


def test_sizes_that_cross_a_cut() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        size = y.size()
        out = torch.empty(size)
        torch.ops.toy.mix_into(y, out)
        return out.view(size[1], -1) + x.shape[0]

    fn = sparse_pcg.compile(body, capture_sizes=SIZES, compiler="eager")
    for rows in (8, 8, 8, 5, 4, 4):
        x = torch.randn(rows, 6)
        assert same(fn(x), body(x))


def test_a_size_is_computed_where_it_is_used() -> None:
    """Layers that all use the same size stay identical pieces, the one that used it first included."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
            y = self.lin(x)
            out = torch.empty_like(y)
            torch.ops.toy.mix_into(y, out)
            return x + out.repeat(4, 1)[rows : rows + x.shape[0]]

    layers = nn.ModuleList(Doubling() for _ in range(5))

    def body(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * 2
        for layer in layers:
            x = layer(x, rows)
        return x

    fn = sparse_pcg.compile(body, capture_sizes=SIZES, compiler="eager")
    for rows in (8, 8, 4, 8, 5):
        x = torch.randn(rows, 4)
        assert same(fn(x), body(x).detach())
    assert len({p.distinct for p in sparse_pcg.explain(fn, x).pieces}) == 3


class TestCutNames:
    BODY = staticmethod(lambda x: _untagged(x))

    @pytest.mark.parametrize("name", ["toy::mix_untagged", "toy.mix_untagged", "toy.mix_untagged.default"])
    @pytest.mark.parametrize("overload", [False, True])
    def test_every_spelling(self, name: str, overload: bool) -> None:
        op = torch.ops.toy.mix_untagged.default if overload else torch.ops.toy.mix_untagged

        def body(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            op(x + 1, out)
            return out

        assert len(sparse_pcg.explain(compiled(body, cut_ops=[name]), torch.randn(4, 2)).cuts) == 1

    @pytest.mark.parametrize("name", ["toy::nothing", "nowhere::op", "toy.mix_untagged.out", "mix", ""])
    def test_a_name_of_no_op_is_an_error(self, name: str) -> None:
        with pytest.raises(ValueError, match="cut_ops"):
            compiled(_untagged, cut_ops=[name])(torch.randn(4, 2))

    def test_a_name_that_matches_nothing_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "sparse_pcg"):
            compiled(_untagged, cut_ops=["toy::scaled"])(torch.randn(4, 2))
        assert "scaled" in caplog.text and "matches nothing" in caplog.text

    def test_names_of_one_module_are_not_another_s(self) -> None:
        first = compiled(_untagged, cut_ops=["toy::mix_untagged"])
        second = compiled(lambda x: _untagged(x) + 1)
        x = torch.randn(4, 2)
        assert len(sparse_pcg.explain(first, x).cuts) == 1 and len(sparse_pcg.explain(second, x).cuts) == 0


def _untagged(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.toy.mix_untagged(x * 2, out)
    return out


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"capture_size": [4]}, "capture_size"),
            ({"capture_sizes": []}, "capture_sizes"),
            ({"capture_sizes": [4, -1]}, "capture_sizes"),
            ({"capture_sizes": [4.0]}, "capture_sizes"),
            ({"capture_sizes": 8}, "capture_sizes"),
            ({"compiler": "nvcc"}, "compiler"),
            ({"graphs": "yes"}, "graphs"),
            ({"graphs": True}, "graphs"),
            ({"strict": 1}, "strict"),
            ({"workspace_bytes": 0}, "workspace_bytes"),
            ({"cut_ops": "toy::mix_into"}, "cut_ops"),
            ({"cut_ops": 3}, "cut_ops"),
            ({"graphs": "cuda"}, "graphs"),
        ],
    )
    def test_a_bad_one_is_named_at_the_first_call(self, options: dict[str, Any], named: str) -> None:
        fn = torch.compile(Toy(), backend="sparse_pcg", fullgraph=True, options=options)
        with pytest.raises(ValueError, match=named) as caught:
            fn(*inputs(4))
        assert "accepted" in str(caught.value)

    def test_graphs_off_never_captures(self) -> None:
        fn = sparse_pcg.compile(Toy(), graphs="off", compiler="eager")
        with sparse_pcg.stats().expect(captures=0, replays=0, fallbacks={}):
            for _ in range(3):
                fn(*inputs(8))


def test_calls_from_several_threads() -> None:
    module = Toy()
    reference = copy.deepcopy(module)
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
    want = {seed: reference(*inputs(8, seed=seed)).detach() for seed in range(4)}
    for seed in range(3):
        fn(*inputs(8, seed=seed))
    failures: list[int] = []

    def serve(seed: int) -> None:
        for _ in range(20):
            if not torch.equal(fn(*inputs(8, seed=seed)), want[seed]):
                failures.append(seed)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_error_in_a_cut_names_it_and_the_graphs_go_on() -> None:
    module = Toy()
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler="eager")
    want = [fn(*inputs(8)) for _ in range(3)][-1]
    with context(rows="eight"), pytest.raises(TypeError) as caught:  # type: ignore[arg-type]
        fn(*inputs(8))
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert "mix_into" in notes and "toys.py" in notes
    assert torch.equal(fn(*inputs(8)), want)
