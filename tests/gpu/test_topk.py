"""The CUDA C++ top-k on a GPU, at the sizes it is built for."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

import custom_ops
from custom_ops import topk_cuda
from custom_ops._register import providers_of, use_provider
from custom_ops.topk import topk_indices_reference, topk_slots_reference
from tests.custom_ops.test_topk_cuda import KINDS, lengths_of, make

pytestmark = pytest.mark.gpu

WIDTHS = (4100, 8192, 9001, 33000, 140_003)


def on_gpu(args: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in args.items()}


def paged(args: dict) -> dict:
    rows, width = args["logits"].shape
    table = torch.randperm(3 * (width // 64 + 1), device="cuda").int().view(3, -1)
    requests = (torch.arange(rows, device="cuda") % 3).int()
    arguments = {name: args[name] for name in ("logits", "starts", "lengths")}
    return {**arguments, "request_of_row": requests, "page_table": table, "k": args["k"]}


def test_it_is_what_serves() -> None:
    args = tuple(on_gpu(make("normal", 64, 500, [500], 0, 0)).values())
    assert providers_of("topk_indices", *args)[0] == ("cuda", True, None)


@pytest.mark.parametrize("kind", KINDS)
def test_follows_the_contract(kind: str) -> None:
    for width in WIDTHS:
        for k in (1, 510, 2048):
            args = on_gpu(make(kind, k, width, lengths_of(k, width, 2 * k), width % 5, width + k))
            want = topk_indices_reference(**args)
            assert torch.equal(custom_ops.topk_indices(**args), want), (width, k)
            for blocks in (1, 2, 8):
                out = torch.empty_like(want)
                ranges = args["starts"], args["lengths"]
                topk_cuda.launch(out, args["logits"], *ranges, None, None, len(out), blocks=blocks)
                assert torch.equal(out, want), (width, k, blocks)
        slots = paged(args)
        assert torch.equal(custom_ops.topk_slots(**slots), topk_slots_reference(**slots)), width


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_of_every_length(kind: str) -> None:
    args = on_gpu(make(kind, 2048, 20_000, list(range(0, 20_001, 40)), 3, 7))
    want = topk_indices_reference(**args)
    for tuning in topk_cuda.TUNINGS:
        if tuning.split:
            continue
        out = torch.empty_like(want)
        ranges = args["starts"], args["lengths"]
        topk_cuda.launch(out, args["logits"], *ranges, None, None, len(out), tuning=tuning, blocks=1)
        assert torch.equal(out, want)


def test_launched_under_capture_and_replayed_on_new_data() -> None:
    args = on_gpu(make("normal", 512, 9000, [9000] * 8, 0, 1))
    select = functools.partial(custom_ops.topk_indices, **args)
    select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = select()
    for seed in range(3):
        args["logits"].normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        assert torch.equal(out, topk_indices_reference(**args))


def test_from_a_thread_that_has_not_used_the_device() -> None:
    args = on_gpu(make("normal", 512, 9000, [9000] * 8, 0, 1))
    found = []
    thread = threading.Thread(target=lambda: found.append(custom_ops.topk_indices(**args)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], topk_indices_reference(**args))


def test_a_result_that_lies_unaligned() -> None:
    args = on_gpu(make("normal", 512, 9000, [9000] * 8, 0, 1))
    out = torch.empty(8 * 512 + 1, dtype=torch.int32, device="cuda")[1:].view(8, 512)
    topk_cuda.launch(out, args["logits"], args["starts"], args["lengths"], None, None, 8)
    assert torch.equal(out, topk_indices_reference(**args))


def test_k_that_only_triton_serves() -> None:
    args = on_gpu(make("normal", 3000, 9000, [9000, 100], 0, 1))
    want = topk_indices_reference(**args)
    assert torch.equal(custom_ops.topk_indices(**args), want)
    with use_provider("topk_indices", "cuda"), pytest.raises(RuntimeError, match="k is at most 2048"):
        custom_ops.topk_indices(**args)
