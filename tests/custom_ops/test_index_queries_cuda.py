"""The CUDA C++ kernel of the index queries: its code runs here as C++ on the CPU, every thread of a block a fiber."""

from __future__ import annotations

import ctypes
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from custom_ops import index_queries_cuda as queries
from custom_ops._nvrtc import CudaError, _nvrtc, build
from custom_ops.index_queries import index_q_prepare_reference
from tests.custom_ops import strategies as s
from tests.custom_ops.host_library import host_library, needs_compiler
from tests.custom_ops.test_index_prepare import GLM, V32, q_arguments

SPECIAL = torch.tensor([0.0, -0.0, 1e-30, -1e-38, 3e38, torch.inf, -torch.inf, torch.nan])


def on_host(args: dict, seed: int = 0, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel writes with so many blocks; heads behind the last must stay as they were."""
    q = args["q"]
    tokens, heads = q.shape[:2]
    rows, behind = tokens * heads, blocks * queries.THREADS // 4
    codes, scales = torch.full((rows + behind, 128), 77, dtype=torch.uint8), torch.full((rows + behind,), 77.0)
    # Behind the last position are some far outside the table: to read an angle there crashes.
    positions = torch.cat((args["positions"], torch.full((behind,), 1 << 40)))
    pointers = [t.data_ptr() for t in (q, positions, args["cos_sin_cache"], codes, scales)]
    packed = struct.pack("@" + queries.LAYOUT, *pointers, q.stride(0) // 8, q.stride(1) // 8, rows, heads)
    run = host_library("queries_host.cpp", *queries.MACROS).queries_on_host
    run.restype = ctypes.c_bool
    assert run(packed, blocks, seed)
    assert (codes[rows:] == 77).all() and (scales[rows:] == 77).all()
    return codes[:rows].view(torch.float8_e4m3fn).view(q.shape), scales[:rows].view(tokens, heads, 1)


def assert_same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    s.assert_e4m3(got[0], want[0])
    s.assert_bitwise(got[1].nan_to_num(-1.0, posinf=torch.inf), want[1].nan_to_num(-1.0, posinf=torch.inf))


def assert_right(args: dict, seed: int = 0, blocks: int = 1) -> None:
    assert_same(on_host(args, seed, blocks), index_q_prepare_reference(**args))


@needs_compiler
@settings(max_examples=25)
@given(
    tokens=st.integers(1, 9),
    heads=st.sampled_from((1, 3, 8)),
    layout=st.sampled_from(("contiguous", "sliced", "expanded")),
    power=st.integers(-40, 60),
    special=st.sampled_from((0.0, 0.0, 0.01, 0.5)),
    blocks=st.integers(1, 4),  # of 32 rows
    seed=s.seeds,
)
def test_equals_the_reference(
    tokens: int, heads: int, layout: str, power: int, special: float, blocks: int, seed: int
) -> None:
    args = q_arguments(tokens, heads, torch.bfloat16, seed, layout, V32)
    q, generator = args["q"].mul_(2.0**power) if layout != "expanded" else args["q"], s.generator(seed)
    if layout != "expanded" and special:
        chosen = torch.rand(q.shape, generator=generator) < special
        drawn = SPECIAL[torch.randint(len(SPECIAL), q.shape, generator=generator)].to(q.dtype)
        q.copy_(torch.where(chosen, drawn, q))
    assert_right(args, seed, blocks)


# Whole rounds of all blocks, then one row for the last block, or a few for the first; blocks that have none at all.
@needs_compiler
@pytest.mark.parametrize(("tokens", "heads", "blocks"), [(45, 5, 2), (101, 1, 3), (3, 8, 3), (1, 1, 2)])
def test_blocks_take_rows_until_none_are_left(tokens: int, heads: int, blocks: int) -> None:
    assert_right(q_arguments(tokens, heads, route=V32), blocks=blocks)


def test_no_more_blocks_than_run_at_once() -> None:
    assert queries.blocks(1, 132) == queries.blocks(32, 132) == 1 and queries.blocks(33, 132) == 2
    assert queries.blocks(132 * 8 * 32 - 1, 132) == queries.blocks(1 << 31, 132) == 132 * 8


# The scale comes from the bits of the largest element, not from a quotient: every mantissa, near 1e-4 every value.
@needs_compiler
def test_the_scale_of_every_largest_element() -> None:
    every = torch.arange(1 << 15).short().view(torch.bfloat16)
    size = every.float() * 128**-0.5  # of all elements, where one that does not turn is all there is
    chosen = every[((size > 5e-5) & (size < 2e-4)) | ((size > 1) & (size < 8)) | (size > 2e37) | (size < 1e-39)][::3]
    args = q_arguments(len(chosen), 1, route=V32)
    args["q"].zero_()
    args["q"][:, 0, 100] = chosen
    assert len(chosen) > 200
    assert_right(args)


def test_refusals_say_why() -> None:
    args = q_arguments(8, 8, route=V32)
    why = lambda change: str(queries.refuses(**args | change))  # noqa: E731
    for change in (GLM, {"interleaved": True}, {"round_scale": False}, {"q": args["q"].half()}):
        assert "bfloat16, pairs of halves, the transform and rounded scales" in why(change)
    odd = torch.zeros(8, 8, 132, dtype=torch.bfloat16, device=s.DEVICE)
    for q in (odd[..., 1:129], odd[..., 4:], odd[..., :128], args["q"].transpose(1, 2).contiguous().transpose(1, 2)):
        assert "multiples of 16 bytes" in why({"q": q})
    if s.DEVICE == "cpu":
        assert "not on a CUDA device" in why({})
    if not torch.cuda.is_available():
        assert "no CUDA device" in str(queries.missing())


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_compiles(capability: tuple[int, int]) -> None:
    try:
        _nvrtc()
    except CudaError as error:
        pytest.skip(f"no NVRTC: {error}")
    assert build("index_queries.cu", capability, queries.MACROS)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "heads", "layout"),
    [(1, 64, "contiguous"), (77, 64, "sliced"), (513, 5, "sliced"), (1201, 57, "sliced")],  # the last in three rounds
)
def test_on_the_gpu(tokens: int, heads: int, layout: str) -> None:
    args = q_arguments(tokens, heads, torch.bfloat16, 1, layout, V32)
    args["q"][0, 0, :8] = SPECIAL.to(args["q"])
    want = index_q_prepare_reference(**args)
    for provider in ("cuda", "triton"):
        assert_same(s.call("index_q_prepare", provider, args), want)
