"""Collectives of a model that one process looks at alone: the other ranks are not there to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _first(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x


def _gathered(x: torch.Tensor, ranks: int, *args: Any) -> torch.Tensor:
    return torch.cat([x] * ranks)


def _scattered(x: torch.Tensor, op: str, ranks: int, *args: Any) -> torch.Tensor:
    return x[: x.shape[0] // ranks].clone()


# Results of the right shape, as if all ranks had the same and their sum were one of them.
_STAND_INS: dict[str, Callable[..., Any]] = {
    "wait_tensor": _first,
    "all_reduce": lambda x, *args: x.clone(),
    "all_reduce_": _first,
    "broadcast": lambda x, *args: x.clone(),
    "broadcast_": _first,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
}


def stand_in(func: Any) -> Callable[..., Any] | None:
    """What to call in place of a collective; None for any other op."""
    if func.namespace != "_c10d_functional":
        return None
    return _STAND_INS.get(func._schema.name.partition("::")[2])


class Alone(TorchDispatchMode):
    """Inside the block collectives ask no other rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (stand_in(func) or func)(*args, **(kwargs or {}))
