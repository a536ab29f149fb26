"""One rank's part of a model: which heads, columns and experts it holds, and how the ranks' results are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from .config import ModelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Cut(NamedTuple):
    """How a rank's part lies in a whole tensor: pieces of ``size`` along ``dim``, (first in the whole, first here)."""

    dim: int
    size: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rank:
    """Rank ``index`` of ``size`` that share a model between them.

    Each holds 1 / size of the attention heads and of the columns of the dense and shared MLPs, and of the routed
    experts either that part of each one's columns or, with ``expert_parallel``, that part of the experts whole.
    Embedding, head, norms, router and indexer are whole on every rank. What attention and MLP of the ranks give
    is to be summed over them.

    group: name of the process group over which the model does that itself, one all-reduce each (``Rank.of``); None:
    the model returns what its own part gives.

    Raises ValueError for an index that is not in 0 .. size - 1.
    """

    index: int = 0
    size: int = 1
    expert_parallel: bool = False
    group: str | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Rank: size must be at least 1, got {self.size}")
        if not 0 <= self.index < self.size:
            raise ValueError(f"Rank: index must be 0 to {self.size - 1}, got {self.index}")

    @classmethod
    def of(cls, mesh: DeviceMesh, expert_parallel: bool = False) -> Rank:
        """This process's rank along ``mesh``, which has one dim (of a larger one: ``mesh["tp"]``).

        Raises ValueError for a mesh of more dims.
        """
        if mesh.ndim != 1:
            raise ValueError(f"Rank: mesh must have one dim, as mesh['tp'] has, got {mesh.ndim}")
        alone = mesh.size() == 1
        return cls(mesh.get_local_rank(), mesh.size(), expert_parallel, None if alone else mesh.get_group().group_name)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks of the group; ``x`` itself where there is none."""
        if self.group is None:
            return x
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", self.group))

    def span(self, total: int, name: str) -> tuple[int, int]:
        """First and number of this rank's part of ``total``. Raises ValueError if it does not divide evenly."""
        if total % self.size:
            raise ValueError(f"Rank: {name} must be a multiple of size {self.size}, got {total}")
        return self.index * (total // self.size), total // self.size

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The configuration of this rank's part of ``config``. Raises ValueError for what does not divide evenly."""
        if self.size == 1:
            return config
        local_experts, expert_width = config.local_experts, config.moe_intermediate_size
        if self.expert_parallel:
            first, count = config.experts_here
            start, number = self.span(count, "the number of routed experts")
            local_experts = (first + start, number)
        else:
            expert_width = self.span(expert_width, "moe_intermediate_size")[1]
        return replace(
            config,
            num_heads=self.span(config.num_heads, "num_heads")[1],
            intermediate_size=self.span(config.intermediate_size, "intermediate_size")[1],
            shared_intermediate_size=self.span(config.shared_width, "shared_intermediate_size")[1] or None,
            moe_intermediate_size=expert_width,
            local_experts=local_experts,
        )

    def cut(self, name: str, whole: Sequence[int], part: Sequence[int]) -> Cut:
        """Where this rank's part of the parameter ``name`` lies in the whole one, both by shape."""
        dim = next((d for d, (w, p) in enumerate(zip(whole, part, strict=True)) if w != p), None)
        if dim is None:
            return Cut(0, whole[0], ((0, 0),))
        count = part[dim]
        if name.endswith("gate_up_proj") and dim == len(whole) - 2:  # two halves, each of which is shared
            count //= 2
            return Cut(dim, count, ((self.index * count, 0), (whole[dim] // 2 + self.index * count, count)))
        return Cut(dim, count, ((self.index * count, 0),))
