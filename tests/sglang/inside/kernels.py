"""The installed SGLang release on a CPU: plain PyTorch in place of the GPU kernels that it calls, and a cache."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.sglang import stand_ins

from .fake_graphs import BODIES

stand_ins.install()

HEADS, NOPE, LATENT, ROPE, INDEX_DIM, INDEX_HEADS, HIDDEN, Q_LORA, TOPK, PAGE = 2, 8, 16, 4, 8, 4, 24, 12, 8, 64
BUCKETS = (16, 32)
GRAPH_CONFIG = SimpleNamespace(prefill=SimpleNamespace(bs=list(BUCKETS), tc_compiler="eager"))


def srt(name: str) -> Any:
    """A module of ``sglang.srt``."""
    return importlib.import_module(f"sglang.srt.{name}")


def _head_gates(x: Any, weight: Any, heads: float, scale: float, q_scale: Any) -> Any:
    return F.linear(x, weight).float().unsqueeze(-1) * heads * q_scale * scale


PLAIN = {"logits_head_gate_pcg": _head_gates}  # ops whose own body asks for a GPU


def _register_for_any_device() -> None:
    """SGLang registers its ops for CUDA only."""
    library = srt("utils.common").sglang_lib
    register = library.impl

    def impl(name: str, fn: Any, key: str = "", **kwargs: Any) -> None:
        if key == "CUDA":
            fn = PLAIN.get(name, fn)
            BODIES[name], key = fn, "CompositeExplicitAutograd"
        register(name, fn, key, **kwargs)

    library.impl = impl


def _indexer() -> Any:
    """The indexer's module; some releases define its split op only where they see CUDA."""
    module = srt("layers.attention.dsa.dsa_indexer")
    if hasattr(module, "pcg_dsa_indexer_prefill_split"):
        return module
    utils = srt("utils")
    before, utils.is_cuda = utils.is_cuda, lambda: True
    try:
        return importlib.reload(module)
    finally:
        utils.is_cuda = before


_register_for_any_device()
INDEXER = _indexer()
MLA = srt("models.deepseek_common.attention_forward_methods.forward_mla")
ONE_RUNNER = find_spec("sglang.srt.model_executor.piecewise_cuda_graph_runner") is not None  # and no graph backends
_SEGMENTED = "model_executor.breakable_cuda_graph" if ONE_RUNNER else (
    "model_executor.runner_backend_utils.breakable_cuda_graph"
)  # fmt: skip
PHASE = srt("compilation.piecewise_context_manager" if ONE_RUNNER else "compilation.compile_phase")
BREAKABLE, SEGMENTED = srt(f"{_SEGMENTED}.context"), srt(f"{_SEGMENTED}.breakable_cuda_graph")


def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int, topk_length: Any = None, **sink: Any
) -> Any:
    """[T, H, 576] over the chosen slots of [slots, 1, 576]; -1 is no slot."""
    chosen = indices[:, 0].long()
    valid = chosen >= 0
    if topk_length is not None:
        assert topk_length.shape[0] == q.shape[0]
        valid &= torch.arange(chosen.shape[1])[None] < topk_length[:, None]
    rows = kv[chosen.clamp(min=0), 0]
    scores = torch.einsum("thd,tkd->thk", q, rows) * sm_scale
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    weights = scores.softmax(-1)  # NaN for a row that attends nothing
    return torch.einsum("thk,tkd->thd", weights, rows[..., :d_v]), None, None


def fast_topk_transform_fused(
    score: Any, lengths: Any, page_table_size_1: Any, cu_seqlens_q: Any, topk: int, row_starts: Any = None
) -> Any:
    """Slots of the ``topk`` best columns of each row, or of all of them."""
    rows = score.shape[0]
    out = torch.full((rows, topk), -1, dtype=torch.int32)
    for row in range(rows):
        request = int(torch.searchsorted(cu_seqlens_q[1:].long(), torch.tensor(row), right=True))
        start, length = (0 if row_starts is None else int(row_starts[row])), int(lengths[row])
        best = torch.arange(length)
        if length > topk:
            best = score[row, start : start + length].topk(topk).indices.sort().values
        out[row, : len(best)] = page_table_size_1[request, best].int()
    return out


def fp8_mqa_logits(q: Any, kv: Any, weights: Any, ks: Any, ke: Any, clean_logits: bool = False) -> Any:
    """relu(q k) weighted over heads; columns outside [ks, ke) are garbage."""
    keys = kv[0].float()
    return (torch.einsum("thd,sd->ths", q.float(), keys).relu() * weights[..., None]).sum(1)


class Pool:
    """Index keys and latent KV of every layer; slot 0 belongs to no request."""

    page_size = index_page_size = PAGE
    layer_transfer_counter = None
    dtype = torch.float32
    size = 512

    def __init__(self, layers: int) -> None:
        self.index = torch.zeros(layers, 512, INDEX_DIM)
        self.latent = torch.zeros(layers, 512, 1, LATENT + ROPE)

    def get_index_k_with_scale_buffer(self, layer_id: int) -> Any:
        return self.index[layer_id]

    def get_index_k_scale_buffer(self, layer_id: int, seq_lens: Any, tables: Any, total: int, longest: int) -> Any:
        slots = [
            (t[:, None] * PAGE + torch.arange(PAGE)).flatten()[: int(n)] for t, n in zip(tables, seq_lens, strict=True)
        ]
        return AsIs(self.index[layer_id][torch.cat(slots).long()]), AsIs(torch.ones(total, 1))

    def set_mla_kv_buffer(self, layer: Any, loc: Any, k_nope: Any, k_rope: Any) -> None:
        self.latent[layer.layer_id][loc] = torch.cat([k_nope, k_rope], -1)
        self.latent[layer.layer_id][0] = 0  # SGLang's kernel skips the reserved slot

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.latent[layer_id]


class AsIs(torch.Tensor):
    """Index keys are floats here: the view as fp8 is the tensor itself."""

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, value)

    def view(self, *args: Any) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def patch_kernels() -> None:
    """Plain PyTorch in place of the GPU kernels; what asks for CUDA is told yes."""
    indexer, backend = INDEXER, srt("layers.attention.dsa_backend")
    utils = srt("layers.attention.dsa.utils")
    indexer._is_cuda = True
    if hasattr(indexer, "pcg_dsa_indexer_prefill_split"):
        srt("layers.attention.dsa.dsa_prefill_cuda_graph")._is_cuda = True
    else:  # the indexer is not one op
        _ask_on_device(indexer.Indexer)
        indexer.rearrange = lambda x, pattern, d: x.view(x.shape[0], -1, d)
        indexer.rotate_activation = lambda x: x * 1.0
        srt("layers.attention.dsa.triton_kernel").act_quant = _quantise
        arguments = SimpleNamespace(get_attention_backends=lambda: ("dsa", "dsa"), device="cpu")
        srt("server_args").set_global_server_args_for_scheduler(arguments)
    utils.is_cuda = lambda: True
    utils.is_dsa_enable_prefill_cp = indexer.is_dsa_enable_prefill_cp = lambda: False
    kernel = sys.modules.setdefault("sgl_kernel", importlib.import_module("sgl_kernel"))
    kernel.fast_topk_transform_fused = fast_topk_transform_fused
    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        with suppress(ImportError):  # each release imports it from one of them
            importlib.import_module(name).flash_mla_sparse_fwd = flash_mla_sparse_fwd
    topk = srt("layers.attention.dsa.dsa_topk_backend").DSATopKBackend
    topk.should_use_topk_v2 = lambda self: False  # another kernel for batches of as many rows as requests
    indexer.deep_gemm = SimpleNamespace(fp8_mqa_logits=fp8_mqa_logits)
    indexer.resolve_fp8_mqa_logits_fn = lambda: fp8_mqa_logits
    indexer.mqa_logits_should_chunk = lambda **sizes: (False, 0)
    indexer.can_use_dsa_fused_store = lambda *a: True
    indexer.fused_k_indexer_norm_rope_store = _store_k
    indexer.fused_store_index_k_cache = _store_k
    indexer.fused_q_indexer_rope_first_quant = _prepare_q
    backend.concat_mla_absorb_q_general = lambda nope, rope: torch.cat([nope, rope], -1)
    backend.is_cuda = lambda: False
    if ONE_RUNNER:
        alone = SimpleNamespace(world_size=1, rank_in_group=0, pynccl_comm=None)
        for name in ("_TP", "_ATTN_TP", "_ATTN_CP", "_PP", "_MOE_EP", "_MOE_TP"):
            setattr(srt("distributed.parallel_state"), name, alone)
        return
    runtime = srt("runtime_context")
    if hasattr(runtime, "_build_config_bags"):  # releases that read arguments from published namespaces
        runtime._CONTEXT.set_server_args(srt("server_args").ServerArgs(model_path="none"))
        runtime._CONTEXT._config_bags["exec"].graph._set("cuda_graph_config", GRAPH_CONFIG)
    runtime.get_parallel()._overrides.update(
        attn_cp_size=1, attn_cp_rank=0, attn_dp_rank=0, tp_rank=0, tp_size=1, dcp_enabled=False, dcp_size=1,
        tp_group=SimpleNamespace(barrier=lambda: None), attn_tp_size=1, attn_tp_rank=0, pp_size=1, attn_dp_size=1,
        num_dp_ranks=1, moe_ep_size=1, moe_ep_rank=0, moe_tp_size=1, moe_dp_size=1, attn_dcp_size=1,
    )  # fmt: skip


class OnDevice(torch.Tensor):
    """The indexer asks which GPU its queries are on."""

    device = property(lambda self: torch.device("cpu", 0))  # type: ignore[assignment]


def _ask_on_device(cls: Any) -> None:
    original = cls._get_topk_ragged

    def asked(self: Any, dual: bool, batch: Any, layer_id: int, q: Any, *rest: Any) -> Any:
        return original(self, dual, batch, layer_id, q.as_subclass(OnDevice), *rest)

    cls._get_topk_ragged = asked


def _prepare_q(q: Any, weights: Any, scale: float, cache: Any, positions: Any) -> Any:
    return (q * 1.0).as_subclass(OnDevice), (weights * scale).unsqueeze(-1)


def _quantise(x: Any, block: int, scale_format: Any) -> Any:
    return x * 1.0, x.new_ones(*x.shape[:-1], 1)


def _store_k(key: Any, cache: Any, loc: Any, *rest: Any) -> None:
    cache[loc] = key
