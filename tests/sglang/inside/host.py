"""A sparse-attention model of a few layers on SGLang's own indexer, attention backend and graph backends, on a CPU.

Real: the split op, ``Indexer``, ``DeepseekSparseAttnBackend`` with its metadata, the graph backends and their capture.
Replaced by plain PyTorch: the GPU kernels that these call.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from .kernels import (
    BUCKETS,
    GRAPH_CONFIG,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    INDEXER,
    PAGE,
    Q_LORA,
    ROPE,
    TOPK,
    Pool,
    srt,
)


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


def forward_batch(loaded: Any, **fields: Any) -> Any:
    """SGLang's batch for a prefill runner of its own, from what ``Runner.load`` gives; ``fields`` are as given."""
    module = srt("model_executor.forward_batch_info")
    given = {
        **vars(loaded),
        **{name: getattr(loaded, name).clone() for name in ("input_ids", "positions", "out_cache_loc")},
        "capture_hidden_mode": module.CaptureHiddenMode.NULL,
        "orig_seq_lens": loaded.seq_lens,
        "return_logprob": False,
        "extend_start_loc": torch.cumsum(loaded.extend_seq_lens, 0) - loaded.extend_seq_lens,
        "extend_logprob_start_lens_cpu": list(loaded.extend_seq_lens_cpu),
        "kv_loc_plan": SimpleNamespace(bind_replay=lambda *args, **kwargs: None),
        **fields,
    }
    known = module.ForwardBatch.__dataclass_fields__
    return module.ForwardBatch(**{name: value for name, value in given.items() if name in known})


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
