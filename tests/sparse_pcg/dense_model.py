"""The reference model once more in plain torch: float64, no caches, no absorbed weights."""

from __future__ import annotations

import math

import torch


def _norm(x, gain, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def _rotate(x, positions, config):
    """RoPE of x [T, ..., 64] by rotating neighbouring pairs as complex numbers."""
    angles = positions.double()[:, None] * config.rope_theta ** (-torch.arange(32, dtype=torch.float64) / 32)
    turn = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), 32)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (32, 2))) * turn).flatten(-2)


def _swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ down.T


def _mlp(x, weights, prefix, config):
    if f"{prefix}.router" not in weights:
        return _swiglu(x, weights[f"{prefix}.gate_up_proj"], weights[f"{prefix}.down_proj"])
    out = _swiglu(x, weights[f"{prefix}.shared.gate_up_proj"], weights[f"{prefix}.shared.down_proj"])
    for row in range(len(x)):
        scores = (weights[f"{prefix}.router"] @ x[row]).sigmoid()
        corrected = scores + weights[f"{prefix}.correction_bias"]
        best = sorted(range(config.n_routed_experts), key=lambda e: -corrected[e])[
            : config.num_experts_per_tok
        ]
        for expert in best:
            gate_up, down = weights[f"{prefix}.gate_up_proj"][expert], weights[f"{prefix}.down_proj"][expert]
            share = scores[expert] / scores[best].sum() * config.routed_scaling_factor
            out[row] += share * _swiglu(x[row], gate_up, down)
    return out


def _index_scores(x, q_lora, weights, prefix, positions, config):
    """Indexer logits [T, T] without quantisation."""
    q = (q_lora @ weights[f"{prefix}.wq_b"].T).unflatten(1, (config.index_n_heads, 128))
    q = torch.cat((_rotate(q[..., :64], positions, config), q[..., 64:]), -1)
    k = x @ weights[f"{prefix}.wk"].T
    k = (k - k.mean(-1, keepdim=True)) / (
        k.var(-1, keepdim=True, correction=0) + config.index_norm_eps
    ).sqrt()
    k = k * weights[f"{prefix}.k_norm"] + weights[f"{prefix}.k_norm_bias"]
    k = torch.cat((_rotate(k[:, :64], positions, config), k[:, 64:]), -1)
    gate = x @ weights[f"{prefix}.weights_proj"].T * config.index_n_heads**-0.5 * 128**-0.5
    return torch.einsum("thd,sd->hts", q, k).relu().mul(gate.T[:, :, None]).sum(0)


def reference(model, prompt, visible=None):
    """Hidden states [T, hidden] and, per layer with an indexer, its logits [T, T].

    visible: layer -> bool [T, T], which tokens a row attends; all before it and itself where it is not
    given.
    """
    config = model.config
    weights = {name: parameter.cpu().double() for name, parameter in model.named_parameters()}
    positions = torch.arange(len(prompt))
    causal = positions[:, None] >= positions[None, :]
    x, index_scores = weights["embed_tokens"][torch.tensor(prompt)], {}
    for layer in range(config.num_layers):
        attention = f"layers.{layer}.attention"
        eps = config.rms_norm_eps
        normed = _norm(x, weights[f"layers.{layer}.input_norm"], eps)
        q_lora, latent, k_rope = (normed @ weights[f"{attention}.qkv_a_proj"].T).split(
            (config.q_lora_rank, 512, 64), -1
        )
        q_lora = _norm(q_lora, weights[f"{attention}.q_a_norm"], config.lora_norm_eps)
        latent = _norm(latent, weights[f"{attention}.kv_a_norm"], config.lora_norm_eps)
        if config.has_indexer(layer):
            index_scores[layer] = _index_scores(
                normed, q_lora, weights, f"{attention}.indexer", positions, config
            )
        q = (q_lora @ weights[f"{attention}.q_b_proj"].T).unflatten(1, (config.num_heads, config.qk_head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, 64), -1)
        k_nope = torch.einsum("sl,hnl->shn", latent, weights[f"{attention}.w_kc"])
        values = torch.einsum("sl,hlv->shv", latent, weights[f"{attention}.w_vc"])
        scores = torch.einsum("thn,shn->hts", q_nope, k_nope) + torch.einsum(
            "thr,sr->hts", _rotate(q_rope, positions, config), _rotate(k_rope, positions, config)
        )
        mask = causal if visible is None else visible[layer]
        scores = (scores * config.qk_head_dim**-0.5).masked_fill(~mask, -math.inf)
        attended = torch.einsum("hts,shv->thv", scores.softmax(-1), values).flatten(1)
        x = x + attended @ weights[f"{attention}.o_proj"].T
        normed = _norm(x, weights[f"layers.{layer}.post_attention_norm"], eps)
        x = x + _mlp(normed, weights, f"layers.{layer}.mlp", config)
    return _norm(x, weights["norm"], config.rms_norm_eps), index_scores
