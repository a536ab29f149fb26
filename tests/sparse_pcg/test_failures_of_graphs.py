"""Known kinds of failure: addresses and aliases, splitting, fake implementations. One property per kind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.optests import OpCheckError

import sparse_pcg
from custom_ops._register import OPS
from sparse_pcg.counters import LIVE
from tests.custom_ops.opcheck import opcheck
from tests.sparse_pcg.agreement import OPTIONS, SIZES, agree, data, graph_of, mixed, moded, plain
from tests.sparse_pcg.toys import Context, context, same

pytestmark = pytest.mark.usefixtures("fresh")


# --- addresses and aliases ---


def returns_fresh(x: torch.Tensor, y: torch.Tensor) -> Any:
    half, row = torch.ops.toy.halves(x)
    first = torch.ops.toy.scaled(half + y)
    second = torch.ops.toy.scaled(first)
    return half, row, first, second, first + second * row[:, None]


def returns_aliases(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    out = mixed(z)
    y.add_(out[:, : y.shape[1]])
    return x.view(-1), x, z, z.t(), z, out[1:], out, y, y[:, 0], z.view(-1)[2:]


def writes_views(x: torch.Tensor, y: torch.Tensor) -> Any:
    slots = torch.arange(x.shape[0]).flip(0)
    wide, deep = x.new_zeros(x.shape[0] + 2, 9), x.new_zeros(3, x.shape[0] * 3)
    torch.ops.toy.store(x, slots, wide[:, :3])
    torch.ops.toy.store(x + 1, slots, deep[1].view(-1, 3))
    torch.ops.toy.mix_into(x, wide[2:, 3:6])
    torch.ops.toy.mix_into(x * 3, deep.view(3, -1, 3)[2])
    torch.ops.toy.mix_into(x - 1, y[:, :3])
    torch.ops.toy.store(x * 5, slots, y.as_strided((x.shape[0], 3), (6, 1), 3))
    torch.ops.toy.mix_into(y[:, 2:5].clone(), wide.t()[6:9].t()[: x.shape[0]])
    return wide, deep, deep[1], wide[:, 4]


def pads(x: torch.Tensor, y: torch.Tensor) -> Any:
    padded = torch.nn.functional.pad(x, (0, 3))
    out = mixed(padded)
    permuted = (out.t() @ out).t()[:, 1:]
    torch.ops.toy.mix_into(permuted, padded[: permuted.shape[0], :5])
    return padded, out.t().contiguous(), permuted


ADDRESSES = [returns_fresh, returns_aliases, writes_views, pads]


@pytest.mark.parametrize("body", ADDRESSES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("sizes", [(8,), (16, 8), (8, 5, 4), (1, 8)], ids=str)
def test_addresses_and_aliases(body: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    """Fresh results, results that are views or arguments, writes through views: as PyTorch gives them."""
    if body is pads and min(sizes) < 6:
        sizes = (8, 7)
    width = 3 if body is not writes_views else 6
    fn = sparse_pcg.compile(body, capture_sizes=[*SIZES, 1], compiler="eager")

    def make(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = sizes[seed % len(sizes)]
        return data(seed, rows, 3), data(seed + 40, rows, width)

    agree(fn, body, make, 4 * len(sizes))
    assert sparse_pcg.stats().replays > 0


CONJUGATED: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: x.conj(), lambda x: (x * 2, x.conj())),
    (lambda x: x.conj().imag, lambda x: (x * 2, torch._neg_view(x))),
    (lambda x: x[:, ::2].conj(), lambda x: ((x * 2).conj().imag,)),
]


@pytest.mark.parametrize("given, body", CONJUGATED)
def test_lazy_conjugation_of_arguments_and_results(given: Callable[..., Any], body: Callable[..., Any]) -> None:
    """Conjugation and negation are bits of a tensor that its bytes do not show."""
    fn = sparse_pcg.compile(body, capture_sizes=[4], compiler="eager")
    for seed in range(4):
        x = given(torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed)))
        for got, want in zip(fn(x), body(x), strict=True):
            assert torch.equal(got, want) and (got.is_conj(), got.is_neg()) == (want.is_conj(), want.is_neg())
    assert sparse_pcg.stats().replays == 2


def test_compiled_code_keeps_addresses_and_strides() -> None:
    """The same through Inductor, which may pad, permute or reuse what crosses an edge."""

    def body(x: torch.Tensor, y: torch.Tensor) -> Any:
        return *writes_views(x, y), *pads(x, y), *returns_fresh(x, x + 1)

    fn = sparse_pcg.compile(body, capture_sizes=SIZES)
    for seed in range(4):
        ours, theirs = ((data(seed, 8, 3), data(seed + 40, 8, 6)) for _ in range(2))
        for graph in LIVE:
            graph.poison()
        got, want = fn(*ours), body(*theirs)
        torch.testing.assert_close((*got, *ours), (*want, *theirs), rtol=1e-4, atol=1e-4)
        assert [g.stride() for g in got] == [w.stride() for w in want]
    assert sparse_pcg.stats().replays > 0


def test_an_attribute_that_comes_and_goes() -> None:
    """A tensor attribute that is None when captured, then a tensor, another one, None again."""

    class Biased(nn.Module):
        bias: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mixed(x) if self.bias is None else mixed(x + self.bias) + self.bias

    model = Biased()
    fn = plain(model)
    for turn in (0, 1, 2, 0, 3):
        model.bias = data(turn, 3) if turn else None
        agree(fn, model, lambda seed: (data(seed, 8, 3),), 3)


class Overlapped(nn.Module):
    """Writes a buffer and an argument that may be part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(12, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.held.add_(1)
        out = mixed(x)
        x.mul_(2)
        return out + self.held[:1], self.held * 1, x, x[:, 1], self.held[1:]


OVERLAPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda held, i: held[2:10],
    "other rows": lambda held, i: held[i % 3 : i % 3 + 8],
    "columns": lambda held, i: held[:8].view(3, 8).t(),
    "sometimes": lambda held, i: held[:8] if i // 3 % 2 else torch.ones(8, 3) * i,
    "sometimes not": lambda held, i: torch.ones(8, 3) * i if i // 3 % 2 else held[:8],
    "the buffer": lambda held, i: held,
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", OVERLAPS)
def test_an_argument_that_overlaps_a_buffer_of_the_model(case: str, frozen: bool) -> None:
    """A write to one is seen in the other, in every call."""
    model, reference = Overlapped(), Overlapped()
    fn = sparse_pcg.compile(model, capture_sizes=[8, 12], compiler="eager")
    for i in range(12):
        if frozen and i == 7:
            sparse_pcg.freeze()
        for graph in LIVE:
            graph.poison()
        got, want = fn(OVERLAPS[case](model.held, i)), reference(OVERLAPS[case](reference.held, i))
        assert same(got, want) and same(model.held, reference.held)
        got[2].fill_(3)
        want[2].fill_(3)
        assert same(model.held, reference.held)
    assert sparse_pcg.stats().replays > 0


# --- splitting ---


def _cut(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.ops.toy.mix_into(x, out)
    return out


TABLE = torch.arange(3.0)

SPLITS: dict[str, tuple[Callable[[torch.Tensor], Any], int, int]] = {
    # function of x [T, 3], captured pieces, cuts
    "only a cut": (lambda x: torch.ops.toy.scaled(x), 0, 1),
    "cut first": (lambda x: torch.ops.toy.scaled(x) + 1, 1, 1),
    "cut last": (lambda x: torch.ops.toy.scaled(x + 1), 1, 1),
    "cuts adjacent": (lambda x: torch.ops.toy.scaled(torch.ops.toy.scaled(x)), 0, 2),
    "cuts adjacent in the middle": (lambda x: torch.ops.toy.scaled(torch.ops.toy.scaled(x + 1)) + 1, 2, 2),
    "several results at once": (lambda x: torch.ops.toy.halves(x), 0, 1),
    "one result of several": (lambda x: torch.ops.toy.halves(x + 1)[1] * 2, 2, 1),
    "only an allocation between": (lambda x: mixed(mixed(x)), 0, 2),
    "only views between": (lambda x: mixed(mixed(x).t().view(3, -1).t()), 0, 2),
    "a result that is never read": (lambda x: (mixed(x + 1), x * 2)[1], 2, 1),
    "the argument as it is": (lambda x: (x, mixed(x + 1)), 1, 1),
    "a constant between": (lambda x: mixed(mixed(x) + TABLE) * TABLE.sum(), 2, 2),
    "a list constant": (lambda x: mixed(x) + torch.tensor([1.0, 2.0, 3.0]), 1, 1),
    "the op itself and a function of it": (lambda x: _cut(mixed(x), torch.empty_like(x)), 0, 2),
    "written after the cut": (lambda x: (mixed(x), x.add_(1), mixed(x)), 1, 2),
}


@pytest.mark.parametrize("case", SPLITS)
def test_pieces_and_cuts(case: str) -> None:
    body, pieces, cuts = SPLITS[case]
    fn = sparse_pcg.compile(body, **OPTIONS)
    rows = [8, 8, 4, 8, 4, 4, 5, 8]
    agree(fn, body, lambda seed: (data(seed, rows[seed], 3),), len(rows))
    graph = graph_of(fn, data(0, 8, 3))
    assert (graph.piece_count, graph.cut_count) == (pieces, cuts)
    assert sparse_pcg.stats().captures == 2 * pieces


def test_a_graph_of_arguments_only_is_no_trouble() -> None:
    body = lambda x, y: (y, x, 3)  # noqa: E731
    fn = plain(body)
    x, y = data(0, 8, 3), data(1, 8, 3)
    assert fn(x, y)[0] is y and fn(x, y)[1] is x


def test_a_size_that_depends_on_the_data() -> None:
    """What a mask selects is known only after a run: that piece, and what takes its result, runs each time."""

    def body(x: torch.Tensor) -> Any:
        out = mixed(x * 2)
        chosen = (x + 1)[out > 0]
        return torch.ops.toy.scaled(chosen[:, None]), chosen.sum() + out, chosen * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agree(plain(body), body, lambda seed: (data(seed, 8, 3),))
    assert sparse_pcg.stats().replays > 0


@pytest.mark.parametrize("call", range(3), ids=["warm-up", "capture", "replay"])
def test_an_error_leaves_nothing_behind(call: int) -> None:
    """A cut that fails in the warm-up, the capture or a replay: the next call is as if it had not been."""
    fn = sparse_pcg.compile(moded, **OPTIONS)
    for seed in range(6):
        x = data(seed, 8, 3)
        if seed == call:
            with context(rows="eight"), pytest.raises(TypeError):  # type: ignore[arg-type]
                fn(x, None)
        Context.calls = 0
        got = fn(x, None)
        assert Context.calls == 1 and same(got, moded(x, None))
    with sparse_pcg.stats().expect(replays=1):
        fn(x, None)


# --- fake implementations ---

FAULTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "shape": (lambda x, y: x * 2, lambda x, y: torch.empty_like(x[:, 1:])),
    "rows of the wrong argument": (lambda x, y: x * 2, lambda x, y: x.new_empty(y.shape[0], x.shape[1])),
    "dtype": (lambda x, y: x.argsort(1), lambda x, y: torch.empty_like(x)),
    "row stride": (
        lambda x, y: x.new_zeros(x.shape[0], x.shape[1] + 256)[:, : x.shape[1]],
        lambda x, y: torch.empty_like(x),
    ),
    "undeclared write": (lambda x, y: x.add_(1) * 2, lambda x, y: torch.empty_like(x)),
    "an argument returned": (lambda x, y: x, lambda x, y: x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_of_ops_sees_a_fake_that_is_not_exact(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fake = FAULTS[fault]
    library = torch.library.Library("toy", "FRAGMENT")
    name = f"faulty_{list(FAULTS).index(fault)}"
    library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
    library.impl(name, real, "CompositeExplicitAutograd")
    library._register_fake(name, fake)
    monkeypatch.setitem(OPS, name, SimpleNamespace(overload=getattr(torch.ops.toy, name).default))  # type: ignore
    with pytest.raises((AssertionError, OpCheckError)):
        opcheck(name, {"x": data(0, 5, 4), "y": data(1, 3, 2)})
    library._destroy()


def test_no_operator_returns_what_it_writes() -> None:
    """Such results are an error in PyTorch and stale in a graph: ops of ours write or return, never both."""
    for op in OPS.values():
        arguments = op.overload._schema.arguments
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        returns = op.overload._schema.returns
        assert all(r.alias_info is None for r in returns) and not (writes and returns), op.name
