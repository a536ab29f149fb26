"""The packages behind the vendor providers, on the GPU and where they are installed: each against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import custom_ops
from custom_ops._register import OPS, use_provider
from custom_ops.batch_metadata import ForwardContext, use_context
from tests.custom_ops import strategies as s
from tests.custom_ops import test_mqa_logits, test_sparse_mla
from tests.custom_ops.batches import batch

pytestmark = pytest.mark.gpu


def need(op: str, provider: str, *args: Any) -> None:
    why = OPS[op].refusal(provider, *args) if args else OPS[op].providers[provider].missing()
    if why is not None:
        pytest.skip(why)


def captured(run: Any) -> Any:
    """Run twice, then capture and replay: what a provider does in a captured piece."""
    run()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_deep_gemm_logits(rows: int, heads: int) -> None:
    args = test_mqa_logits.ragged(rows, heads, 530, 3)
    need("mqa_logits", "deep_gemm", *args.values())
    want = s.call("mqa_logits", "reference", args)
    for got in (s.call("mqa_logits", "deep_gemm", args), captured(lambda: s.call("mqa_logits", "deep_gemm", args))):
        inside = ~want.isinf()
        torch.testing.assert_close(got[inside], want[inside], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("workspace_bytes", [1 << 30, 4 * 512 * 100])
def test_deep_gemm_cut_selects_the_same(workspace_bytes: int) -> None:
    metadata = batch([100, 0, 300], [30, 20, 60], rows=128)
    args = {
        "layer_id": 0,
        "q_fp8": test_mqa_logits.exact((128, 32, 128), 1).to(torch.float8_e4m3fn),
        "weights": test_mqa_logits.exact((128, 32, 1), 2),
        "topk_result": torch.full((128, 64), 2**30, dtype=torch.int32, device=s.DEVICE),
    }
    need("indexer_topk", "deep_gemm")
    results = []
    for provider in ("reference", "deep_gemm"):
        context = ForwardContext(metadata, {0: test_mqa_logits.pool(40, 3)}, workspace_bytes=workspace_bytes)
        with use_context(context):
            s.call("indexer_topk", provider, args)
        results.append(args["topk_result"].clone())
        args["topk_result"].fill_(2**30)
    s.assert_bitwise(results[1], results[0])


@pytest.mark.parametrize(("heads", "k"), [(8, 256), (16, 2048), (64, 128), (128, 256)])
def test_flash_mla(heads: int, k: int) -> None:
    args = test_sparse_mla.arguments([40, 1, 17, 0, min(k, 190)], heads, k)
    args["topk"] = args["topk"].clamp(max=test_sparse_mla.SLOTS - 1)
    args["topk"][1] = -1
    need("sparse_mla", "flash_mla", *args.values())
    want = test_sparse_mla.run("reference", args)
    torch.testing.assert_close(test_sparse_mla.run("flash_mla", args), want, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(captured(lambda: test_sparse_mla.run("flash_mla", args)), want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 77])
def test_flashinfer_layernorm(rows: int) -> None:
    x, weight, bias = s.randn((rows, 128), torch.bfloat16, 1), s.randn((128,), seed=2), s.randn((128,), seed=3)
    need("layernorm", "flashinfer", x, weight, bias, 1e-6)
    with use_provider("layernorm", "flashinfer"):
        got = custom_ops.layernorm(x, weight, bias, 1e-6)
    torch.testing.assert_close(got, OPS["layernorm"].reference(x, weight, bias, 1e-6), rtol=2**-7, atol=2**-7)
