"""What SGLang's own prefill runners ask of the server around them, on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import harness
from .kernels import GRAPH_CONFIG, HIDDEN, TOPK, srt


def model_config(architecture: str, **given: Any) -> Any:
    """SGLang's description of a model; ``given`` as it is for this one."""
    hf_config = SimpleNamespace(architectures=[architecture], index_topk=TOPK, model_type="none")
    return SimpleNamespace(
        hf_config=hf_config, is_multimodal=False, hidden_size=HIDDEN, spec_hidden_size=HIDDEN, vocab_size=64,
        context_len=512, **given,
    )  # fmt: skip


def model_runner(attn_backend: Any, pool: Any, table: Any, **given: Any) -> Any:
    """SGLang's model runner, as much as its prefill runner uses; ``given`` as it is for this model."""
    attn_backend.use_captured_forward_metadata_for_breakable_cuda_graph = False
    nothing = dict.fromkeys(
        ("get_pp_proxy_topk_size", "get_pp_proxy_residual_num_blocks", "get_pp_proxy_dspark_hidden_size"),
        lambda: None,
    )
    return SimpleNamespace(
        attn_backend=attn_backend, token_to_kv_pool=pool, graph_shared_output=None, lora_manager=None,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=4), tp_group=SimpleNamespace(barrier=lambda: None),
        is_generation=True, dtype=torch.float32, device="cpu", gpu_id=0, _kernel_warmed_up=True,
        pp_group=SimpleNamespace(is_last_rank=True, is_first_rank=True),
        ngram_embedding_manager=SimpleNamespace(enabled=False), prepare_dummy_forward_batch=lambda batch: batch,
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda batch: None),
        attn_tp_sequence_sharded=lambda tokens: False, **nothing, **given,
    )  # fmt: skip


def arguments(**given: Any) -> Any:
    """SGLang's server arguments, as published; ``given`` as it resolves them."""
    given = {"cuda_graph_config": GRAPH_CONFIG, **given}
    runtime = srt("runtime_context")
    if not hasattr(runtime, "_build_config_bags"):  # releases whose runner is handed the arguments
        return SimpleNamespace(
            enable_torch_compile_debug_mode=False, enable_return_hidden_states=False, tp_size=1, dp_size=1, pp_size=1,
            disable_radix_cache=False, enable_mamba_extra_buffer=lambda: False, enable_lora=False,
            enable_cudagraph_gc=True, enable_dp_attention=False, debug_cuda_graph=False, enable_memory_saver=False,
            **given,
        )  # fmt: skip
    published = copy.copy(runtime.get_server_args())
    resolved = [*(getattr(published, "_resolved_overrides", None) or ()), ("test", given)]
    vars(published).update(_resolved_overrides=resolved, **given)
    return published


def new_process() -> None:
    """The input buffers of runners are shared within a process: as in one that served nothing yet."""
    srt("model_executor.input_buffers")._forward_input_buffer_pool.clear()


@contextmanager
def on_a_cpu(*modules: Any, **names: Any) -> Iterator[None]:
    """Inside the block what runners ask CUDA for is stood in, in ``modules``, and what ``names`` names besides."""
    stream = SimpleNamespace(stream=harness.device_module.current_stream())
    replaced = {
        "graph_capture": lambda **given: nullcontext(stream),
        "get_or_create_global_graph_capture_stream": lambda *given: None,
        "freeze_gc": lambda enabled: nullcontext(),  # collects all of this process's garbage, which takes seconds
        "get_available_gpu_memory": lambda *given, **rest: 80.0,
        **names,
    }
    with ExitStack() as stack:
        for module in modules:
            known = {name: value for name, value in replaced.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **known))
        yield
