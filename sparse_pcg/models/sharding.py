"""One rank's part of a model: which heads, columns and experts it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import ModelConfig


@dataclass(frozen=True)
class Rank:
    """Rank ``index`` of ``size`` that share a model between them.

    Each holds 1 / size of the attention heads and of the columns of the dense and shared MLPs, and of the routed
    experts either that part of each one's columns or, with ``expert_parallel``, that part of the experts whole.
    Embedding, head, norms, router and indexer are whole on every rank. What attention and MLP of the ranks give
    is to be summed over them.

    Raises ValueError for an index that is not in 0 .. size - 1.
    """

    index: int = 0
    size: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Rank: size must be at least 1, got {self.size}")
        if not 0 <= self.index < self.size:
            raise ValueError(f"Rank: index must be 0 to {self.size - 1}, got {self.index}")

    def span(self, total: int, name: str) -> tuple[int, int]:
        """First and number of this rank's part of ``total``. Raises ValueError if it does not divide evenly."""
        if total % self.size:
            raise ValueError(f"Rank: {name} must be a multiple of size {self.size}, got {total}")
        return self.index * (total // self.size), total // self.size

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The configuration of this rank's part of ``config``. Raises ValueError for what does not divide evenly."""
        if self.size == 1:
            return config
        if config.local_experts is not None:
            raise ValueError("Rank: config must be that of a whole model, got one with local_experts")
        local_experts, expert_width = None, config.moe_intermediate_size
        if self.expert_parallel:
            local_experts = self.span(config.n_routed_experts, "n_routed_experts")
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
