"""The reference model with the weights of a ``transformers`` model, shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..models import DSAModel, ModelConfig, Rank, config_from_hf
from ..models.hf_names import model_names
from ..models.rope import cos_sin_cache
from ..models.weights import DTYPES, assign

# What has a dtype of its own in the reference model, or takes any.
_OWN_DTYPE = (
    "mlp.gate.weight",
    "e_score_correction_bias",
    "indexer.weights_proj.weight",
    "indexer.k_norm.weight",
    "indexer.k_norm.bias",
)


def convert(hf_model: nn.Module, *, indexer_float8: bool = True) -> DSAModel:
    """The reference model with the weights of a ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM``.

    The weights are shared: what is written into those of one model, the other sees; ``hf_model`` goes on working and
    gives what it gave. Device and dtype are those of its embedding (bfloat16, float16 or float32).
    As they are: embedding, head, norms, q_b_proj, o_proj, down_proj, the experts, the indexer's wq_b, wk and k_norm.
    As views: the two halves of kv_b_proj, w_kc and w_vc.
    Made one tensor, a layer at a time, of which the parameters of ``hf_model`` become the views: q_a_proj with
    kv_a_proj_with_mqa, and gate_proj with up_proj.
    Copied, where its dtype is another than the reference model's: the indexer's weights_proj (that of the model), the
    router and its correction bias (float32).
    indexer_float8: of ``ModelConfig``; False to compare the selection with that of ``hf_model``.
    Raises ValueError, with ``hf_model`` as it was, for another kind of model, and naming parameters that are missing,
    not expected, of another shape or dtype, quantised, sharded, or not on one device.
    """
    config = replace(_config_of(hf_model), indexer_float8=indexer_float8)
    theirs = {**dict(hf_model.named_parameters()), **_persistent_buffers(hf_model)}
    if "lm_head.weight" not in theirs:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]  # tied
    _check(theirs, config)
    embedding = theirs["model.embed_tokens.weight"]
    model = DSAModel(config, embedding.dtype, "meta")
    with torch.no_grad():
        ours = {
            "embed_tokens": embedding.data,
            "norm": theirs["model.norm.weight"].data,
            "lm_head": theirs["lm_head.weight"].data,
        }
        for layer in range(config.num_layers):
            for name, tensor in _layer(theirs, f"model.layers.{layer}.", config, layer).items():
                ours[f"layers.{layer}.{name}"] = tensor
    assign(model, ours)
    model.cos_sin_cache = cos_sin_cache(config, embedding.device)
    return model


def _config_of(hf_model: nn.Module) -> ModelConfig:
    config: Any = getattr(hf_model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(hf_model, "lm_head"):
        raise ValueError(f"convert: hf_model must be a transformers ...ForCausalLM, got {type(hf_model).__name__}")
    layers: Any = hf_model.get_submodule("model.layers")
    return replace(config_from_hf(config), lora_norm_eps=layers[0].self_attn.q_a_layernorm.variance_epsilon)


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _check(theirs: dict[str, torch.Tensor], config: ModelConfig) -> None:
    shapes = {wanted.name: wanted.shape for wanted in model_names(config, Rank(), stacked=True, tied=False)}
    problems = [f"{name} is missing" for name in shapes if name not in theirs]
    problems += [f"{name} is not expected" for name in theirs if name not in shapes]
    embedding = theirs.get("model.embed_tokens.weight")
    device, dtype = (None, None) if embedding is None else (embedding.device, embedding.dtype)
    for name in (name for name in theirs if name in shapes):
        tensor, shape = theirs[name], shapes[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{name} must be of a plain float dtype, got {tensor.dtype}")
        elif tensor.dtype != dtype and not name.endswith(_OWN_DTYPE):
            problems.append(f"{name} must be of the embedding's dtype {dtype}, got {tensor.dtype}")
        elif type(tensor.data) is not torch.Tensor:
            problems.append(f"{name} must be a plain tensor, got {type(tensor.data).__name__}")
        elif tensor.device != device or tensor.is_meta:
            problems.append(f"{name} must be on the embedding's device, and not meta, got {tensor.device}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"convert: hf_model does not fit: {'; '.join(problems[:8])}{more}")


def _fused(*parameters: torch.Tensor) -> torch.Tensor:
    """One tensor with the rows of all, of which each becomes a view, unless they are such views already."""
    first, rows_before = parameters[0].data, 0
    for parameter in parameters:
        at = first.storage_offset() + rows_before * first.stride(0)
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and parameter.is_contiguous() and parameter.storage_offset() == at):
            break
        rows_before += len(parameter)
    else:
        return first.as_strided((rows_before, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return whole


def _layer(theirs: dict[str, torch.Tensor], prefix: str, config: ModelConfig, layer: int) -> dict[str, torch.Tensor]:
    def get(name: str) -> torch.Tensor:
        return theirs[prefix + name]

    dtype = theirs["model.embed_tokens.weight"].dtype
    kv_b = get("self_attn.kv_b_proj.weight").data.unflatten(0, (config.num_heads, -1))
    w_kc, w_vc = kv_b.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
    ours = {
        "input_norm": get("input_layernorm.weight").data,
        "post_attention_norm": get("post_attention_layernorm.weight").data,
        "attention.qkv_a_proj": _fused(get("self_attn.q_a_proj.weight"), get("self_attn.kv_a_proj_with_mqa.weight")),
        "attention.q_a_norm": get("self_attn.q_a_layernorm.weight").data,
        "attention.kv_a_norm": get("self_attn.kv_a_layernorm.weight").data,
        "attention.q_b_proj": get("self_attn.q_b_proj.weight").data,
        "attention.w_kc": w_kc,
        "attention.w_vc": w_vc.transpose(1, 2),
        "attention.o_proj": get("self_attn.o_proj.weight").data,
    }
    if config.has_indexer(layer):
        for name, source in (("wq_b", "wq_b.weight"), ("wk", "wk.weight"), ("k_norm", "k_norm.weight")):
            ours[f"attention.indexer.{name}"] = get(f"self_attn.indexer.{source}").data
        ours["attention.indexer.k_norm_bias"] = get("self_attn.indexer.k_norm.bias").data
        ours["attention.indexer.weights_proj"] = get("self_attn.indexer.weights_proj.weight").data.to(dtype)
    if layer < config.first_k_dense:
        return ours | _mlp(theirs, f"{prefix}mlp.", "mlp.")
    ours["mlp.router"] = get("mlp.gate.weight").data.float()
    ours["mlp.correction_bias"] = get("mlp.gate.e_score_correction_bias").data.float()
    ours["mlp.gate_up_proj"] = get("mlp.experts.gate_up_proj").data
    ours["mlp.down_proj"] = get("mlp.experts.down_proj").data
    return ours | (_mlp(theirs, f"{prefix}mlp.shared_experts.", "mlp.shared.") if config.shared_width else {})


def _mlp(theirs: dict[str, torch.Tensor], prefix: str, ours: str) -> dict[str, torch.Tensor]:
    return {
        f"{ours}gate_up_proj": _fused(theirs[f"{prefix}gate_proj.weight"], theirs[f"{prefix}up_proj.weight"]),
        f"{ours}down_proj": theirs[f"{prefix}down_proj.weight"].data,
    }
