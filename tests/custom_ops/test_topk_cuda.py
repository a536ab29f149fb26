"""The CUDA C++ top-k: its code runs here as C++ on the CPU, every thread of a block a fiber, in random order."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from custom_ops import topk, topk_cuda
from custom_ops._nvrtc import CudaError, _nvrtc, compile_cuda, sources
from custom_ops.topk import topk_indices_reference, topk_slots_reference
from custom_ops.topk_cuda import (
    ALONE,
    LONG,
    MEDIUM,
    SHORT,
    SPLIT,
    STREAM,
    TUNINGS,
    WIDE,
    Tuning,
    blocks_of_a_row,
    tuning_of,
)
from tests.custom_ops import strategies as s
from tests.custom_ops.host_library import host_library

NAN, INF = float("nan"), float("inf")
# Little of everything, so that short rows reach every path: 512 elements in registers, 384 gathered.
SMALL = Tuning(threads=64, capacity=384, max_k=64, unroll=2, in_registers=2, sample_sigmas=3.0)
SMALL_SPLIT = replace(SMALL, split=1)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@functools.cache
def library(tuning: Tuning) -> ctypes.CDLL:
    return host_library("topk_host.cpp", *tuning.macros)


def on_host(args: dict, blocks: int = 1, seed: int = 0, valid_rows: int | None = None) -> torch.Tensor:
    """What the kernel selects; a row behind the last must stay as it was."""
    rows, k = len(args["lengths"]), args["k"]
    out = torch.full((rows + 1, k), 77, dtype=torch.int32)
    table = args.get("page_table")
    pointers = [args["logits"], args["starts"], args["lengths"], args.get("request_of_row"), table, out]
    packed = struct.pack(
        "@" + topk_cuda._LAYOUT,
        *(0 if t is None else t.data_ptr() for t in pointers),
        args["logits"].stride(0),
        0 if table is None else table.stride(0),
        rows if valid_rows is None else valid_rows,
        k,
        args["logits"].shape[1],
    )
    run = library(SMALL if blocks == 1 else SMALL_SPLIT).topk_on_host
    run.restype = ctypes.c_bool
    assert run(packed, rows, blocks, seed), "written behind the shared memory"
    assert (out[rows] == 77).all()
    return out[:rows]


def values_of(kind: str, rows: int, width: int, gen: torch.Generator) -> torch.Tensor:
    normal = torch.randn(rows, width, generator=gen)
    column = torch.arange(width).expand(rows, width)
    if kind == "relu":  # most are zero
        return normal.sub(1.3).relu()
    if kind == "equal":
        return torch.full((rows, width), -0.25)
    if kind == "ties":
        return torch.randint(-1, 2, (rows, width), generator=gen).float()
    if kind == "signed zeros":  # and little above them
        table = torch.tensor([0.0, -0.0, -1.0])
        return torch.where(normal > 3, normal, table[torch.randint(0, 3, (rows, width), generator=gen)])
    if kind == "few values":
        return torch.randint(0, 40, (rows, width), generator=gen).float()
    if kind == "ascending":
        return column.float().contiguous()
    if kind == "descending":
        return -column.float()
    if kind == "mostly NaN":
        return torch.where(torch.rand(rows, width, generator=gen) < 0.999, NAN, normal)
    if kind == "burst":  # more than fit are above what a sample shows
        normal[:, width // 3 : width // 3 + 100] += 100
        normal[:, -90:] += 200
        return normal
    if kind == "spikes":
        return torch.where(column % 37 == 0, normal, -INF)
    if kind == "special":
        table = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0])
        return table[torch.randint(0, len(table), (rows, width), generator=gen)]
    return normal


KINDS = ("normal", "relu", "equal", "ties", "signed zeros", "few values", "ascending", "descending", "mostly NaN",
         "burst", "spikes", "special")  # fmt: skip


def make(kind: str, k: int, width: int, lengths: list[int], pad: int, seed: int) -> dict:
    """Rows of these lengths somewhere in ``width`` columns; around them the greatest there is, and NaN."""
    gen = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    starts = [int(torch.randint(0, width - n + 1, (1,), generator=gen)) for n in lengths]
    wide = torch.full((rows, width + pad), INF)
    wide[:, :width] = values_of(kind, rows, width, gen)
    for row, start, length in zip(wide, starts, lengths, strict=True):
        row[:start] = INF
        row[start + length :] = NAN if seed % 2 else INF
    ints = functools.partial(torch.tensor, dtype=torch.int32)
    return {"logits": wide[:, :width], "starts": ints(starts), "lengths": ints(lengths), "k": k}


def lengths_of(k: int, width: int, other: int) -> list[int]:
    return [n for n in (0, 1, k - 1, k, k + 1, width // 2, width, other % (width + 1)) if n <= width]


@needs_compiler
@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    k=st.sampled_from((1, 2, 17, 33, 64)),
    width=st.sampled_from((1, 3, 64, 100, 400, 513, 1000, 2500)),
    other=st.integers(0, 2500),
    pad=st.integers(0, 7),
    blocks=st.sampled_from((1, 1, 2, 4)),
    paged=st.booleans(),
    seed=s.seeds,
)
def test_follows_the_contract(
    kind: str, k: int, width: int, other: int, pad: int, blocks: int, paged: bool, seed: int
) -> None:
    args = make(kind, k, width, lengths_of(k, width, other), pad, seed)
    if paged:
        gen = torch.Generator().manual_seed(seed)
        pages = -(-width // 64)
        args["request_of_row"] = torch.randint(0, 3, (len(args["lengths"]),), generator=gen).int()
        args["page_table"] = torch.randint(0, 2**20, (3, pages + 2), generator=gen).int()[:, :pages]
        want = topk_slots_reference(**args)
    else:
        want = topk_indices_reference(**args)
    assert torch.equal(on_host(args, blocks, seed), want)


# Each path at least once, whatever hypothesis draws: rows in registers and gathered, shared by blocks and not.
@needs_compiler
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, blocks: int) -> None:
    for width, k in ((500, 64), (3001, 64), (3001, 5)):
        args = make(kind, k, width, [width, width - 1, width - 2], 1, width)
        assert torch.equal(on_host(args, blocks, 1), topk_indices_reference(**args)), (width, k)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("by", [0.5, 0.8, 3.0])  # a second threshold serves, or none does
def test_a_sample_that_misleads(by: float, above: bool, blocks: int) -> None:
    width, samples = 3000, SMALL.threads
    stretch = torch.arange(samples)
    fraction = (stretch << 32) // samples | (stretch * 2654435761 % 2**32) // samples
    seen = torch.zeros(width // 4, dtype=torch.bool)
    seen[fraction * (width // 4) >> 32] = True
    for seed in range(4):
        args = make("normal", 64, width, [width], 0, 2 * seed)
        # Above it is more than fits, or it alone is above: a threshold that too few reach.
        args["logits"][0].view(-1, 4)[seen != above] += by
        assert torch.equal(on_host(args, blocks), topk_indices_reference(**args)), seed


@needs_compiler
@given(seed=s.seeds)
def test_a_threshold_is_reached_by_what_sorts_so(seed: int) -> None:
    special = torch.tensor([NAN, INF, 3.4e38, 1.0, 1e-45, 0.0, -0.0, -1e-45, -1e-38, -1.0, -3.4e38, -INF])
    drawn = torch.randint(-(2**31), 2**31, (8,), generator=s.generator(seed)).int().view(torch.float32)
    values = torch.cat((special, drawn))
    reaches = library(SMALL).reaches
    reaches.argtypes, reaches.restype = (ctypes.c_float, ctypes.c_float), ctypes.c_bool
    for threshold in values[(values == values) & (values != -INF)].tolist():
        assert [reaches(threshold, x) for x in values.tolist()] == (values >= threshold).tolist(), threshold


@needs_compiler
def test_what_lies_behind_rows_that_are_read_ahead() -> None:
    args = make("normal", 64, 2001, list(range(1990, 2001)), 3, 2)
    args["starts"].zero_()
    for row, length in zip(args["logits"], args["lengths"], strict=True):
        row[:length].clamp_(max=9)
        row[length:] = INF
    assert torch.equal(on_host(args, blocks=4), topk_indices_reference(**args))


@needs_compiler
@pytest.mark.parametrize("kind", ["normal", "relu"])
def test_positions_beyond_one_bitmap(kind: str) -> None:
    args = make(kind, 64, 140_003, [140_003], 0, 3)  # the bitmap has 65536 bits
    args["logits"][0, [65535, 65536, 131071, 131072, 140_002]] = 9.0
    assert torch.equal(on_host(args), topk_indices_reference(**args))


@needs_compiler
def test_rows_behind_the_valid_ones_and_no_starts() -> None:
    args = make("normal", 8, 600, [600, 600, 600], 0, 1)
    want = topk_indices_reference(**args)
    want[1:] = -1
    args["starts"] = None
    args["lengths"][1:] = 400  # is not looked at
    assert torch.equal(on_host(args, valid_rows=1), want)


@needs_compiler
def test_the_launch_knows_how_much_shared_memory_it_needs() -> None:
    for tuning in (SMALL, Tuning(threads=64, capacity=1000, max_k=128)):
        assert library(tuning).shared_bytes() == tuning.shared


def test_wide_rows_get_more_threads_where_they_are_few() -> None:
    assert tuning_of(8192, 4096, 1, 132) is tuning_of(1, 4096, 1, 132) is SHORT
    assert tuning_of(265, 8192, 1, 132) is MEDIUM and tuning_of(265, 8193, 1, 132) is STREAM
    assert tuning_of(265, 20480, 1, 132) is STREAM and tuning_of(265, 20481, 1, 132) is WIDE
    assert tuning_of(265, 32768, 1, 132) is WIDE and tuning_of(265, 32769, 1, 132) is LONG
    assert tuning_of(264, 4097, 1, 132) is tuning_of(133, 4097, 1, 132) is LONG
    assert tuning_of(132, 16384, 1, 132) is ALONE and tuning_of(132, 16385, 1, 132) is LONG
    assert tuning_of(16, 131072, 2, 132) is SPLIT


def test_rows_are_shared_where_they_are_few_and_long() -> None:
    assert blocks_of_a_row(512, 131072, 132) == 1
    assert blocks_of_a_row(1, 16383, 132) == blocks_of_a_row(67, 131072, 132) == 1
    assert blocks_of_a_row(66, 16384, 132) == blocks_of_a_row(17, 131072, 132) == 2
    assert blocks_of_a_row(16, 32768, 132) == blocks_of_a_row(16, 131072, 132) == 4
    assert blocks_of_a_row(1, 32768, 132) == 4
    assert blocks_of_a_row(1, 65536, 132) == blocks_of_a_row(2, 1 << 20, 132) == 8


def test_refusals_say_why() -> None:
    assert topk_cuda.refuses(torch.zeros(1, 4), 1, 2049) == "k is at most 2048, not 2049"
    if s.DEVICE == "cpu":
        assert "not on a CUDA device" in str(topk_cuda.refuses(torch.zeros(1, 4), 1, 4))
    if not torch.cuda.is_available():
        assert "no CUDA device" in str(topk_cuda.missing())


def test_what_cannot_be_built_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(device: int, tuning: Tuning) -> object:
        if tuning is SPLIT:
            raise CudaError("no clusters")
        return object()

    monkeypatch.setattr(topk_cuda, "kernel", kernel)
    monkeypatch.setattr(topk_cuda, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    served = []
    monkeypatch.setattr(topk_cuda, "launch", lambda *args: served.append("cuda"))
    monkeypatch.setattr(topk, "launch_triton", lambda *args: served.append("triton"))
    lengths = torch.ones(1, dtype=torch.int32)
    topk_cuda.missing_on.cache_clear()
    try:
        for rows, width in ((1, 16383), (1, 16384), (67, 16384)):  # of 67 all but one are pad rows
            topk.launch_topk(torch.empty(rows, 4), torch.zeros(1, width), None, lengths, None, None, 1)
        why = topk_cuda.refuses(torch.zeros(1, 16384), 1, 4)
    finally:
        topk_cuda.missing_on.cache_clear()
    assert served == ["cuda", "triton", "cuda"]
    assert "cannot be built: no clusters" in str(why)


@pytest.mark.parametrize(
    ("capability", "tuning"), [*(((9, 0), t) for t in TUNINGS), *(((10, 0), t) for t in (LONG, SHORT, STREAM, SPLIT))]
)
def test_compiles(capability: tuple[int, int], tuning: Tuning) -> None:
    try:
        _nvrtc()
    except CudaError as error:
        pytest.skip(f"no NVRTC: {error}")
    source, headers = sources("topk.cu")
    assert compile_cuda(source, "topk.cu", capability, tuning.macros, headers)[:4] == b"\x7fELF"
    with pytest.raises(CudaError, match=r"topk_gather\.cuh"):
        compile_cuda(source, "topk.cu", capability, tuning.macros)  # without what it includes
