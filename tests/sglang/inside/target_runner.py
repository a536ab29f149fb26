"""SGLang's own prefill runner of releases with graph backends, for a target model, around the host's layers.

Real: ``PrefillCudaGraphRunner`` with its buffers, batches, capture and replay, and what ``host`` says. Replaced:
weights, projections, the head.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sparse_pcg.integrations.sglang import hooks

from . import harness, host, layers, server_parts
from .fake_graphs import TorchOf
from .kernels import GRAPH_CONFIG, srt

RUNNER = srt("model_executor.runner.prefill_cuda_graph_runner")
BASES = [srt(f"model_executor.runner.{name}") for name in ("base_runner", "base_cuda_graph_runner")]


class Target:
    """A server's target with SGLang's own runner, and our backend in it or SGLang's."""

    def __init__(self, body: Any, flag: str, ours: bool) -> None:
        body = copy.deepcopy(body)
        self.loader = host.Runner(body, layers.WithHead(body), flag, harness.device_module)
        vars(GRAPH_CONFIG.prefill).update(backend=flag, max_context_size=None, max_seq_len=None)
        count = len(body.layers)
        self.runner = server_parts.model_runner(
            self.loader.attn_backend, self.loader.pool, self.loader.table,
            model=self.loader.model_runner.model, is_draft_worker=False, server_args=server_parts.arguments(),
            model_config=server_parts.model_config(
                "DeepseekV3ForCausalLM", num_hidden_layers=count, num_nextn_predict_layers=0,
                is_mla_breakable_cuda_graph_supported=True,
            ),
            spec_algorithm=srt("speculative.spec_info").SpeculativeAlgorithm.NONE,
            is_multimodal=False, is_hybrid_swa=False, tp_size=1, dp_size=1, pp_size=1,
            attention_layers=[layer.attn for layer in body.layers], moe_layers=[], moe_fusions=[],
            dsa_indexers=[layer.indexer for layer in body.layers], mha_companion_layers=[None] * count,
            layer_info=SimpleNamespace(start_layer=0, end_layer=count), _pp_kwargs=lambda given: {},
        )  # fmt: skip
        server_parts.new_process()
        names: dict[str, Any] = {"get_tensor_model_parallel_rank": lambda: 0}
        names.update(dict.fromkeys(("require_mlp_tp_gather", "require_attn_tp_gather"), lambda *given: False))
        if ours:
            own = RUNNER.resolve_prefill_backend
            names["resolve_prefill_backend"] = lambda runner: hooks.choose_backend(harness.RELEASE, own, runner)
        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(server_parts.on_a_cpu(RUNNER, **names))
            for module in BASES:
                if hasattr(module, "torch"):
                    stack.enter_context(mock.patch.object(module, "torch", TorchOf(harness.device_module)))
            self.graphs = RUNNER.PrefillCudaGraphRunner(self.runner)

    def prefill(self, new: list[int], prefix: list[int], seed: int) -> torch.Tensor:
        """As SGLang's model runner: the valid rows of the body's output."""
        batch = host.forward_batch(self.loader.load(new, prefix, sum(new), seed))
        assert self.graphs.can_run_graph(batch)
        with torch.no_grad():
            found: torch.Tensor = self.graphs.execute(batch).next_token_logits.clone()
        return found

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent KV and index keys of every slot but 0, which belongs to no request."""
        return self.loader.pool.latent[:, 1:], self.loader.pool.index[:, 1:]
