"""Launches by address on a real GPU: what they give, where they run, and what is left to PyTorch."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import sparse_pcg
from custom_ops._driver import CudaError, check, driver
from sparse_pcg.graph_launch import GraphLaunch
from sparse_pcg.op_body import past_dispatcher
from sparse_pcg.plan import Plan
from tests.sparse_pcg.test_op_body import ADD

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def model(x: torch.Tensor) -> torch.Tensor:
    y = (x @ x).relu()
    torch.ops.op_body.add(y, x)
    return y * 2 + x


def by_address(plan: Plan) -> list[bool]:
    return [bool(s.address) for s in plan.steps if isinstance(s, GraphLaunch)]


def through_torch(plan: Plan) -> None:
    """Each step called on its own goes through ``CUDAGraph.replay``."""
    for step in plan.steps:
        step()


@pytest.mark.parametrize("where", ["default stream", "side stream", "thread", "thread and side stream"])
def test_it_equals_a_replay_by_torch(where: str) -> None:
    x = torch.randn(256, 256, device="cuda")
    plan = sparse_pcg.record(model, x)
    assert by_address(plan) == [True, True]

    def serve() -> None:
        stream = torch.cuda.Stream() if "side" in where else torch.cuda.current_stream()
        for seed in range(3):
            with torch.cuda.stream(stream):
                x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
                through_torch(plan)
                want = plan.outputs[0].clone()
                plan.outputs[0].fill_(float("nan"))
                # A launch on any other stream would not wait for this, and be overwritten.
                torch.cuda._sleep(20_000_000)
                plan.outputs[0].fill_(float("nan"))
                plan.replay()
                assert torch.equal(plan.outputs[0], want)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            serve()
        except BaseException as error:
            failures.append(error)

    if "thread" in where:
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
    else:
        guarded()
    assert not failures, failures


def test_a_thread_whose_first_use_of_cuda_is_a_replay() -> None:
    x = torch.randn(256, 256, device="cuda")
    plan = sparse_pcg.record(model, x)
    through_torch(plan)
    want = plan.outputs[0].clone()
    plan.outputs[0].zero_()
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def only_replays() -> None:
        try:
            plan.replay()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=only_replays)
    thread.start()
    thread.join()
    assert not failures, failures
    torch.cuda.synchronize()
    assert torch.equal(plan.outputs[0], want)


def test_random_numbers_go_on() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        y = torch.rand_like(x)
        torch.ops.op_body.add(y, x)
        return y * 2

    plan = sparse_pcg.record(draws, torch.zeros(1 << 12, device="cuda"))
    assert by_address(plan) == [False, True]

    def drawn() -> torch.Tensor:
        plan.replay()
        return plan.outputs[0].clone()

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(drawn(), first) and torch.equal(drawn(), second)


def test_a_generator_of_ones_own_is_refused_or_goes_on() -> None:
    generator = torch.Generator("cuda").manual_seed(5)

    def draws(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, device="cuda", generator=generator) + x

    try:
        plan = sparse_pcg.record(draws, torch.zeros(1 << 12, device="cuda"))
    except (sparse_pcg.CaptureError, RuntimeError) as error:
        print("refused:", error)
        return
    assert by_address(plan) == [False]


def test_after_a_reset_nothing_is_launched() -> None:
    plan = sparse_pcg.record(model, torch.randn(64, 64, device="cuda"))
    plan.replay()
    sparse_pcg.reset()
    with pytest.raises(sparse_pcg.CaptureError, match="dropped"):
        plan.replay()
    torch.cuda.synchronize()


def test_inside_a_capture_it_is_refused_as_by_torch() -> None:
    x = torch.randn(64, 64, device="cuda")
    plan = sparse_pcg.record(model, x)
    plan.replay()
    want = plan.outputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):
        plan.replay()
    plan.outputs[0].zero_()
    plan.replay()
    assert torch.equal(plan.outputs[0], want)


def test_the_driver_says_what_it_refuses() -> None:
    torch.cuda.synchronize()
    with pytest.raises(CudaError, match="CUDA error 1: invalid argument"):
        check(driver().cuGraphLaunch(None, None))


def test_a_kernel_that_broke_the_context_is_an_error_of_the_next_launch() -> None:
    code = """
import torch, sparse_pcg
x, i = torch.zeros(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
plan = sparse_pcg.record(lambda x, i: x[i] + 1, x, i)
plan.replay()
i.fill_(1 << 40)
plan.replay()
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    plan.replay()
except RuntimeError as error:
    print(type(error).__name__, error, getattr(error, "__notes__", "while replaying piece 0"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    print(done.stdout, done.stderr[-2000:])
    assert "CUDA error" in done.stdout and "while replaying piece 0" in done.stdout


def test_other_threads_run_while_a_launch_waits() -> None:
    """More launches than the queue of the GPU takes: the host waits inside the driver."""
    x = torch.zeros(4, device="cuda")
    plan = sparse_pcg.record(lambda x: x + 1, x)
    plan.replay()
    torch.cuda.synchronize()
    gaps: list[float] = []
    over = False

    def ticks() -> None:
        last = time.perf_counter()
        while not over:
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=ticks)
    thread.start()
    torch.cuda._sleep(1_500_000_000)
    start = time.perf_counter()
    for _ in range(4000):
        plan.replay()
    waited = time.perf_counter() - start
    over = True
    thread.join()
    torch.cuda.synchronize()
    print("waited", waited, "longest gap", max(gaps))
    assert waited > 0.4, "nothing waited: the test says nothing"
    assert max(gaps) < waited / 2


def test_pytorchs_profiler_sees_the_launches() -> None:
    plan = sparse_pcg.record(model, torch.randn(64, 64, device="cuda"))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        plan.replay()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert names.count("cudaGraphLaunch") == 2, sorted(set(names))


def test_an_op_written_in_python_is_called_past_the_dispatcher() -> None:
    x, y = torch.ones(8, device="cuda"), torch.full((8,), 2.0, device="cuda")
    body: Any = past_dispatcher(ADD, (x, y), {"scale": 3.0})
    assert body is not ADD
    body(x, y, scale=3.0)
    assert x.tolist() == [7.0] * 8
