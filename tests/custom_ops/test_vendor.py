"""The adapters to other packages, against stand-ins that check what the packages demand and compute with the
references. What the packages themselves compute is compared on a GPU, where they are installed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from custom_ops import _register, index_cache, sparse_mla_cuda, trtllm_mla, vendor
from custom_ops._register import OPS, use_provider
from custom_ops.batch_metadata import ForwardContext, use_context
from custom_ops.topk import topk_indices_reference
from tests.custom_ops import strategies as s
from tests.custom_ops import test_mqa_logits, test_sparse_mla, test_topk
from tests.custom_ops.batches import batch, index_pool

PROVIDERS = [(op.name, p) for op in OPS.values() for p in op.providers if p not in ("reference", "triton")]


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Rows padded as DeepGEMM's; NaN outside the range; with max_seqlen_k a row begins at its own start."""
    assert q.shape[1] in (32, 64) and weights.shape == q.shape[:2] and weights.is_contiguous()
    assert ks.dtype == ke.dtype == torch.int32 and not clean_logits
    full = test_mqa_logits.formula(q, kv[0], kv[1], weights).float()
    width = max_seqlen_k or full.shape[1]
    out = torch.full((len(q), -(-(width + 256) // 256) * 256), torch.nan, device=q.device)
    for row, (start, end) in enumerate(zip(ks.tolist(), ke.tolist(), strict=True)):
        at = 0 if max_seqlen_k else start
        out[row, at : at + end - start] = full[row, start:end]
    return out[:, :width]


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
) -> tuple[torch.Tensor, None, None]:
    assert use_legacy and q.shape[1] in (64, 128) and indices.shape[2] % 128 == 0 and topk_length is not None
    assert kv.shape[1:] == (1, 576) and indices.shape[:2] == (len(q), 1) and indices.dtype == torch.int32
    assert q.stride(2) == 1 and q.stride(0) * 2 % 16 == 0 and indices.is_contiguous() and d_v == 512
    assert int(indices[:, 0, 0].min()) >= 0  # the reference would read slot 0 for it, FlashMLA does not
    q = q.contiguous()
    out = q.new_empty(*q.shape[:2], d_v)
    OPS["sparse_mla"].reference(q, kv[:, 0], indices[:, 0], topk_length, out, sm_scale, "bf16")
    return out, None, None


def top_k_ragged_transform(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool,
    tie_break: int,
    row_starts: torch.Tensor,
) -> torch.Tensor:
    assert deterministic and tie_break == 1 and not offsets.any()
    return topk_indices_reference(logits, row_starts, lengths, k)


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    assert q_rope.shape[1:] == (1, 64) and q_nope.shape[1:] == (1, 512) and quantize_dtype == torch.float8_e4m3fn
    turned = OPS["apply_rope"].reference(k_rope.float(), pos_ids, cos_sin_cache, 64, not is_neox)
    key = turned.to(quantize_dtype), k_nope.to(quantize_dtype)
    return key[0].unsqueeze(1), key[0], key[1].unsqueeze(1), key[1]


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int,
    out: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    backend: str,
    multi_ctas_kv_counter_buffer: torch.Tensor,
) -> None:
    rows, one, heads, width = query.shape
    assert (one, width) == (1, 576) == (1, kv_lora_rank + qk_rope_head_dim) and query.dtype == kv_cache.dtype
    assert kv_cache.shape[1:] == (1, 64, 576) and backend == "trtllm-gen" and bmm2_scale == 1.0
    assert block_tables.shape == (rows, 1, sparse_mla_top_k) and block_tables.dtype == torch.int32
    assert sparse_mla_top_k % 4 == 0 and max_seq_len == sparse_mla_top_k and int(seq_lens.min()) >= 1
    assert not workspace_buffer.any() and not multi_ctas_kv_counter_buffer.any()
    assert out.shape == (rows, 1, heads, 512) and multi_ctas_kv_counter_buffer.numel() >= rows * heads
    cache = kv_cache.view(-1, 576).to(torch.bfloat16)
    OPS["sparse_mla"].reference(
        query[:, 0].to(torch.bfloat16), cache, block_tables[:, 0], seq_lens, out[:, 0], bmm1_scale, "bf16"
    )


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {
        "deep_gemm": SimpleNamespace(fp8_mqa_logits=fp8_mqa_logits),
        "flash_mla": SimpleNamespace(flash_mla_sparse_fwd=flash_mla_sparse_fwd),
        "flashinfer": SimpleNamespace(top_k_ragged_transform=top_k_ragged_transform),
        "flashinfer.rope": SimpleNamespace(mla_rope_quantize_fp8=mla_rope_quantize_fp8),
        "flashinfer.mla": SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla),
    }
    monkeypatch.setattr(vendor, "_module", found.__getitem__)
    monkeypatch.setattr(vendor, "_arch", lambda: 9)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_deep_gemm_logits(packages: None, rows: int) -> None:
    args = test_mqa_logits.ragged(rows, 32, 130, 3)
    got, want = (s.call("mqa_logits", provider, args) for provider in ("deep_gemm", "reference"))
    s.assert_fake_is_exact("mqa_logits", tuple(args.values()), got)
    s.assert_bitwise(torch.where(want.isinf(), 0, got), torch.where(want.isinf(), 0, want))


@pytest.mark.parametrize("workspace_bytes", [1 << 30, 4 * 128 * 264 * 3])
def test_deep_gemm_cut(packages: None, workspace_bytes: int) -> None:
    metadata = batch([100, 0, 30], [3, 2, 6], rows=16)
    args = {
        "layer_id": 0,
        "q_fp8": test_mqa_logits.exact((16, 32, 128), 1).to(torch.float8_e4m3fn),
        "weights": test_mqa_logits.exact((16, 32, 1), 2),
        "topk_result": torch.full((16, 16), 2**30, dtype=torch.int32, device=s.DEVICE),
    }
    results = []
    for provider in ("reference", "deep_gemm"):
        context = ForwardContext(metadata, {0: test_mqa_logits.pool(40, 3)}, workspace_bytes=workspace_bytes)
        with use_context(context):
            s.call("indexer_topk", provider, args)
        results.append(args["topk_result"].clone())
        args["topk_result"].fill_(2**30)
    s.assert_bitwise(results[1], results[0])


def test_deep_gemm_refuses(packages: None) -> None:
    metadata = batch([100], [3], rows=4)
    q = torch.zeros(4, 32, 128, device=s.DEVICE).to(torch.float8_e4m3fn)
    result = torch.zeros(4, 16, dtype=torch.int32, device=s.DEVICE)
    with use_context(ForwardContext(metadata, {0: index_pool()}, workspace_bytes=1000)):
        why = OPS["indexer_topk"].refusal("deep_gemm", 0, q, q[:, :, 0].float(), result)
    assert why == "the gathered K takes up to 16896 bytes, the workspace is 1000"
    assert vendor.deep_gemm_supports(q[:, :16]) == "DeepGEMM takes (32, 64) heads here, not 16"


@pytest.mark.parametrize(("rows", "requests", "chosen"), [(384, 3, True), (383, 1, False), (400, 4, False)])
def test_deep_gemm_is_left_where_gathering_costs_more(
    packages: None, monkeypatch: pytest.MonkeyPatch, rows: int, requests: int, chosen: bool
) -> None:
    metadata = batch([1] * requests, [rows // requests] * requests, rows=512)
    q = torch.zeros(512, 32, 128, device=s.DEVICE).to(torch.float8_e4m3fn)
    args = (0, q, q[:, :, 0].float(), torch.zeros(512, 16, dtype=torch.int32, device=s.DEVICE))
    monkeypatch.setattr(_register, "_on_cuda", lambda args: True)
    with use_context(ForwardContext(metadata, {0: index_pool()}, workspace_bytes=1 << 30)):
        assert (OPS["indexer_topk"].choose(*args) == "deep_gemm") == chosen
        usable = {name: (usable, why) for name, usable, why in _register.providers_of("indexer_topk", *args)}
    assert usable["deep_gemm"][0] and ("do not repay" in str(usable["deep_gemm"][1])) != chosen


def test_gather_for_rows(packages: None) -> None:
    """A request's keys at its distance, whatever the table holds behind its pages."""
    metadata, cache = batch([100, 0, 30], [3, 2, 6], rows=16), test_mqa_logits.pool(40, 3)
    table, lens, owners = metadata.page_table.clone(), metadata.kv_lens[:11], metadata.request_of_row[:11]
    for request, length in enumerate((103, 2, 36)):
        table[request, -(-length // 64) :] = 2**31 - 1 if request else -5
    k, k_scale, starts, ends = index_cache.gather_for_rows(cache, table, 3, metadata.max_kv_len, lens, owners)
    assert k.shape == (3 * 128, 128) and starts.tolist() == [128 * r for r in owners.tolist()]
    assert (ends - starts).tolist() == lens.tolist()
    for request, length in enumerate((103, 2, 36)):
        one = torch.tensor([length], dtype=torch.int32, device=s.DEVICE)
        want, want_scale = index_cache.index_k_gather_reference(cache, metadata.page_table[request:][:1], one, length)
        at = slice(request * 128, request * 128 + length)
        s.assert_bitwise(k[at].view(torch.uint8), want.view(torch.uint8))
        s.assert_bitwise(k_scale[at], want_scale)


@pytest.mark.parametrize(("heads", "k"), [(4, 40), (64, 128), (65, 130), (128, 256)])
def test_flash_mla(packages: None, heads: int, k: int) -> None:
    args = test_sparse_mla.arguments([40, 1, 17, 0, min(k, 190)], heads, k)
    args["topk"] = args["topk"].clamp(max=test_sparse_mla.SLOTS - 1)
    args["topk"][1] = -1
    got, want = (test_sparse_mla.run(provider, args) for provider in ("flash_mla", "reference"))
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("rows", "heads", "cuda", "chosen"),
    [
        (32, 8, False, "triton"), (33, 8, False, "flash_mla"), (32, 17, False, "flash_mla"),
        (32, 17, True, "flash_mla"), (32, 8, True, "cuda"), (33, 8, True, "cuda"), (300, 8, True, "cuda"),
        (66, 16, True, "cuda"), (67, 16, True, "flash_mla"),
    ],
)  # fmt: skip
def test_who_serves_few_rows_is_a_matter_of_all_rows(
    packages: None, monkeypatch: pytest.MonkeyPatch, rows: int, heads: int, cuda: bool, chosen: str
) -> None:
    """A break runs on the valid rows what the graph recorded for the bucket's. Of the CUDA C++ kernel: on 132 SMs."""
    op, ran = OPS["sparse_mla"], []
    for name, provider in op.providers.items():
        run = partial(lambda name, q, *rest: ran.append((name, q.shape[0])), name)
        if name == "cuda":
            refuses = lambda q, *rest: None if cuda and q.shape[1] <= 16 else "not here"  # noqa: E731
            provider = replace(provider, missing=lambda: None, supports=refuses)
        monkeypatch.setitem(op.providers, name, replace(provider, run=run))
    monkeypatch.setattr(sparse_mla_cuda, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(_register, "_on_cuda", lambda args: True)
    args = tuple(test_sparse_mla.arguments([1] * rows, heads, 4).values())
    context = ForwardContext(batch([1], [5], rows=rows))
    with use_context(context):
        op.body(*args)
        op.cut_body(*args)
    assert ran == [(chosen, rows), (chosen, 5)]
    monkeypatch.setattr(vendor, "_arch", lambda: 10)
    assert op.providers["flash_mla"].slower(*args) is None


def test_flash_mla_refuses(packages: None) -> None:
    refusal = OPS["sparse_mla"].refusal
    assert refusal("flash_mla", *test_sparse_mla.arguments([1]).values()) is None
    assert "bfloat16" in str(refusal("flash_mla", *test_sparse_mla.arguments([1], layout="fp8").values()))
    half = test_sparse_mla.arguments([1], dtype=torch.float16)
    assert "bfloat16" in str(refusal("flash_mla", *half.values()))


def test_flashinfer(packages: None) -> None:
    args = test_topk.make(16, 97, "normal", 3, 1)
    got, want = (s.call("topk_indices", provider, args) for provider in ("flashinfer", "reference"))
    s.assert_bitwise(got, want)
    paged = test_topk.paged_arguments()
    got, want = (s.call("topk_slots", provider, paged) for provider in ("flashinfer", "reference"))
    s.assert_bitwise(got, want)


@pytest.mark.parametrize(("layout", "tolerance"), [("bf16", 2**-7), ("fp8", 2**-3)])
def test_trtllm(packages: None, monkeypatch: pytest.MonkeyPatch, layout: str, tolerance: float) -> None:
    """On sm_100; a width that is no multiple of 4, a pad row and a row of length 0 among the rows."""
    monkeypatch.setattr(vendor, "_arch", lambda: 10)
    monkeypatch.setattr(trtllm_mla, "_WORKSPACE_BYTES", 1 << 10)
    trtllm_mla.buffers.cache_clear()
    args = test_sparse_mla.arguments([40, 1, 17, 0], 4, 42, layout=layout)
    args["cache"] = torch.cat((args["cache"].view(torch.uint8),) * 64)[: 64 * 8].view(args["cache"].dtype)
    args["topk"] = args["topk"].clamp(max=test_sparse_mla.SLOTS - 1)
    args["topk"][1] = -1
    got, want = (test_sparse_mla.run(provider, args) for provider in ("trtllm", "reference"))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert OPS["sparse_mla"].regime(148) == 74
    trtllm_mla.buffers.cache_clear()


def test_trtllm_refuses(packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    args = test_sparse_mla.arguments([1])
    assert "sm_100" in str(OPS["sparse_mla"].refusal("trtllm", *args.values()))
    monkeypatch.setattr(vendor, "_arch", lambda: 10)
    args["cache"] = args["cache"].new_zeros(65, 576)
    assert "whole pages" in str(OPS["sparse_mla"].refusal("trtllm", *args.values()))
    args["cache"] = args["cache"].new_zeros(64, 576)
    assert OPS["sparse_mla"].refusal("trtllm", *args.values()) is None
    packed = test_sparse_mla.arguments([1], layout="fp8_packed")
    assert "float8" in str(OPS["sparse_mla"].refusal("trtllm", *packed.values()))


@pytest.mark.parametrize("interleaved", [False, True])
def test_flashinfer_rope(packages: None, interleaved: bool) -> None:
    rows, slots = 5, torch.tensor([3, 0, 9, 7, 1], device=s.DEVICE)
    args = {
        "k_nope": s.randn((rows, 512), torch.bfloat16, 1), "k_rope": s.randn((rows, 64), torch.bfloat16, 2),
        "positions": torch.arange(rows, device=s.DEVICE) * 3, "cos_sin_cache": s.randn((40, 64), seed=3).clamp(-1, 1),
        "interleaved": interleaved, "cache": torch.zeros(10, 576, device=s.DEVICE).to(torch.float8_e4m3fn),
        "slots": slots, "layout": "fp8",
    }  # fmt: skip
    found = []
    for provider in ("flashinfer", "reference"):
        args["cache"] = torch.zeros(10, 576, device=s.DEVICE).to(torch.float8_e4m3fn)
        s.call("mla_rope_kv_store", provider, args)
        found.append(args["cache"].float())
    torch.testing.assert_close(found[0], found[1], rtol=2**-3, atol=2**-8)
    assert OPS["mla_rope_kv_store"].choose(*args.values()) != "flashinfer"


@pytest.mark.parametrize(("name", "provider"), PROVIDERS)
def test_says_why_it_is_missing(name: str, provider: str) -> None:
    missing = OPS[name].providers[provider].missing()
    if not s.ON_GPU:
        assert missing is not None
        with (
            use_provider(name, provider),
            pytest.raises(RuntimeError, match=f"{name}: provider '{provider}'"),
        ):
            OPS[name].choose()
