"""The backend, the runner and ``record`` on real CUDA graphs."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch

import sparse_pcg
from sparse_pcg.demo import read_prompt, run_demo
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from tests.sparse_pcg.test_runner import batch_of
from tests.sparse_pcg.toys import Toy, context, inputs, same, state

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
SIZES = [4, 8, 16]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_toy_replays_right_in_any_order(compiler: str) -> None:
    module = Toy().cuda()
    reference = copy.deepcopy(module)
    fn = sparse_pcg.compile(module, capture_sizes=SIZES, compiler=compiler)
    for seed, (rows, kv_len) in enumerate(
        [(16, 1), (16, 2), (4, 1), (4, 3), (16, 1), (4, 2), (8, 1), (5, 1), (8, 4), (8, 1)]
    ):
        args = [t.cuda() for t in inputs(rows, seed=seed)]
        with context(kv_len=kv_len), torch.no_grad():
            want, got = reference(*args), fn(*args)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(state(module), state(reference), rtol=1e-3, atol=1e-3)
    with sparse_pcg.stats().expect(captures=0, replays=2, fallbacks={}):
        for rows in (16, 4):
            fn(*[t.cuda() for t in inputs(rows)])


def test_recorded_without_dynamo() -> None:
    module = Toy().cuda()
    reference = copy.deepcopy(module)
    x, slots = (t.cuda() for t in inputs(8))
    with torch.no_grad():
        plan = sparse_pcg.record(module, x, slots)
        assert plan.captures == 4 and plan.cuts == 3
        assert same(plan.outputs[0], reference(x, slots))
        for seed in range(3):
            new_x, new_slots = inputs(8, seed=seed)
            x.copy_(new_x)
            slots.copy_(new_slots)
            plan.replay()
            assert same(plan.outputs[0], reference(x, slots)) and same(state(module), state(reference))


def test_a_host_read_fails_the_capture_and_leaves_the_stream_usable() -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    x = torch.ones(4, device="cuda")
    with pytest.raises(sparse_pcg.CaptureError, match="host"):
        sparse_pcg.record(reads, x)
    plan = sparse_pcg.record(lambda x: x * 2, x)
    plan.replay()
    assert plan.outputs[0].sum().item() == 8


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_runner_verifies(compiler: str) -> None:
    config = replace(preset("tiny"), num_layers=4)
    model = DSAModel(config, dtype=torch.bfloat16, device="cuda")
    indexed = [i for i in range(config.num_layers) if config.has_indexer(i)]
    kv = PagedKV(config.num_layers, 64, index_layers=indexed, device="cuda")
    runner = sparse_pcg.PrefillRunner(model, kv, sparse_pcg.Options(capture_sizes=(16, 64, 256), compiler=compiler))
    runner.capture(progress=False)
    result = runner.verify()
    assert result.ok, str(result)
    held = torch.cuda.memory_allocated()
    with sparse_pcg.stats().expect(captures=0, unique_pieces=0, replays=60):
        for seed in range(60):
            with kv.request() as request:
                runner.forward(batch_of([(request, (200, 13, 60)[seed % 3])], seed))
    assert torch.cuda.memory_allocated() == held


def test_reset_gives_the_memory_back() -> None:
    def once() -> None:
        fn = sparse_pcg.compile(Toy(width=512).cuda(), capture_sizes=[64])
        for seed in range(3):
            fn(*[t.cuda() for t in inputs(64, width=512, pool=64, seed=seed)])
        assert sparse_pcg.stats().replays > 0

    def clean() -> int:
        sparse_pcg.reset()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    once()  # what is made once per stream and stays: workspaces of cuBLAS
    before = clean()
    once()
    assert torch.cuda.memory_reserved() > before
    assert clean() <= before


@pytest.mark.parametrize("repeats", [False, True])
def test_the_demo_holds(repeats: bool) -> None:
    """``repeats``: a text for which many rows of "fresh" are beyond the plain tolerance on an H200."""
    text = b"sparse attention on a graph, " * 40 if repeats else read_prompt(None)
    result = run_demo(text, "inductor", torch.device("cuda"), progress=False)
    for row in result.rows:
        print(row)
    assert result.ok
