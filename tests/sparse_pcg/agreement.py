"""What the tests of known kinds of failure share: calls against plain PyTorch, with everything stale poisoned."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

import sparse_pcg
from sparse_pcg import session
from sparse_pcg.compiled_graph import CompiledGraph
from sparse_pcg.counters import LIVE
from sparse_pcg.memory import overlaps
from tests.sparse_pcg.toys import context, same

SIZES = [4, 8, 16]
OPTIONS = {"capture_sizes": SIZES, "compiler": "eager"}


def fresh() -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()


def plain(fn: Callable[..., Any], **options: Any) -> Any:
    """As a user of torch.compile does it."""
    return torch.compile(fn, backend="sparse_pcg", fullgraph=True, options={**OPTIONS, **options})


def mixed(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.toy.mix_into(x, out)
    return out


def data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise(seed: int) -> list[torch.Tensor]:
    """Allocations between calls: what an op allocates next lies elsewhere."""
    return [torch.full((n,), float("nan")) for n in range(7 + seed % 5, 300, 31)]


def agree(
    fn: Callable[..., Any], body: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], calls: int = 5
) -> None:
    """``calls`` calls of ``fn`` equal ``body``'s, arguments included, with what graphs wrote poisoned before each.

    Results alias each other and the arguments as they do in PyTorch, and those of earlier calls do not change.
    """
    kept: list[tuple[list[Any], list[Any]]] = []
    held = []
    for seed in range(calls):
        ours, theirs = make(seed), make(seed)
        held.append(noise(seed))
        for graph in LIVE:
            graph.poison()
        with context(kv_len=seed + 1), torch.no_grad():
            got, want = fn(*ours), body(*theirs)
        got, want = ([got], [want]) if isinstance(got, torch.Tensor) else (list(got), list(want))
        assert same(got, want) and same(tensors(ours), tensors(theirs))
        assert overlaps(tensors((*got, *ours))) == overlaps(tensors((*want, *theirs)))
        own = [g for g in got if all(g is not a for a in ours)]
        kept.append((own, [g.clone() for g in own]))
    assert all(same(now, then) for now, then in kept)


def tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def graph_of(fn: Callable[..., Any], *args: Any) -> CompiledGraph:
    seen: list[CompiledGraph] = []
    with session.watching(lambda graph, inputs, outputs: seen.append(graph)), torch.no_grad():
        fn(*args)
    assert len(seen) == 1
    return seen[0]


# One function whose arguments come in several kinds.


class Mode(enum.Enum):
    EXTEND = 1
    MIXED = 2


def moded(x: torch.Tensor, other: Any, mode: Mode = Mode.EXTEND) -> torch.Tensor:
    y = torch.relu(x) if mode is Mode.EXTEND else -x
    y = mixed(y.float())
    return y + 1 if other is None else y + other
