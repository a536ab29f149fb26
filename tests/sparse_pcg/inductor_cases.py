"""Small models whose compilation stock Inductor gets wrong, and a way to compile them with and without
repairs.

Every model takes and returns tensors of small integers, so that a right result is right in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code

from sparse_pcg import inductor_fixes
from sparse_pcg.inductor_fixes import compile_piece

Model = Callable[..., Any]

_library = torch.library.Library("inductor_cases", "DEF")


def _op(schema: str, body: Callable[..., Any], fake: Callable[..., Any] = lambda *args: None) -> Any:
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, body, "CompositeExplicitAutograd")
    _library._register_fake(name, fake)
    return getattr(torch.ops.inductor_cases, name)


def _store(rows: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    pool[slots] = rows


def _write(x: torch.Tensor, y: torch.Tensor) -> None:
    x.zero_()  # before y is read: shows whether y is x's memory
    x.copy_(x + y)


def _fill(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


store = _op("store(Tensor rows, Tensor slots, Tensor(a!) pool) -> ()", _store)
write = _op("write(Tensor(a!) x, Tensor y) -> ()", _write)
fill = _op("fill(Tensor(a!) x, float value) -> ()", _fill)
opaque_copy = _op("opaque_copy(Tensor x) -> Tensor", torch.clone, torch.empty_like)


# -- an operator writes a view of an input that starts inside its storage

OFFSET_SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda p: p[4:9],
    "columns": lambda p: p[:, 2:6],
    "narrow": lambda p: p.narrow(0, 1, 3),
    "split": lambda p: p.split(5)[1],
    "inner": lambda p: p.unflatten(1, (2, 4))[:, 1],
}
OTHER_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda p: p[:],
    "select": lambda p: p[3],
    "column": lambda p: p[:, 3],
    "both": lambda p: p[1:9, 2:6],
    "flat": lambda p: p.view(-1)[5:17],
    "steps": lambda p: p[::2],
    "transposed": lambda p: p.t()[1:3],
    "blocks": lambda p: p.view(6, 2, 8)[2:4],
}


def pool_at(offset: int) -> torch.Tensor:
    """A [12, 8] view, ``offset`` elements into its storage."""
    return torch.arange(400.0)[offset : offset + 96].view(12, 8)


def writes_views(views: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> Model:
    def model(*pools: torch.Tensor) -> list[torch.Tensor]:
        for i, (view, pool) in enumerate(zip(views, pools, strict=True)):
            fill(view(pool), -1.0 - i)
        return [pools[0][:5] + 1]

    return model


# -- a value read before an operator writes what it was read from, and used after


def _index(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    before = pool[slots]
    store(before + x, slots, pool)
    return before * 2 + pool[slots]


def _index_select(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    before = torch.index_select(pool, 0, slots)
    store(before + x, slots, pool)
    return before + 1


def _slice(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    before = pool[: x.shape[0]] * 2
    store(before + x, slots, pool)
    return before + pool[: x.shape[0]]


def _loop(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    for i in range(2):
        store(x * (i + 1), slots, pool)
        x = x + pool[slots]
    return x


def _fresh(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty_like(pool)
    fill(buffer, 3.0)
    before = buffer[slots] * 2
    store(before + x, slots, buffer)
    return before + buffer[slots] + pool[slots]


def _two_pools(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    before = pool[slots] * 3
    other = pool * 2
    store(before, slots, other)
    store(before + x, slots, pool)
    return before + other[slots]


PENDING_READS: dict[str, Model] = {
    "index": _index, "index_select": _index_select, "slice": _slice, "loop": _loop, "fresh": _fresh,
    "two_pools": _two_pools,
}  # fmt: skip


def reads_late(models: Sequence[Model]) -> Model:
    def model(x: torch.Tensor, slots: torch.Tensor, *pools: torch.Tensor) -> list[torch.Tensor]:
        return [each(x, slots, pool) for each, pool in zip(models, pools, strict=True)]

    return model


def late_inputs(rows: int) -> list[torch.Tensor]:
    """x [rows, 8], slots [rows], then one pool [12, 8] per model of ``PENDING_READS``."""
    x = torch.arange(rows * 8.0).view(rows, 8) % 5
    slots = (torch.arange(rows) * 5) % 12
    return [x, slots, *(torch.arange(96.0).view(12, 8) + i for i in range(len(PENDING_READS)))]


# -- an operator writes x and reads a copy of x that nothing else uses

DROPPED_CLONES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "empty_like_copy": lambda x: torch.empty_like(x).copy_(x),
    "to_copy": lambda x: x.to(x.dtype, copy=True),
    "cat": lambda x: torch.cat([x]),
    "clone_of_view": lambda x: x.view(-1).clone().view(x.shape),
    "pad_nothing": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "repeat_once": lambda x: x.repeat(1, 1),
    "clone_of_slice": lambda x: x[0:].clone(),
    "convert_and_back": lambda x: x.to(torch.float64).to(x.dtype),
}
KEPT_COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add_nothing": lambda x: x + 0,
    "times_one": lambda x: x * 1,
    "opaque": lambda x: opaque_copy(x),
}


def writes_what_it_copied(copies: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> Model:
    """One more input than copies: there the written and the read half overlap."""

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        for copy, x in zip(copies, xs[:-1], strict=True):
            write(x, copy(x))
        write(xs[-1][2:6], xs[-1][0:4].clone())
        temporary = torch.sin(xs[-1] * 0)
        write(temporary.clone(), temporary)
        return [xs[0][:1] + 1, temporary]

    return model


# -- one of each, small


def one_of_each(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
    fill(a[4:9], -1.0)
    before = b[:2] * 2
    write(b, before[:1])
    write(c, c.clone())
    return [a[:1], before + b[:2], c[:1]]


ONE_OF_EACH = ("offset_slice", "pending_read", "dropped_clone")


# -- compiling


@dataclass(frozen=True)
class Run:
    """inputs, outputs: after one call; code: what Inductor generated (empty on a cache hit)."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    code: str
    compiled: Callable[..., Any]


def piece_inputs(gm: torch.fx.GraphModule) -> list[Any]:
    return [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]


def run(model: Model, inputs: list[torch.Tensor], *, stock: bool = False, caches: bool = False) -> Run:
    """Compile ``model`` for ``inputs`` and call it once; the inputs are written.

    Without ``caches`` nothing compiled is looked up but C++ kernels, by their source.
    """

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        with ExitStack() as stack:
            stack.enter_context(torch._inductor.config.patch(fx_graph_cache=caches))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=caches))
            return compile_fx(gm, examples) if stock else compile_piece(gm, piece_inputs(gm))

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    outputs, code = run_and_get_code(compiled, *inputs)
    return Run(inputs, outputs, "\n".join(code), compiled)


def eager(model: Model, inputs: list[torch.Tensor]) -> Run:
    return Run(inputs, model(*inputs), "", model)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


@contextmanager
def without(repair: str) -> Iterator[None]:
    enabled = inductor_fixes._enabled
    inductor_fixes._enabled = tuple(r for r in enabled if r != repair)
    try:
        yield
    finally:
        inductor_fixes._enabled = enabled
