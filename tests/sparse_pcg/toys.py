"""Toy operators and models that the backend's tests share. Nothing here knows DSA."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LIBRARY = torch.library.Library("toy", "FRAGMENT")
CUT = (torch.Tag.cudagraph_unsafe,)


class Context:
    """What the cut bodies read at run time, as an engine's forward context: valid rows, kv lengths, calls so far."""

    rows: int | None = None
    kv_len: int = 1
    calls = 0


@contextmanager
def context(rows: int | None = None, kv_len: int = 1) -> Any:
    """Set what the bodies read inside the block."""
    before = Context.rows, Context.kv_len
    Context.rows, Context.kv_len = rows, kv_len
    try:
        yield
    finally:
        Context.rows, Context.kv_len = before


def _define(schema: str, body: Any, fake: Any, tags: tuple[Any, ...] = ()) -> None:
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    LIBRARY._register_fake(name, fake)


def _mix_into(x: torch.Tensor, out: torch.Tensor) -> None:
    Context.calls += 1
    rows = x.shape[0] if Context.rows is None else Context.rows
    out[:rows] = x[:rows].cumsum(0) * Context.kv_len
    out[rows:] = -1


def _store(x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    pool[slots] = x


# The cut: rows mix, Python state is read at run time, the output is preallocated.
_define("mix_into(Tensor x, Tensor(a!) out) -> ()", _mix_into, lambda x, out: None, CUT)
# The same without the tag, to be named in cut_ops.
_define("mix_untagged(Tensor x, Tensor(a!) out) -> ()", _mix_into, lambda x, out: None)
# Cuts that return fresh tensors.
_define("scaled(Tensor x) -> Tensor", lambda x: x * Context.kv_len, lambda x: torch.empty_like(x), CUT)
_define(
    "halves(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x * 0.5, x.sum(1)),
    lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])),
    CUT,
)
# A captured op that writes a pool.
_define("store(Tensor x, Tensor slots, Tensor(a!) pool) -> ()", _store, lambda x, slots, pool: None)
# A row-wise op that a graph may hold.
_define("twice(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x))


class Layer(nn.Module):
    """Linear, store to a pool, read it back, a cut into a preallocated buffer, a residual."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.register_buffer("pool", torch.zeros(rows, width))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.lin(x))
        torch.ops.toy.store(y, slots, self.pool)
        out = torch.empty_like(y)
        torch.ops.toy.mix_into(y, out)
        return x + out + self.pool[slots]


class Toy(nn.Module):
    """A few such layers: cuts = layers."""

    def __init__(self, layers: int = 3, width: int = 8, rows: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, rows) for _ in range(layers))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, slots)
        return x


def inputs(rows: int, width: int = 8, pool: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, width] and distinct slots [rows]."""
    generator = torch.Generator().manual_seed(1000 * seed + rows)
    return torch.randn(rows, width, generator=generator), torch.randperm(pool, generator=generator)[:rows]


def state(module: nn.Module) -> list[torch.Tensor]:
    """Copies of the module's buffers."""
    return [b.clone() for b in module.buffers()]


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of tensors, or of sequences of tensors."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
