"""Where each tensor of a Hugging Face checkpoint goes: its name, whole shape, a rank's part of it, and the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from .config import ModelConfig
from .sharding import Rank

Store = Callable[[Mapping[str, torch.Tensor], torch.Tensor], None]
Span = tuple[int, int]  # first and number


@dataclass(frozen=True)
class Wanted:
    """A tensor that the checkpoint has to have.

    part: the slice of each dim that this rank reads; None if it reads nothing of it.
    store: puts what was read into the parameters, by name, in their dtype.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] | None
    store: Store


def _slice(span: Span) -> slice:
    return slice(span[0], span[0] + span[1])


def _whole(name: str, shape: tuple[int, ...], parameter: str, *place: slice) -> Wanted:
    return _part(name, shape, tuple(slice(0, size) for size in shape), parameter, *place)


def _part(
    name: str, shape: tuple[int, ...], part: tuple[slice, ...], parameter: str, *place: slice | int
) -> Wanted:
    def store(parameters: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> None:
        parameters[parameter][place].copy_(tensor)

    return Wanted(name, shape, part, store)


class LayerNames:
    """The tensors of one decoder layer: ``model.layers.{source}.*`` to ``layers.{target}.*``.

    config: of the whole model. stacked: the experts' tensors lie in one tensor each, as in a ``transformers`` module,
    not in one an expert.
    """

    def __init__(
        self, config: ModelConfig, rank: Rank, source: int, target: int, moe: bool, indexer: bool, stacked: bool
    ) -> None:
        self.config, self.rank = config, rank
        self.theirs, self.ours = f"model.layers.{source}.", f"layers.{target}."
        self.moe, self.indexer, self.stacked = moe, indexer, stacked

    def __iter__(self) -> Iterator[Wanted]:
        hidden = (self.config.hidden_size,)
        yield _whole(f"{self.theirs}input_layernorm.weight", hidden, f"{self.ours}input_norm")
        yield _whole(f"{self.theirs}post_attention_layernorm.weight", hidden, f"{self.ours}post_attention_norm")
        yield from self._attention()
        if self.indexer:
            yield from self._indexer()
        if self.moe:
            yield from self._moe()
        else:
            yield from self._mlp("mlp.", "mlp.", self.config.intermediate_size)

    def _attention(self) -> Iterator[Wanted]:
        c, theirs, ours = self.config, f"{self.theirs}self_attn.", f"{self.ours}attention."
        first, heads = self.rank.span(c.num_heads, "num_heads")
        hidden, q_rank, latent = c.hidden_size, c.q_lora_rank, c.kv_lora_rank
        kv_a = latent + c.qk_rope_head_dim
        yield _whole(f"{theirs}q_a_proj.weight", (q_rank, hidden), f"{ours}qkv_a_proj", slice(q_rank))
        kv_place = slice(q_rank, None)
        yield _whole(f"{theirs}kv_a_proj_with_mqa.weight", (kv_a, hidden), f"{ours}qkv_a_proj", kv_place)
        yield _whole(f"{theirs}q_a_layernorm.weight", (q_rank,), f"{ours}q_a_norm")
        yield _whole(f"{theirs}kv_a_layernorm.weight", (latent,), f"{ours}kv_a_norm")

        def rows(head: int) -> slice:
            return _slice((first * head, heads * head))

        q, v = c.qk_head_dim, c.v_head_dim
        part = (rows(q), slice(0, q_rank))
        yield _part(f"{theirs}q_b_proj.weight", (c.num_heads * q, q_rank), part, f"{ours}q_b_proj")
        part = (slice(0, hidden), rows(v))
        yield _part(f"{theirs}o_proj.weight", (hidden, c.num_heads * v), part, f"{ours}o_proj")

        def store(parameters: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> None:
            keys, values = tensor.unflatten(0, (heads, -1)).split((c.qk_nope_head_dim, v), dim=1)
            parameters[f"{ours}w_kc"].copy_(keys)
            parameters[f"{ours}w_vc"].copy_(values.transpose(1, 2))

        kv = c.qk_nope_head_dim + v
        shape = (c.num_heads * kv, latent)
        yield Wanted(f"{theirs}kv_b_proj.weight", shape, (rows(kv), slice(0, latent)), store)

    def _indexer(self) -> Iterator[Wanted]:
        c, theirs, ours = self.config, f"{self.theirs}self_attn.indexer.", f"{self.ours}attention.indexer."
        dim = c.index_head_dim
        yield _whole(f"{theirs}wq_b.weight", (c.index_n_heads * dim, c.q_lora_rank), f"{ours}wq_b")
        yield _whole(f"{theirs}wk.weight", (dim, c.hidden_size), f"{ours}wk")
        yield _whole(f"{theirs}k_norm.weight", (dim,), f"{ours}k_norm")
        yield _whole(f"{theirs}k_norm.bias", (dim,), f"{ours}k_norm_bias")
        yield _whole(f"{theirs}weights_proj.weight", (c.index_n_heads, c.hidden_size), f"{ours}weights_proj")

    def _mlp(self, theirs: str, ours: str, width: int) -> Iterator[Wanted]:
        theirs, ours, hidden = self.theirs + theirs, self.ours + ours, self.config.hidden_size
        span = self.rank.span(width, f"{theirs}width")
        columns = (slice(0, hidden), _slice(span))
        place = (slice(0, span[1]), slice(span[1], None))
        for name, at in zip(("gate_proj", "up_proj"), place, strict=True):
            yield _part(f"{theirs}{name}.weight", (width, hidden), columns[::-1], f"{ours}gate_up_proj", at)
        yield _part(f"{theirs}down_proj.weight", (hidden, width), columns, f"{ours}down_proj")

    def _moe(self) -> Iterator[Wanted]:
        c, theirs, ours = self.config, f"{self.theirs}mlp.", f"{self.ours}mlp."
        yield _whole(f"{theirs}gate.weight", (c.n_routed_experts, c.hidden_size), f"{ours}router")
        yield _whole(f"{theirs}gate.e_score_correction_bias", (c.n_routed_experts,), f"{ours}correction_bias")
        if c.shared_width:
            yield from self._mlp("mlp.shared_experts.", "mlp.shared.", c.shared_width)
        whole = (0, c.moe_intermediate_size)
        part = self.rank.part_of(c)
        width = whole if self.rank.expert_parallel else self.rank.span(whole[1], "moe_intermediate_size")
        first, count = part.experts_here
        yield from (self._stacked if self.stacked else self._experts)(f"{theirs}experts.", ours, (first, count), width)

    def _stacked(self, theirs: str, ours: str, experts: Span, width: Span) -> Iterator[Wanted]:
        count, inter, hidden = self.config.n_routed_experts, self.config.moe_intermediate_size, self.config.hidden_size
        shape = (count, 2 * inter, hidden)
        for half in (0, 1):
            rows = _slice((half * inter + width[0], width[1]))
            part = (_slice(experts), rows, slice(0, hidden))
            place = (slice(None), _slice((half * width[1], width[1])))
            yield _part(f"{theirs}gate_up_proj", shape, part, f"{ours}gate_up_proj", *place)
        part = (_slice(experts), slice(0, hidden), _slice(width))
        yield _part(f"{theirs}down_proj", (count, hidden, inter), part, f"{ours}down_proj")

    def _experts(self, theirs: str, ours: str, experts: Span, width: Span) -> Iterator[Wanted]:
        inter, hidden = self.config.moe_intermediate_size, self.config.hidden_size
        columns, gate_up = (slice(0, hidden), _slice(width)), f"{ours}gate_up_proj"
        for expert in range(self.config.n_routed_experts):
            local, prefix = expert - experts[0], f"{theirs}{expert}."
            rows = columns[::-1]
            wanted = (
                _part(f"{prefix}gate_proj.weight", (inter, hidden), rows, gate_up, local, slice(0, width[1])),
                _part(f"{prefix}up_proj.weight", (inter, hidden), rows, gate_up, local, slice(width[1], None)),
                _part(f"{prefix}down_proj.weight", (hidden, inter), columns, f"{ours}down_proj", local),
            )
            here = 0 <= local < experts[1]
            yield from wanted if here else (replace(tensor, part=None) for tensor in wanted)


def model_names(config: ModelConfig, rank: Rank, stacked: bool, tied: bool) -> Iterator[Wanted]:
    """The tensors of a whole model but its NextN layer. tied: the head is the embedding, once more."""
    embedding = (config.vocab_size, config.hidden_size)
    yield _whole("model.embed_tokens.weight", embedding, "embed_tokens")
    yield _whole("model.norm.weight", (config.hidden_size,), "norm")
    yield _whole("model.embed_tokens.weight" if tied else "lm_head.weight", embedding, "lm_head")
    for layer in range(config.num_layers):
        moe = layer >= config.first_k_dense
        yield from LayerNames(config, rank, layer, layer, moe, config.has_indexer(layer), stacked)


def nextn_names(config: ModelConfig, rank: Rank, source: int, stacked: bool) -> Iterator[Wanted]:
    """The tensors of the NextN layer, ``model.layers.{source}.*``, without what it shares with the model."""
    prefix, hidden = f"model.layers.{source}.", config.hidden_size
    yield _whole(f"{prefix}enorm.weight", (hidden,), "enorm")
    yield _whole(f"{prefix}hnorm.weight", (hidden,), "hnorm")
    yield _whole(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "eh_proj")
    yield _whole(f"{prefix}shared_head.norm.weight", (hidden,), "norm")
    yield from LayerNames(config, rank, source, 0, True, True, stacked)
