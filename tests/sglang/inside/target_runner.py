"""SGLang's own prefill runner of releases with graph backends, for a target model, around the host's layers.

Real: ``PrefillCudaGraphRunner`` with its buffers, batches, capture and replay, and what ``host`` says. Replaced:
weights, projections, the head.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sparse_pcg.integrations.sglang import hooks

from . import harness, host, layers
from .fake_graphs import TorchOf
from .kernels import GRAPH_CONFIG, HIDDEN, TOPK, srt

RUNNER = srt("model_executor.runner.prefill_cuda_graph_runner")


class Outer(layers.Outer):
    """The model around the body: every row of the body's output as its logits."""

    shared_experts_config = None

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, **kwargs: Any) -> Any:
        rows = self.model(input_ids, positions, forward_batch)
        return srt("layers.logits_processor").LogitsProcessorOutput(next_token_logits=rows, hidden_states=None)


class Target:
    """A server's target with SGLang's own runner, and our backend in it or SGLang's."""

    def __init__(self, body: Any, flag: str, ours: bool) -> None:
        body = copy.deepcopy(body)
        self.loader = host.Runner(body, Outer(body), flag, harness.device_module)
        vars(GRAPH_CONFIG.prefill).update(backend=flag, max_context_size=None, max_seq_len=None)
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], index_topk=TOPK, model_type="none"),
            is_multimodal=False, hidden_size=HIDDEN, spec_hidden_size=HIDDEN, vocab_size=64, context_len=512,
            num_hidden_layers=len(body.layers), num_nextn_predict_layers=0, is_mla_breakable_cuda_graph_supported=True,
        )  # fmt: skip
        nothing = dict.fromkeys(
            ("get_pp_proxy_topk_size", "get_pp_proxy_residual_num_blocks", "get_pp_proxy_dspark_hidden_size"),
            lambda: None,
        )
        self.backend = self.loader.attn_backend
        self.backend.use_captured_forward_metadata_for_breakable_cuda_graph = False
        attention = [layer.attn for layer in body.layers]
        indexers = [layer.indexer for layer in body.layers]
        self.runner = SimpleNamespace(
            model=self.loader.model_runner.model, model_config=config, is_draft_worker=False, is_generation=True,
            dtype=torch.float32, device="cpu", gpu_id=0, server_args=_arguments(), attn_backend=self.backend,
            token_to_kv_pool=self.loader.pool, is_multimodal=False, is_hybrid_swa=False,
            req_to_token_pool=SimpleNamespace(req_to_token=self.loader.table, size=4), graph_shared_output=None,
            spec_algorithm=srt("speculative.spec_info").SpeculativeAlgorithm.NONE, lora_manager=None,
            tp_group=SimpleNamespace(barrier=lambda: None), _kernel_warmed_up=True, tp_size=1, dp_size=1, pp_size=1,
            pp_group=SimpleNamespace(is_last_rank=True, is_first_rank=True),
            attention_layers=attention, moe_layers=[], moe_fusions=[], dsa_indexers=indexers,
            mha_companion_layers=[None] * len(indexers),
            layer_info=SimpleNamespace(start_layer=0, end_layer=len(body.layers)),
            ngram_embedding_manager=SimpleNamespace(enabled=False), prepare_dummy_forward_batch=lambda batch: batch,
            kv_index_translator=SimpleNamespace(bind_runner_slots=lambda batch: None),
            attn_tp_sequence_sharded=lambda tokens: False, _pp_kwargs=lambda given: {}, **nothing,
        )  # fmt: skip
        srt("model_executor.input_buffers")._forward_input_buffer_pool.clear()  # as in a new process
        with _on_a_cpu(ours), torch.no_grad():
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


def _arguments() -> Any:
    given = {"cuda_graph_config": GRAPH_CONFIG}
    try:
        arguments = copy.copy(srt("runtime_context").get_server_args())
    except Exception:  # releases that hand their arguments on
        return SimpleNamespace(
            **given, enable_torch_compile_debug_mode=False, enable_return_hidden_states=False, tp_size=1,
            disable_radix_cache=False, enable_mamba_extra_buffer=lambda: False, dp_size=1, pp_size=1, enable_lora=False,
            enable_cudagraph_gc=True, enable_dp_attention=False, debug_cuda_graph=False, enable_memory_saver=False,
        )  # fmt: skip
    resolved = [*(getattr(arguments, "_resolved_overrides", None) or ()), ("test", given)]
    vars(arguments).update(_resolved_overrides=resolved, **given)
    return arguments


@contextmanager
def _on_a_cpu(ours: bool) -> Any:
    """Inside the block what the runner asks CUDA for is stood in, and the backend is chosen as the plug-in does."""
    stream = SimpleNamespace(stream=harness.device_module.current_stream())
    own = RUNNER.resolve_prefill_backend
    replaced = {
        "graph_capture": lambda **given: nullcontext(stream),
        "get_or_create_global_graph_capture_stream": lambda *given: None,
        "freeze_gc": lambda enabled: nullcontext(),  # collects all of this process's garbage, which takes seconds
        "get_available_gpu_memory": lambda *given, **rest: 80.0,
        "get_tensor_model_parallel_rank": lambda: 0,
        "require_mlp_tp_gather": lambda *given: False,
        "require_attn_tp_gather": lambda *given: False,
    }
    if ours:
        replaced["resolve_prefill_backend"] = lambda runner: hooks.choose_backend(harness.RELEASE, own, runner)
    with ExitStack() as stack:
        known = {name: value for name, value in replaced.items() if hasattr(RUNNER, name)}
        stack.enter_context(mock.patch.multiple(RUNNER, **known))
        for name in ("base_runner", "base_cuda_graph_runner"):
            module = srt(f"model_executor.runner.{name}")
            if hasattr(module, "torch"):
                stack.enter_context(mock.patch.object(module, "torch", TorchOf(harness.device_module)))
        yield
