"""SGLang 0.5.13's prefill runner on a CPU, around the host's layers.

Real: ``ModelRunner.init_piecewise_cuda_graphs``, ``PiecewiseCudaGraphRunner`` with its buffers, batches, compile path,
capture and replay, and what ``host`` says. Replaced: weights, projections, the head.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import harness, host, layers, server_parts
from .fake_graphs import TorchOf
from .kernels import BUCKETS, HIDDEN, srt

RUNNER = srt("model_executor.piecewise_cuda_graph_runner")
MODEL_RUNNER = srt("model_executor.model_runner")


class Runner(host.Runner):
    """A server's model runner, with SGLang's own prefill runner or ours. given: fields of its batches."""

    def __init__(self, body: Any, device_module: Any) -> None:
        self.given: dict[str, Any] = {}
        for layer in body.layers:
            layer.self_attn = SimpleNamespace(attn_mqa=layer.attn, indexer=layer.indexer)
        super().__init__(body, layers.WithHead(body), "tc_piecewise", device_module)
        vars(self.model_runner).update(
            device="cpu", gpu_id=0, is_multimodal=False, is_generation=True, is_draft_worker=False, dtype=torch.float32,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table, size=4),
        )  # fmt: skip
        vars(self.model_runner.model_config).update(hidden_size=HIDDEN, num_hidden_layers=len(body.layers))
        self.model_runner.spec_algorithm = srt("speculative.spec_info").SpeculativeAlgorithm.NONE
        vars(self.model_runner.server_args).update(
            tp_size=1, dp_size=1, pp_size=1, piecewise_cuda_graph_tokens=list(BUCKETS), enable_lora=False,
            piecewise_cuda_graph_compiler="eager", enable_return_hidden_states=False, disable_radix_cache=False,
            enable_mamba_extra_buffer=lambda: False, enable_cudagraph_gc=True, disable_piecewise_cuda_graph=False,
            enable_breakable_cuda_graph=False, moe_dense_tp_size=None, enable_dp_attention=False,
        )  # fmt: skip

    def build(self, release: str, ours: bool, **how: Any) -> Any:
        """SGLang's start of a server's prefill graphs, with its own arguments; gives the runner that it made."""
        server_parts.new_process()
        own = MODEL_RUNNER.ModelRunner.init_piecewise_cuda_graphs
        stood_in = server_parts.on_a_cpu(
            RUNNER, MODEL_RUNNER, set_graph_pool_id=lambda pool: None, get_tensor_model_parallel_rank=lambda: 0,
            get_attention_tp_size=lambda: 1, get_attention_tp_rank=lambda: 0,
            require_gathered_buffer=lambda arguments: False, get_moe_a2a_backend=harness.NoA2A,
        )  # fmt: skip
        with stood_in, mock.patch.object(RUNNER, "torch", TorchOf(self.device_module)), torch.no_grad():
            if ours:
                from sparse_pcg.integrations.sglang.hooks import construct_with

                construct_with(release)(own, self.model_runner, **how)
            else:
                own(self.model_runner, **how)
        return self.model_runner.piecewise_cuda_graph_runner

    def replay(self, graphs: Any, new: list[int], prefix: list[int], seed: int) -> torch.Tensor:
        """As SGLang's model runner: the valid rows of the body's output."""
        tokens = sum(new)
        batch = host.forward_batch(self.load(new, prefix, tokens, seed), **self.given)
        assert graphs.can_run(batch)
        forward = srt("model_executor.forward_context")
        with torch.no_grad(), forward.forward_context(forward.ForwardContext(attn_backend=self.attn_backend)):
            found: torch.Tensor = graphs.replay(batch).next_token_logits.clone()
        self.whole = self.model_runner.model.whole
        return found
