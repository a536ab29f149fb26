"""A model's configuration from the ``config.json`` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import ModelConfig, Yarn

# What the two families fix in code rather than in config.json. The Hadamard rotation of index queries and keys
# leaves their products as they are; it is what DeepSeek's own implementation quantises.
_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"indexer_interleaved": False, "indexer_hadamard": True, "indexer_round_scale": True},
    "glm_moe_dsa": {"indexer_interleaved": True, "indexer_hadamard": False, "indexer_round_scale": False},
}

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
    "norm_topk_prob": "norm_topk_prob",
    "rms_norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {  # of the fields that are no integers
    "routed_scaling_factor": ("a number", (int, float)),
    "rms_norm_eps": ("a number", (int, float)),
    "norm_topk_prob": ("true or false", (bool,)),
}

# Other values mean another model than this one.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
}


def _require(condition: bool, name: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"config.json: {name} must be {expected}, got {got!r}")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming the file if it holds anything else."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"checkpoint: {path.name} must hold JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint: {path.name} must hold a JSON object, got {type(found).__name__}")
    return found


def read_config(source: Any) -> dict[str, Any]:
    """The fields of ``config.json``, from a checkpoint's folder, the file, a mapping, or an object with ``to_dict``.

    Raises FileNotFoundError if there is no such file, ValueError if it is no JSON object.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        return read_object(path / "config.json" if path.is_dir() else path)
    return dict(source if isinstance(source, Mapping) else source.to_dict())


def _yarn(rope: Mapping[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(kind in ("default", "yarn"), "rope_type", "'default' or 'yarn'", kind)
    if kind == "default":
        return None
    for name in ("factor", "original_max_position_embeddings"):
        _require(name in rope, name, "given for yarn", None)
    for name, value in (("attention_factor", None), ("truncate", True)):
        _require(rope.get(name, value) == value, name, f"{value} or absent", rope.get(name))
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    _require(bool(mscale) or not mscale_all_dim, "mscale", "given where mscale_all_dim is", mscale)
    return Yarn(
        factor=float(rope["factor"]),
        original_max_positions=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        mscale=float(mscale) if mscale and mscale_all_dim else 1.0,
        mscale_all_dim=float(mscale_all_dim or 0.0),
    )


def _sharing(given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    types, pattern = given.get("indexer_types"), given.get("index_topk_pattern")
    if types is not None:
        return {"indexer_types": tuple(types)[:layers]}
    if isinstance(pattern, str):
        return {"index_topk_pattern": pattern[:layers]}
    if pattern is not None and set(pattern) <= {"F", "S"}:
        return {"index_topk_pattern": "".join(pattern)[:layers]}
    if pattern is not None:
        return {"indexer_types": tuple(pattern)[:layers]}
    offset = given.get("index_skip_topk_offset")
    for name in ("index_topk_freq", "index_skip_topk_offset"):
        _require(type(given.get(name)) in (int, type(None)), name, "an integer", given.get(name))
    return {
        "index_topk_freq": max(given.get("index_topk_freq") or 1, 1),
        "index_topk_offset": 2 if offset is None else offset,
    }


def _dense_layers(given: Mapping[str, Any], whole: int) -> int:
    types = given.get("mlp_layer_types")
    if types is None:
        _require("first_k_dense_replace" in given, "first_k_dense_replace", "given", None)
        return given["first_k_dense_replace"]
    dense = list(types).count("dense")
    expected = ["dense"] * dense + ["sparse"] * (whole - dense)
    _require(list(types) == expected, "mlp_layer_types", "'dense' of the first layers, then 'sparse'", types)
    return dense


def config_from_hf(source: Any, num_layers: int | None = None) -> ModelConfig:
    """The configuration of a ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM`` checkpoint.

    source: the checkpoint's folder, its ``config.json``, the fields of that file, or a ``transformers``
        configuration.
    num_layers: of the first layers only; None: all.
    Raises ValueError naming a field that is absent or describes another model.
    """
    given = read_config(source)
    family = given.get("model_type")
    _require(family in _FAMILIES, "model_type", f"one of {sorted(_FAMILIES)}", family)
    for name, value in _FIXED.items():
        _require(given.get(name, value) in (value, None), name, repr(value), given.get(name))
    for name in (*_FIELDS.values(), "num_hidden_layers"):
        _require(given.get(name) is not None, name, "given", None)
    for name in (*_FIELDS.values(), "num_hidden_layers"):
        expected, kinds = _KINDS.get(name, ("an integer", (int,)))
        _require(type(given[name]) in kinds, name, expected, given[name])
    whole = given["num_hidden_layers"]
    layers = whole if num_layers is None else num_layers
    _require(isinstance(layers, int) and 1 <= layers <= whole, "num_layers", f"1 to {whole}", layers)
    # Older files have rope_scaling, and rope_theta beside it.
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    traits = dict(_FAMILIES[str(family)])
    if given.get("indexer_rope_interleave") is not None:
        traits["indexer_interleaved"] = given["indexer_rope_interleave"]
    return ModelConfig(
        num_layers=layers,
        first_k_dense=min(_dense_layers(given, whole), layers),
        rope_theta=float(rope.get("rope_theta") or given.get("rope_theta") or 1e4),
        yarn=_yarn(rope),
        **{ours: given[theirs] for ours, theirs in _FIELDS.items()},
        **_sharing(given, layers),
        **traits,
    )
