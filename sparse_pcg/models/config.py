"""Shapes and constants of a DeepSeek-Sparse-Attention model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension: which RoPE frequencies are interpolated, and by how much attention is
    sharpened.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    @staticmethod
    def _sharpening(factor: float, mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    @property
    def cos_sin_scale(self) -> float:
        """Factor of the cosines and sines."""
        return self._sharpening(self.factor, self.mscale) / self._sharpening(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor of the attention scores."""
        return self._sharpening(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of MLA attention with a sparse-attention indexer, then a dense or MoE MLP, per layer.

    Layer sharing, the first of these that is given: ``indexer_types`` ("full" or "shared" per layer),
    ``index_topk_pattern`` (one letter per layer, S = shared), ``index_topk_freq`` with
    ``index_topk_offset`` (layer i is shared where max(i - offset + 1, 0) is no multiple of freq). A shared
    layer has no indexer and attends the selection of the layer before it.

    first_k_dense: layers below it have a dense MLP. n_group, topk_group: the router first keeps the
    ``topk_group`` best of ``n_group`` groups of experts. indexer_interleaved: the indexer's RoPE rotates
    neighbouring pairs, else the two halves; indexer_hadamard: index queries and keys go through a Hadamard
    rotation before they are quantised; indexer_round_scale: scales of the quantised ones are rounded up to
    powers of two; indexer_float8: False runs the indexer in plain float32, without rotation or quantisation,
    uncompiled only: the measure of what float8 does to the selection.

    lora_norm_eps: of the norms of the two latents (published models keep 1e-6 there whatever rms_norm_eps is).
    shared_intermediate_size: width of the shared experts' MLP; None: n_shared_experts * moe_intermediate_size.
    local_experts: (first, count), the routed experts whose weights are here, the others add nothing; None: all.
    One rank's part of a model is a configuration too (``Rank.part_of``): its heads and widths, and the experts
    it holds out of ``n_routed_experts``, all of which the router ranks.

    Raises ValueError for numbers that fit no such model.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_topk: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    first_k_dense: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-5
    index_norm_eps: float = 1e-6
    lora_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    yarn: Yarn | None = None
    max_positions: int = 8192
    rope_interleaved: bool = True
    indexer_interleaved: bool = True
    indexer_hadamard: bool = False
    indexer_round_scale: bool = False
    indexer_float8: bool = True
    shared_intermediate_size: int | None = None
    local_experts: tuple[int, int] | None = None
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | None = None
    index_topk_freq: int = 1
    index_topk_offset: int = 2

    def __post_init__(self) -> None:
        fixed = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
        for name, value in fixed.items():
            self._require(getattr(self, name) == value, name, f"{value}, which the cache layouts fix")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name not in ("first_k_dense", "n_shared_experts"):
                self._require(value >= 1, field.name, "at least 1")
        self._require(
            self.num_experts_per_tok <= self.n_routed_experts // self.n_group * self.topk_group,
            "num_experts_per_tok",
            "at most the experts of topk_group groups",
        )
        self._require(self.n_routed_experts % self.n_group == 0, "n_group", "a divisor of n_routed_experts")
        self._require(self.topk_group <= self.n_group, "topk_group", "at most n_group")
        if self.shared_intermediate_size is not None:
            self._require(self.shared_intermediate_size >= 1, "shared_intermediate_size", "at least 1, or None")
        if self.local_experts is not None:
            first, count = self.local_experts
            inside = first >= 0 and count >= 1 and first + count <= self.n_routed_experts
            self._require(inside, "local_experts", f"(first, count) within {self.n_routed_experts} experts")
        for name, kinds in (("indexer_types", {"full", "shared"}), ("index_topk_pattern", {"F", "S"})):
            given = getattr(self, name)
            if given is not None:
                expected = f"{self.num_layers} of {sorted(kinds)}, one per layer"
                self._require(len(given) == self.num_layers and set(given) <= kinds, name, expected)
        self._require(0 in self.index_layers, "indexer_types", "'full' for layer 0")

    def _require(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ValueError(f"ModelConfig: {name} must be {expected}, got {getattr(self, name)!r}")

    def has_indexer(self, layer_id: int) -> bool:
        """Whether layer ``layer_id`` selects tokens itself, rather than sharing the selection before it."""
        if self.indexer_types is not None:
            return self.indexer_types[layer_id] == "full"
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern[layer_id] != "S"
        return max(layer_id - self.index_topk_offset + 1, 0) % self.index_topk_freq == 0

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Ids of the layers with an indexer."""
        return tuple(layer for layer in range(self.num_layers) if self.has_indexer(layer))

    @property
    def experts_here(self) -> tuple[int, int]:
        """First and number of the routed experts whose weights are here."""
        return self.local_experts or (0, self.n_routed_experts)

    @property
    def shared_width(self) -> int:
        """Intermediate size of the shared experts' MLP; 0 if there are none."""
        if self.n_shared_experts == 0:
            return 0
        return self.shared_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    @property
    def qk_head_dim(self) -> int:
        """Length of a query head: not rotated and rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores."""
        return self.qk_head_dim**-0.5 * (self.yarn.softmax_factor if self.yarn else 1.0)
