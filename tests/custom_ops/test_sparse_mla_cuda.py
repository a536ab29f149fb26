"""The CUDA C++ kernel of sparse MLA: its code runs here as C++ on the CPU, every thread of a block a fiber; copies are
made when they are waited for, never before."""

from __future__ import annotations

import ctypes
import shutil
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import custom_ops
from custom_ops import sparse_mla_cuda as mla
from custom_ops._nvrtc import CudaError, _nvrtc, build
from custom_ops._register import OPS, use_provider
from tests.custom_ops import strategies as s
from tests.custom_ops.host_library import host_library
from tests.custom_ops.test_sparse_mla import LAYOUTS, SLOTS, arguments, assert_near, cache_of, formula

ON_GPU = s.DEVICE == "cuda"
BLOCKS = (1, 2, 8)
BY_ROW = ("q", "topk", "select_lens", "out")

needs_kernel = pytest.mark.skipif(
    not ON_GPU and shutil.which("g++") is None, reason="needs g++, or a GPU"
)


def library(tuning: mla.Tuning) -> ctypes.CDLL:
    return host_library("sparse_mla_host.cpp", *tuning.macros)


def run(args: dict, blocks: int = 1, seed: int = 0) -> torch.Tensor:
    """What the kernel writes, where ``blocks`` blocks share a row; a row behind the last must stay as it was."""
    rows, heads = args["q"].shape[:2]
    out = torch.full((rows + 1, heads, 512), torch.nan, dtype=torch.bfloat16, device=s.DEVICE)
    if ON_GPU:
        mla.launch(*(args | {"out": out[:rows]}).values(), blocks=blocks)
    elif rows:
        tuning = mla.tuning_of(args["layout"], heads)
        fields = mla.arguments(*(args[name] for name in ("q", "cache", "topk", "select_lens")), out, args["sm_scale"])
        launch = library(tuning).sparse_mla_on_host
        launch.restype = ctypes.c_bool
        assert launch(struct.pack("@" + mla.ARGUMENTS, *fields), rows, blocks, seed), "behind the shared memory"
    assert out[rows].isnan().all()
    return out[:rows]


def selections(lens: list[int], heads: int, k: int, layout: str, seed: int) -> dict:
    """As ``arguments``, with slots that may come twice: there are fewer than k."""
    args = arguments([0] * len(lens), heads, k, layout, seed=seed)
    for row, length in enumerate(lens):
        args["topk"][row, :length] = s.integers(SLOTS, length, seed + row).int()
    args["select_lens"] = torch.tensor(lens, dtype=torch.int32, device=s.DEVICE)
    return args


# Lengths about tiles of 32 and parts: of 600, a part is 96 tokens; of 40, it is one tile.
@needs_kernel
@settings(max_examples=40)
@given(
    lens=st.lists(st.sampled_from((0, 1, 31, 32, 33, 95, 96, 97, 500, 600)), min_size=1, max_size=3),
    k=st.sampled_from((1, 40, 256, 600)),
    heads=st.sampled_from((1, 5, 8, 9, 16)),
    layout=st.sampled_from(LAYOUTS),
    blocks=st.sampled_from(BLOCKS),
    holes=st.booleans(),
    seed=s.seeds,
)
def test_is_the_formula(
    lens: list[int], k: int, heads: int, layout: str, blocks: int, holes: bool, seed: int
) -> None:
    lens = [min(length, k) for length in lens]
    args = selections(lens, heads, k, layout, seed)
    if holes:  # -1 in first place is slot 0, elsewhere nothing; a whole tile of them too
        args["topk"][:, 0] = -1
        args["topk"][:, 3::4] = -1
        args["topk"][:, 64:128] = -1
    assert_near(run(args, blocks, seed), formula(args, cache_of(layout, seed=seed)[1]))


@needs_kernel
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whoever_shares_a_row_the_bits_are_the_same(layout: str, heads: int) -> None:
    args = selections([600, 0, 96, 577, 1], heads, 600, layout, 3)
    args["topk"][0, 100:300] = -1
    whole = run(args)
    for blocks in BLOCKS:
        s.assert_bitwise(run(args, blocks, seed=blocks), whole)
    for part in (slice(0, 1), slice(2, 4)):
        some = args | {name: args[name][part].contiguous() for name in BY_ROW}
        s.assert_bitwise(run(some), whole[part])
    args["q"][3] = torch.nan
    got = run(args)
    assert got[3].isnan().all()
    got[3] = whole[3]
    s.assert_bitwise(got, whole)


@needs_kernel
@pytest.mark.parametrize("blocks", BLOCKS)
def test_parts_in_order_then_halves(blocks: int) -> None:
    """Equal weights, and of 2^30 and 1 in one sum the 1 is lost: what is left tells the order. Parts of 32 tokens."""
    args = selections([256], 8, 256, "bf16", 0)
    args["q"].zero_()
    args["cache"].zero_()
    args["topk"][0] = 5
    for part, slot in ((0, 1), (1, 2), (2, 3), (4, 4), (5, 6)):
        args["topk"][0, 32 * part] = slot
    large = 2.0**30
    args["cache"][1:5, :2] = torch.tensor([[large, large], [0, -large], [0, 1], [-large, 0]])
    args["cache"][6, 0] = 1  # of the first dim, beside what the second half takes from the first
    got = run(args, blocks)[0, :, :3].contiguous()
    s.assert_bitwise(got, torch.tensor([0, 1 / 256, 0]).to(got).repeat(8, 1))


@needs_kernel
@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_sum_that_a_merge_shrinks_to_nothing_has_no_sign(blocks: int) -> None:
    args = selections([256], 8, 256, "bf16", 0) | {"sm_scale": 1.0}
    for name in ("q", "cache"):
        args[name].zero_()
    args["q"][:, :, 512] = 1
    args["topk"][0], args["topk"][0, 128:] = 0, 1
    args["cache"][0, :512], args["cache"][1, 512] = -(2.0**-40), 86.5
    got = run(args, blocks)
    s.assert_bitwise(got, torch.zeros_like(got))


@needs_kernel
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_selected_does_not_matter(layout: str, blocks: int) -> None:
    args = selections([200, 0, 7], 8, 300, layout, 5)
    args["topk"][args["topk"] % 3 == 0] = -1
    args["topk"][:, 0] = 4
    clean = run(args, blocks)
    assert clean.isfinite().all()
    chosen = {int(i) for row, n in zip(args["topk"], [200, 0, 7], strict=True) for i in row[:n] if i >= 0}
    others = [i for i in range(SLOTS) if i not in chosen]
    args["cache"].view(torch.uint8)[others] = 0xFF  # NaN in every layout
    s.assert_bitwise(run(args, blocks), clean)


@needs_kernel
def test_what_is_selected_is_not_hidden() -> None:
    args = selections([40, 40], 8, 40, "bf16", 1)
    args["topk"][0] = args["topk"][0].clamp(min=1)
    args["topk"][1, 5] = 0
    args["cache"][0] = torch.nan
    got = run(args)
    assert not got[0].isnan().any()
    assert got[1].isnan().all()


@needs_kernel
def test_scores_do_not_overflow() -> None:
    args = selections([600, 300], 8, 600, "bf16", 2) | {"sm_scale": 1e4}
    args["topk"][0] = args["topk"][0].sort().values
    assert_near(run(args), formula(args, cache_of("bf16", seed=2)[1]))


def test_blocks_of_a_row() -> None:
    counts = [mla.blocks_of_a_row(rows, 8, 132) for rows in (1, 33, 34, 132, 133, 5000)]
    assert counts == [8, 8, 2, 2, 1, 1]
    assert [mla.blocks_of_a_row(rows, 16, 132) for rows in (16, 17, 66, 67)] == [8, 2, 2, 1]
    for layout in LAYOUTS:
        for heads in (1, 8, 9, 16):
            tuning = mla.tuning_of(layout, heads)
            assert tuning.blocks_per_sm * (tuning.shared + 1024) <= 228 << 10


@needs_kernel
@pytest.mark.skipif(ON_GPU, reason="of the code on the host")
def test_shared_memory_is_counted_right() -> None:
    for layout, heads in (("bf16", 8), ("fp8_packed", 8), ("fp8", 16)):
        tuning = mla.tuning_of(layout, heads)
        assert library(tuning).shared_bytes() == tuning.shared


def test_refusals_say_why() -> None:
    args = arguments([3, 4], heads=8)
    why = lambda change: str(mla.refuses(*(args | change).values()))  # noqa: E731
    for change in ({"q": args["q"].half()}, {"cache": args["cache"].half()}):
        assert "bfloat16 queries" in why(change)
    assert "up to 16 heads, not 17" in why({"q": args["q"].repeat(1, 3, 1)[:, :17]})
    odd = torch.zeros(576 * 8 + 1, dtype=torch.bfloat16, device=s.DEVICE)[1:].view(8, 576)
    assert "multiple of 16 bytes" in why({"cache": odd})
    assert "q and out at one of 4" in why({"q": odd.view(1, 8, 576)})
    if not ON_GPU:
        assert "not on a CUDA device" in why({})
    if not torch.cuda.is_available():
        assert "no CUDA device" in str(mla.missing())
        with use_provider("sparse_mla", "cuda"), pytest.raises(RuntimeError, match="no CUDA device"):
            custom_ops.sparse_mla(**args)


def test_what_cannot_be_built_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with less shared memory than 16 heads take, eight are served, and 16 by another provider."""

    def kernel(device: int, tuning: mla.Tuning) -> object:
        if tuning.head_tiles > 1:
            raise CudaError("too much shared memory")
        return object()

    monkeypatch.setattr(mla, "kernel", kernel)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    mla.missing_on.cache_clear()
    try:
        why = [mla.refuses(*arguments([3], heads=heads).values()) for heads in (8, 16)]
    finally:
        mla.missing_on.cache_clear()
    assert why[0] is None and "cannot be built: too much shared memory" in str(why[1])


@pytest.mark.parametrize("layout", range(3))
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_compiles(capability: tuple[int, int], layout: int) -> None:
    try:
        _nvrtc()
    except CudaError as error:
        pytest.skip(f"no NVRTC: {error}")
    for heads in (8, 16):
        assert build("sparse_mla.cu", capability, mla.tuning_of(LAYOUTS[layout], heads).macros)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 30, 60, 100, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_a_provider(layout: str, rows: int) -> None:
    """Long rows on the GPU, by as many blocks as the number of rows asks for, captured too."""
    args = selections([2048] * rows, 8, 2048, layout, rows)
    args["select_lens"] = s.integers(2049, rows, rows).int()
    want = s.call("sparse_mla", "reference", args), args["out"].clone()
    assert s.call("sparse_mla", "cuda", args) is None
    assert_near(args["out"], want[1].double())
    first = args["out"].clone()
    s.assert_bitwise(run(args), first)
    args["out"].fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), use_provider("sparse_mla", "cuda"):
        OPS["sparse_mla"].body(*args.values())
    graph.replay()
    s.assert_bitwise(args["out"], first)
