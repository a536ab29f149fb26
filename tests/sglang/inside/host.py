"""A sparse-attention model of a few layers on SGLang's own indexer, attention backend and graph backends, on a CPU.

Real: the split op, ``Indexer``, ``DeepseekSparseAttnBackend`` with its metadata, the graph backends and their capture.
Replaced by plain PyTorch: the GPU kernels that these call.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, nullcontext, suppress
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
        arguments = SimpleNamespace(get_attention_backends=lambda: ("dsa", "dsa"))
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


class Linear(torch.nn.Module):
    """SGLang's linears return a pair."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(o, i) / i**0.5, requires_grad=False)

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight), None


def _rotate(positions: Any, q: Any, k: Any) -> Any:
    turn = torch.cos(positions.float() * 0.1)
    return q * turn[:, None, None], k * turn[:, None]


def make_indexer(layer_id: int) -> Any:
    """SGLang's ``Indexer`` with small weights."""
    cls = srt("layers.attention.dsa.dsa_indexer").Indexer
    own = cls.__new__(cls)
    torch.nn.Module.__init__(own)
    own.is_torch_compile = False
    own.hidden_size, own.n_heads, own.head_dim, own.rope_head_dim = HIDDEN, INDEX_HEADS, INDEX_DIM, ROPE
    own.index_topk, own.layer_id, own.use_dsa_indexer_fusion = TOPK, layer_id, True
    own.use_aiter_fused_fp8_writer = own.use_gfx950_fused_indexer = False
    own.alt_stream, own.dsa_enable_prefill_cp, own.logits_with_pp_recv = None, False, False
    own.softmax_scale, own.num_init_tokens, own.num_local_tokens, own.block_size = 1.0, 0, 0, 128
    own.wq_b, own.wk_weights_proj = Linear(Q_LORA, INDEX_HEADS * INDEX_DIM), Linear(HIDDEN, INDEX_DIM + INDEX_HEADS)
    own.k_norm = SimpleNamespace(weight=None, bias=None, variance_epsilon=0.0)
    own.rotary_emb = SimpleNamespace(cos_sin_cache=None)
    if not hasattr(INDEXER, "pcg_dsa_indexer_prefill_split"):
        own.wk, own.weights_proj, own.k_norm = Linear(HIDDEN, INDEX_DIM), Linear(HIDDEN, INDEX_HEADS), torch.tanh
        own.rotary_emb, own.scale_fmt = _rotate, None
    own._with_real_sm_count = nullcontext
    own._pad_heads_for_deep_gemm = lambda q, w: (q, w, q.shape[1])
    own._should_chunk_mqa_logits = lambda q, k, d: (False, 0)
    return own


def make_backend(pool: Pool, table: Any) -> Any:
    """SGLang's sparse attention backend, without a GPU's workspaces."""
    cls = srt("layers.attention.dsa_backend").DeepseekSparseAttnBackend
    own = cls.__new__(cls)
    own.device, own.real_page_size, own.dsa_index_topk = torch.device("cpu"), PAGE, TOPK
    own.req_to_token_pool = SimpleNamespace(req_to_token=table)
    own.req_to_token, own.token_to_kv_pool = table, pool
    own.dsa_prefill_impl = own.dsa_decode_impl = "flashmla_sparse"
    own.dsa_kv_cache_store_fp8 = own.enable_auto_select_prefill_impl = own.use_mha = False
    own.hisparse_coordinator = None
    if hasattr(srt("layers.attention.dsa.utils"), "should_use_dsa_fused_topk"):
        own.use_fused_topk = True
    own.dsa_topk_backend = srt("layers.attention.dsa.dsa_topk_backend").DSATopKBackend.SGL_KERNEL
    own._arange_buf = torch.arange(1024, dtype=torch.int32)
    own.device_sm_major, own.speculative_num_draft_tokens, own.topk = 9, 0, 0
    own._build_topk_v2_plan = lambda lens: None
    own._pad_heads = own._kv_shard_pool = None
    own._is_in_breakable_cuda_graph = own._is_in_tc_piecewise_cuda_graph = lambda: True  # prefill runs in graphs here
    own._get_device_sm, own._is_blackwell = (lambda: 90), (lambda: False)
    own.dsa_index_kpool, own.physical_page_size, own.dcp_size, own.dcp_rank = 1, PAGE, 1, 0
    own._sink_pad_cache, own.supports_mha_one_shot, own.num_q_heads = {}, False, HEADS
    return own


@contextmanager
def _published(batch: Any) -> Any:
    """The batch and the prefill scope, where a release keeps them apart from its forward context."""
    try:
        publish, scope = (
            srt("model_executor.runner_utils.forward_batch"),
            srt("model_executor.runner_utils.prefill_graph"),
        )
    except ImportError:
        yield
        return
    if not hasattr(batch, "_attn_output"):
        batch._attn_output = None
    with publish.set_forward_batch(batch), scope.prefill_graph_scope(full_graph=False):
        yield


class Runner:
    """As much of SGLang's prefill runner as the graph backends use."""

    def __init__(self, body: Any, outer: Any, flag: str, device_module: Any) -> None:
        self.body, self.prefill_backend_name, self.device_module = body, flag, device_module
        self.layer_model = body
        layers = len(body.layers)
        self.pool = Pool(layers)
        self.table = torch.zeros(4, 128, dtype=torch.int32)
        self.attn_backend = make_backend(self.pool, self.table)
        self.capture_num_tokens, self.max_num_tokens = list(BUCKETS), max(BUCKETS)
        self.model_runner = SimpleNamespace(
            server_args=SimpleNamespace(
                debug_cuda_graph=False, enable_memory_saver=False, enable_torch_compile_debug_mode=False,
                cuda_graph_config=GRAPH_CONFIG,
            ),
            tp_group=SimpleNamespace(barrier=lambda: None), attn_backend=self.attn_backend,
            token_to_kv_pool=self.pool, req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            model_config=SimpleNamespace(hf_config=SimpleNamespace()), model=outer,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )  # fmt: skip
        n = max(BUCKETS)
        self.static = {k: torch.zeros(n, dtype=torch.int64) for k in ("input_ids", "positions", "out_cache_loc")}

    def _run_dummy_forward(self, num_tokens: int) -> None:
        batch = self.batch([num_tokens], [0], num_tokens)
        self.attn_backend.init_forward_metadata(batch)
        self.forward(batch)

    def run_dummy_multimodal_deepstack_forward(self, model: Any, num_tokens: int) -> bool:
        return False

    def _prepare_forward_metadata_for_replay(self, forward_batch: Any, static_forward_batch: Any, size: Any) -> None:
        self.attn_backend.init_forward_metadata(forward_batch)

    def cuda_graph_output_rows(self, output: Any) -> None:
        return None

    def cuda_graph_output_capacity_rows(self, output: Any) -> None:
        return None

    def batch(self, new: list[int], prefix: list[int], bucket: int) -> Any:
        """SGLang's batch: bucket-long token tensors, the requests' own lengths."""
        tokens = sum(new)
        seq = [n + p for n, p in zip(new, prefix, strict=True)]
        return SimpleNamespace(
            forward_mode=srt("model_executor.forward_batch_info").ForwardMode.EXTEND, batch_size=len(new),
            input_ids=self.static["input_ids"][:bucket], positions=self.static["positions"][:bucket],
            out_cache_loc=self.static["out_cache_loc"][:bucket], req_pool_indices=torch.arange(len(new)),
            seq_lens=torch.tensor(seq), seq_lens_cpu=torch.tensor(seq), seq_lens_sum=sum(seq),
            extend_seq_lens=torch.tensor(new), extend_prefix_lens=torch.tensor(prefix), extend_num_tokens=tokens,
            extend_seq_lens_cpu=list(new), extend_prefix_lens_cpu=list(prefix), num_token_non_padded_cpu=tokens,
            global_num_token_non_padded_cpu=tokens, global_num_tokens_cpu=None, attn_cp_metadata=None, spec_info=None,
            mha_return_lse=False, input_embeds=None,
        )  # fmt: skip

    def load(self, new: list[int], prefix: list[int], bucket: int, seed: int) -> Any:
        """A batch with its tokens in the static buffers and slots of its own."""
        for buffer in self.static.values():
            buffer.zero_()
        g = torch.Generator().manual_seed(seed)
        row = 0
        for request, (n, p) in enumerate(zip(new, prefix, strict=True)):
            slots = PAGE * (2 * request + 1) + torch.arange(128)
            self.table[request] = slots.int()
            part = slice(row, row + n)
            self.static["input_ids"][part] = torch.randint(1, 64, (n,), generator=g)
            self.static["positions"][part] = torch.arange(p, p + n)
            self.static["out_cache_loc"][part] = slots[p : p + n]
            row += n
        return self.batch(new, prefix, bucket)

    @contextmanager
    def context(self, batch: Any, num_tokens: int | None = None) -> Any:
        """SGLang's contexts around a prefill."""
        forward, tc = srt("model_executor.forward_context"), srt("model_executor.runner_backend_utils")
        tc = srt("model_executor.runner_backend_utils.tc_piecewise_cuda_graph")
        with (
            _published(batch),
            forward.forward_context(forward.ForwardContext(attn_backend=self.attn_backend)),
            tc.set_tc_piecewise_forward_context(
                batch, [layer.attn for layer in self.body.layers], None, None, None,
                dsa_indexers=[layer.indexer for layer in self.body.layers],
                num_tokens=num_tokens, raw_num_tokens=batch.extend_num_tokens,
            ),
        ):  # fmt: skip
            yield

    def forward(self, batch: Any) -> Any:
        """SGLang's ``_run_forward``: the body on a capture batch."""
        with torch.no_grad(), self.context(batch):
            if self.prefill_backend_name == "breakable":
                return self.body.forward(batch.input_ids, batch.positions, batch, None)
            return self.model_runner.model.forward(batch.input_ids, batch.positions, batch)

    def capture(self, backend: Any) -> None:
        """SGLang's capture loop."""
        shape_key = srt("model_executor.runner.shape_key").ShapeKey
        with backend.capture_session(self.device_module.current_stream()):
            for size in sorted(BUCKETS, reverse=True):
                batch = self.batch([size], [0], size)
                self.attn_backend.init_forward_metadata(batch)
                backend.capture_one(shape_key(size=size), lambda batch=batch: self.forward(batch))

    def replay(self, backend: Any, new: list[int], prefix: list[int], seed: int) -> torch.Tensor:
        """SGLang's ``execute`` without the head: the valid rows of the body's output."""
        shape_key = srt("model_executor.runner.shape_key").ShapeKey
        tokens = sum(new)
        bucket = next(b for b in BUCKETS if b >= tokens)
        with torch.no_grad(), backend.replay_session():
            batch = self.load(new, prefix, bucket, seed)
            self._prepare_forward_metadata_for_replay(batch, batch, bucket)
            with (
                self.context(batch, bucket),
                self._replaced(lambda *args: backend.replay(shape_key(size=bucket), batch)),
            ):
                if self.prefill_backend_name == "breakable":
                    self.whole = self.body.forward(batch.input_ids, batch.positions, batch, None)
                else:
                    self.whole = backend.replay(shape_key(size=bucket), batch)
                return self.whole[:tokens].clone()

    @contextmanager
    def _replaced(self, replay: Any) -> Any:
        """As SGLang's ``_execute_body_capture``: the body's forward is the replay while the model around it runs."""
        before = self.body.forward
        if self.prefill_backend_name == "breakable":
            self.body.forward = replay
        try:
            yield
        finally:
            self.body.forward = before
