"""SGLang's NextN draft on a CPU: its own model, runner, capture and eager forward, around the host's one layer.

Real: ``DeepseekV3ForCausalLMNextN.forward``, ``DeepseekModelNextN.forward``, ``capture_prefill_graph``,
``PrefillCudaGraphRunner`` with its buffers, batches and choice of a backend, and what ``host`` says. Replaced: weights,
norms and projections of the layer, its experts, the head.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sparse_pcg.integrations.sglang import hooks

from . import harness, host, kernels, layers, server_parts
from .kernels import HIDDEN, PAGE, TOPK, srt

NEXTN = srt("models.deepseek_nextn")
SETUP = srt("model_executor.model_runner_components.cuda_graph_setup")
RUNNER = srt("model_executor.runner.prefill_cuda_graph_runner")
BATCH = srt("model_executor.forward_batch_info")
EAGLE = srt("speculative.eagle_info")
VOCAB = 64
vars(kernels.GRAPH_CONFIG.prefill).update(backend=harness.BREAKABLE, max_context_size=None, max_seq_len=None)


class Norm(torch.nn.Module):
    """SGLang's norm: with a residual it adds, and gives both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(HIDDEN) + 0.5, requires_grad=False)
        self.variance_epsilon = 1e-5

    def forward(self, x: Any, residual: Any = None) -> Any:
        given = x if residual is None else x + residual
        out = given * torch.rsqrt((given * given).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight
        return out if residual is None else (out, given)


class Attention(layers.Layer):
    """The host's layer, which outside SGLang's graphs calls indexer and attention as SGLang's eager layers do."""

    def select(self, hidden: Any, q_lora: Any, positions: Any) -> Any:
        if kernels.BREAKABLE.is_in_breakable_cuda_graph():
            return super().select(hidden, q_lora, positions)
        return self.indexer.forward_cuda(hidden, q_lora, positions, self.batch, self.layer_id)

    def attend(self, q_nope: Any, q_pe: Any, k_nope: Any, k_pe: Any, out: Any, chosen: Any) -> None:
        if kernels.BREAKABLE.is_in_breakable_cuda_graph():
            return super().attend(q_nope, q_pe, k_nope, k_pe, out, chosen)
        q = torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)
        backend = srt("model_executor.forward_context").get_attn_backend()
        given = {"q_rope": q_pe, "k_rope": k_pe, "topk_indices": chosen}
        out.copy_(backend.forward_extend(q, k_nope, k_nope, self.attn, self.batch, True, **given).view_as(out))

    def forward(self, hidden: Any, positions: Any, batch: Any, before: Any) -> Any:
        self.batch = batch
        return super().forward(hidden, positions, batch, before)


class Decoder(torch.nn.Module):
    """SGLang's decoder layer as the NextN body calls it, over the host's attention and indexer."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.self_attn = layer_id, Attention(layer_id, True)

    def forward(self, positions: Any, hidden: Any, batch: Any, *rest: Any, prev_topk_indices: Any = None) -> Any:
        assert prev_topk_indices is None
        hidden, chosen = self.self_attn(hidden, positions, batch, None)
        return (hidden, None, chosen) if len(rest) == 2 else (hidden, chosen)


def make_model(layer_id: int = 0, seed: int = 0) -> Any:
    """``DeepseekV3ForCausalLMNextN`` with small weights."""
    torch.manual_seed(seed)
    body = NEXTN.DeepseekModelNextN.__new__(NEXTN.DeepseekModelNextN)
    torch.nn.Module.__init__(body)
    body.embed_tokens = torch.nn.Embedding(VOCAB, HIDDEN)
    body.enorm, body.hnorm, body.shared_head = Norm(), Norm(), torch.nn.Module()
    body.shared_head.norm = Norm()
    body.eh_proj = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    body.rot_weight = body.quant_config = body.alt_stream = body.cp_size = None
    body.dsa_enable_prefill_cp = body.mla_enable_prefill_cp = False
    body.decoder = Decoder(layer_id)
    model = NEXTN.DeepseekV3ForCausalLMNextN.__new__(NEXTN.DeepseekV3ForCausalLMNextN)
    torch.nn.Module.__init__(model)
    model.dsa_enable_prefill_cp = model.mla_enable_prefill_cp = False
    model.shared_experts_config = None
    model.quant_config, model.model, model.lm_head = None, body, torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    model.logits_processor = _head
    return model.requires_grad_(False)


def _head(input_ids: Any, hidden: Any, lm_head: Any, batch: Any) -> Any:
    """Logits and hidden states of each request's last row."""
    last = torch.cumsum(batch.extend_seq_lens, 0) - 1
    return srt("layers.logits_processor").LogitsProcessorOutput(
        next_token_logits=lm_head(hidden[last]), hidden_states=hidden[last]
    )


class Draft:
    """A server's draft: model, pool, attention backend, and prefill graphs where SGLang builds some."""

    def __init__(self, model: Any, **arguments: Any) -> None:
        self.model = model
        layer_id = model.model.decoder.layer_id
        self.pool, self.table = kernels.Pool(layer_id + 1), torch.zeros(4, 128, dtype=torch.int32)
        layer_setup = srt("model_executor.model_runner_components.layer_setup")
        self.runner = server_parts.model_runner(
            host.make_backend(self.pool, self.table), self.pool, self.table,
            model=model, is_draft_worker=True, server_args=server_parts.arguments(**arguments),
            model_config=server_parts.model_config(
                "DeepseekV3ForCausalLMNextN", num_hidden_layers=9, num_nextn_predict_layers=1,
                is_mla_breakable_cuda_graph_supported=False,
            ),
            spec_algorithm=srt("speculative.spec_info").SpeculativeAlgorithm.EAGLE,
            layer_info=SimpleNamespace(start_layer=0, end_layer=1),
            get_cuda_graph_layers=layer_setup.compute_attention_and_moe_layers,
        )  # fmt: skip
        self.config = self.runner.model_config

    graphs: Any = None

    def capture(self) -> Any:
        """What SGLang's worker asks for once the draft has its head; gives the prefill runner, or None."""
        hooks.install(harness.RELEASE)
        server_parts.new_process()
        own = RUNNER.resolve_prefill_backend
        chosen = partial(hooks.choose_backend, harness.RELEASE, own)
        with server_parts.on_a_cpu(RUNNER, SETUP, resolve_prefill_backend=chosen):
            made = SETUP.capture_prefill_graph(model_runner=self.runner, eager_runner=None, force_for_draft_worker=True)
        self.graphs = made.runner
        return made.runner

    def batch(self, new: list[int], prefix: list[int], seed: int, **given: Any) -> Any:
        """SGLang's batch of a draft extend, with its spec info; the seed buffer has a row more than requests.

        new, prefix: tokens per request. given: fields of the batch that are otherwise.
        """
        g = torch.Generator().manual_seed(seed)
        tokens, requests = sum(new), len(new)
        seq = [n + p for n, p in zip(new, prefix, strict=True)]
        slots = [PAGE * (2 * request + 1) + torch.arange(128) for request in range(requests)]
        for request in range(requests):
            self.table[request] = slots[request].int()
        spans = list(zip(slots, prefix, seq, strict=True))
        new_lens = torch.tensor(new)
        ends = new_lens.cumsum(0)
        spec = EAGLE.EagleDraftExtendInput(
            hidden_states=torch.randn(tokens, HIDDEN, generator=g), num_tokens_per_req=1,
            dsa_seed_topk_capture=torch.full((requests + 1, TOPK), -7, dtype=torch.int32),
            dsa_seed_topk_select=ends - 1,
        )  # fmt: skip
        fields = {
            "forward_mode": BATCH.ForwardMode.EXTEND, "batch_size": requests, "spec_info": spec,
            "input_ids": torch.randint(1, VOCAB, (tokens,), generator=g), "req_pool_indices": torch.arange(requests),
            "seq_lens": torch.tensor(seq), "seq_lens_cpu": torch.tensor(seq), "seq_lens_sum": sum(seq),
            "orig_seq_lens": torch.tensor(seq), "out_cache_loc": torch.cat([s[p:n] for s, p, n in spans]),
            "positions": torch.cat([torch.arange(p, n) for _, p, n in spans]), "extend_num_tokens": tokens,
            "extend_start_loc": ends - new_lens, "extend_seq_lens": new_lens, "extend_seq_lens_cpu": list(new),
            "extend_prefix_lens": torch.tensor(prefix), "extend_prefix_lens_cpu": list(prefix),
            "extend_logprob_start_lens_cpu": list(new), "return_logprob": False, "num_token_non_padded_cpu": tokens,
            "global_num_token_non_padded_cpu": tokens, "capture_hidden_mode": BATCH.CaptureHiddenMode.LAST,
            "kv_loc_plan": SimpleNamespace(bind_replay=lambda *args, **kwargs: None),
        }  # fmt: skip
        known = {field.name for field in dataclasses.fields(BATCH.ForwardBatch)}
        return BATCH.ForwardBatch(**{k: v for k, v in fields.items() if k in known} | given)

    def extend(self, batch: Any) -> list[torch.Tensor]:
        """As SGLang's model runner: replayed where it can be, else eager. Logits, hidden states, seed, both caches."""
        self.replayed = self.graphs is not None and self.graphs.can_run_graph(batch)
        with torch.no_grad():
            output = self.graphs.execute(batch) if self.replayed else self._eager(batch)
        seed = batch.spec_info.dsa_seed_topk_capture
        caches = self.pool.latent[:, 1:].clone(), self.pool.index[:, 1:].clone()
        return [output.next_token_logits, output.hidden_states, seed, *caches]

    def _eager(self, batch: Any) -> Any:
        forward, backend = srt("model_executor.forward_context"), self.runner.attn_backend
        with forward.forward_context(forward.ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(batch)
            return self.model.forward(batch.input_ids, batch.positions, batch)
