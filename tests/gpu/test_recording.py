"""``record`` on real CUDA graphs, where a piece launches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import sparse_pcg
from tests.sparse_pcg.test_recording import CASES
from tests.sparse_pcg.toys import context, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


@pytest.mark.parametrize("case", CASES)
def test_replays_equal_the_function_on_new_values(case: str) -> None:
    """The cases of the CPU's test: a cut first, last, adjacent, allocations and views alone between cuts."""
    fn, make, pieces, cuts = CASES[case]
    static, theirs = to_cuda(make, 0), to_cuda(make, 0)
    with torch.no_grad():
        plan = sparse_pcg.record(fn, *static)
        assert same(plan.outputs, pytree.tree_leaves(fn(*theirs))) and same(static, theirs)
        assert (plan.captures, plan.cuts) == (pieces, cuts)
        for seed in range(1, 4):
            for ours, other, value in zip(static, theirs, to_cuda(make, seed), strict=True):
                ours.copy_(value)
                other.copy_(value)
            noise = [torch.full((n,), float("nan"), device="cuda") for n in range(100, 2000, 97)]
            with context(kv_len=seed + 1):
                plan.replay()
                want = pytree.tree_leaves(fn(*theirs))
            assert same(plan.outputs, want) and same(static, theirs)
            del noise


def to_cuda(make: Callable[[int], tuple[torch.Tensor, ...]], seed: int) -> tuple[torch.Tensor, ...]:
    """The arguments on the GPU, strides kept."""
    moved: list[Any] = []
    for t in make(seed):
        device = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
        moved.append(device.copy_(t))
    return tuple(moved)
