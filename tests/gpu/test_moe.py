"""The routed experts on a GPU, at the widths of real models: captured, and against the definition."""

from __future__ import annotations

import pytest
import torch

import custom_ops
from custom_ops._register import providers_of
from custom_ops.moe_experts import launch, moe_experts_reference, tiles_for
from custom_ops.moe_few_rows import ROWS, launch_few
from sparse_pcg.models.moe import local_ids

pytestmark = pytest.mark.gpu
HIDDEN, TOP = 6144, 8


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def experts(count: int, inter: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = (normal(count, 2 * inter, HIDDEN) / HIDDEN**0.5).bfloat16()
    return gate_up, (normal(count, HIDDEN, inter) / inter**0.5).bfloat16()


def routed(rows: int, valid: int, of: int, count: int, first: int = 0) -> tuple[torch.Tensor, ...]:
    x = normal(rows, HIDDEN).bfloat16()
    x[valid:] = torch.nan
    weights, ids = normal(rows, of).sigmoid().topk(TOP)
    return x, weights, local_ids(ids, torch.arange(rows, device="cuda") < valid, first, count)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 0.01
    torch.testing.assert_close(got, want, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(("of", "first", "count", "inter"), [(8, 0, 8, 256), (16, 3, 4, 2048), (256, 250, 6, 2048)])
def test_agrees_with_the_reference(of: int, first: int, count: int, inter: int) -> None:
    """Every height of tile, rows that fill the last block of an expert and rows that do not."""
    gate_up, down = experts(count, inter)
    heights = set()
    for rows in (0, 1, 2, 31, 33, 127, 128, 600, 2500):
        x, weights, ids = routed(rows, max(0, rows - 3), of, count, first)
        args = (x, gate_up, down, weights, ids, of)
        heights.add(tiles_for(rows * TOP / of, inter).rows)
        assert providers_of("moe_experts", *args)[0] == ("triton", True, None)
        got = custom_ops.moe_experts(*args)
        assert torch.equal(got, custom_ops.moe_experts(*args)) and not got[(ids == count).all(1)].any()
        if rows > 3:
            assert_near(got, moe_experts_reference(*args))
    assert len(heights) == 3


def test_rows_depend_on_themselves_alone() -> None:
    gate_up, down = experts(4, 2048)
    x, weights, ids = routed(700, 690, 16, 4)
    for tiles in {tiles_for(n, 2048) for n in (1, 50, 300)}:
        whole = launch(x, gate_up, down, weights, ids, tiles)
        for end in (1, 33, 500):
            part = launch(x[:end], gate_up, down, weights[:end], ids[:end], tiles)
            assert torch.equal(part, whole[:end]), (tiles, end)
        other = x.clone()
        other[100:] = torch.nan
        assert torch.equal(launch(other, gate_up, down, weights, ids, tiles)[:100], whole[:100])


@pytest.mark.parametrize(("count", "of", "inter"), [(4, 16, 2048), (32, 32, 256), (4, 256, 256)])
def test_few_rows_have_the_bits_of_many(count: int, of: int, inter: int) -> None:
    gate_up, down = experts(count, inter)
    served = 0
    for rows in (1, 3, ROWS):
        x, weights, ids = routed(rows, rows - rows // 4, of, count)
        args = (x, gate_up, down, weights, ids)
        few = launch_few(*args)
        assert torch.equal(few, custom_ops.moe_experts(*args, of))
        assert torch.equal(few, launch(*args, tiles_for(1, inter)))
        served += int(few.any(1).sum())
    assert served


def test_captured_without_a_read_by_the_host_and_replayed_on_other_routes() -> None:
    gate_up, down = experts(32, 256)
    x, weights, ids = routed(96, 90, 32, 32)
    args = (x, gate_up, down, weights, ids, 32)
    custom_ops.moe_experts(*args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        custom_ops.moe_experts(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = custom_ops.moe_experts(*args)
    for valid, of in ((96, 32), (1, 32), (50, 8), (96, 8)):  # of 8: a quarter of the experts takes all rows
        for old, new in zip((x, weights, ids), routed(96, valid, of, 32), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(captured, custom_ops.moe_experts(*args)) and not captured[valid:].any()
        assert_near(captured, moe_experts_reference(*args))
