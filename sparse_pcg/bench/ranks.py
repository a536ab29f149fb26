"""What several ranks that run a bench together agree on: when a turn starts, and how long the slowest took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..models.sharding import Rank


class Turns:
    """rank: this process's; where there is only one, nothing waits and every value is its own."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def start(self) -> None:
        """Wait for all ranks."""
        self.most(0.0)

    def most(self, value: float) -> float:
        """The largest of the ranks' values."""
        return self._reduced([value], "MAX")[0]

    def least(self, value: float) -> float:
        """The smallest."""
        return self._reduced([value], "MIN")[0]

    def slowest(self, taken: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Per turn of each way of running, the time of the slowest rank."""
        return {name: self._reduced(times, "MAX") if times else [] for name, times in taken.items()}

    def _reduced(self, values: list[float], op: str) -> list[float]:
        if self.rank.group is None:
            return values
        import torch.distributed as dist

        # On the host, by gloo: the GPU is what is measured.
        tensor = torch.tensor(values, dtype=torch.float64)
        resolve: Any = dist.distributed_c10d._resolve_process_group
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=resolve(self.rank.group))
        return [float(v) for v in tensor]
