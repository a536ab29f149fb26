"""Tiny models of ``transformers``' own classes, with weights that keep activations at their size."""

from __future__ import annotations

import torch

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
SIZES = ("small", "medium", "large")
TOPK = 32
VOCAB = 97

_COMMON = {"vocab_size": VOCAB, "index_topk": TOPK, "max_position_embeddings": 512, "first_k_dense_replace": 1}
_SIZES = {
    "small": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 32, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "index_n_heads": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
    "medium": {
        "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 16, "intermediate_size": 256,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    },
    "large": {
        "hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 8, "q_lora_rank": 96,
        "qk_nope_head_dim": 48, "v_head_dim": 64, "index_n_heads": 16, "intermediate_size": 320,
        "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2,
    },
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# What is special to a family: YaRN in DeepSeek-V3.2, shared indexers in GLM-5.2.
_SPECIAL = {
    ("deepseek_v32", "medium"): {"rope_parameters": _YARN},
    ("deepseek_v32", "large"): {"rope_parameters": {**_YARN, "mscale_all_dim": 0.7}},
    # an rms_norm_eps that shows where it is not used: in the norms of the latents
    ("glm_moe_dsa", "medium"): {"indexer_types": ["full", "shared", "full"], "rms_norm_eps": 1e-2},
    ("glm_moe_dsa", "large"): {"index_topk_freq": 2, "index_skip_topk_offset": 3},
}


def hf_config(family: str, size: str, **changes):
    """The ``transformers`` configuration."""
    import transformers

    kind = {"deepseek_v32": "DeepseekV32Config", "glm_moe_dsa": "GlmMoeDsaConfig"}[family]
    heads = {"num_key_value_heads": _SIZES[size]["num_attention_heads"]}
    given = {**_COMMON, **_SIZES[size], **heads, **_SPECIAL.get((family, size), {}), **changes}
    return getattr(transformers, kind)(**given)


@torch.no_grad()
def hf_model(family: str, size: str, dtype=torch.float32, seed=0, **changes):
    """A ``...ForCausalLM`` with random weights. Its router tells experts apart by the bias alone where the dtype is
    not float32: no rounding tips a choice.
    """
    import transformers

    kind = {"deepseek_v32": "DeepseekV32ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM"}[family]
    model = getattr(transformers, kind)(hf_config(family, size, **changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            if dtype == torch.float32:
                tensor.normal_(std=0.2, generator=generator)
            else:
                # powers: no two groups of experts add up to the same
                tensor.copy_(2.0 ** torch.randperm(len(tensor), generator=generator))
        elif name.endswith("bias"):
            tensor.normal_(std=0.1, generator=generator)
        elif tensor.dim() == 1:
            tensor.normal_(mean=1.0, std=0.1, generator=generator)
        else:
            fan_in = 1 if "embed_tokens" in name else tensor.shape[-1]
            # two residual branches a layer: their sum over the depth has about the size of one embedding
            branch = (2 * model.config.num_hidden_layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
            tensor.normal_(std=fan_in**-0.5 * branch, generator=generator)
    return model.to(dtype)


class HFSelections:
    """Collects the token positions that each indexer of a ``transformers`` model chose: layer -> [T, k]."""

    def __init__(self, model):
        self.by_layer = {}
        self.hooks = []
        for layer, decoder in enumerate(model.model.layers):
            if decoder.self_attn.indexer is not None:
                self.hooks.append(decoder.self_attn.indexer.register_forward_hook(self._keeper(layer)))

    def _keeper(self, layer):
        def keep(module, args, output):
            self.by_layer[layer] = output[0].clone()

        return keep

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def visible(self, layer):
        """bool [T, T]: which positions each row selected, of those it sees."""
        chosen = self.by_layer[layer].long()
        mask = torch.zeros(len(chosen), len(chosen), dtype=torch.bool).scatter(1, chosen, True)
        return mask.tril()
