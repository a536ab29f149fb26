"""The CUDA C++ kernel of ``sparse_mla`` for few heads (sparse_mla.cu): compiled at first use, launched."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from custom_ops import vendor
from custom_ops._nvrtc import CudaKernel, build, missing_here, multiprocessors, obstacle
from custom_ops.mla_cache import LATENT, LAYOUTS, PACKED_BYTES, ROW

ARGUMENTS = "PPPPPfiii"  # struct Arguments
PARTS = 8  # of a row's selection, merged in order
TILE = 32  # tokens
MAX_HEADS = 16
_THREADS = 256
_STORED = (2 * ROW, PACKED_BYTES, ROW)  # bytes of a token
_WIDE = 2 * ROW + 16  # bytes from token to token of a float8 tile that is widened
_SM_SHARED = 228 << 10  # bytes, of which a block takes 1 KiB more than it says


@dataclass(frozen=True, eq=False)
class Tuning:
    """How sparse_mla.cu is built; the names are its macros in lower case. By identity: every launch looks one up."""

    layout: int
    head_tiles: int
    blocks_per_sm: int
    stages: int = 2

    @property
    def macros(self) -> list[str]:
        return [*(f"-D{name.upper()}={value}" for name, value in vars(self).items()), "--fmad=false"]

    @property
    def shared(self) -> int:
        """Bytes of ``struct Shared``."""
        heads = 8 * self.head_tiles
        stage = TILE * (_STORED[self.layout] + 4) + 8
        wide = TILE * _WIDE if self.layout else 16
        scores = 4 * 4 * heads * (TILE + 4)
        state = 4 * heads * (LATENT + 4 + 2)
        return -(-(self.stages * stage + wide + scores + 12 * heads) // 16) * 16 + state


# A multiprocessor has room for two blocks of eight heads, or for one of 16.
_TUNINGS = {(layout, tiles): Tuning(i, tiles, 2 // tiles) for i, layout in enumerate(LAYOUTS) for tiles in (1, 2)}


def tuning_of(layout: str, heads: int) -> Tuning:
    """What serves rows of ``heads`` heads, up to ``MAX_HEADS``."""
    return _TUNINGS[layout, 1 if heads <= 8 else 2]


def part_of(k: int) -> int:
    """Tokens of a part, of rows that select up to ``k``."""
    return -(-k // (PARTS * TILE)) * TILE


def blocks_of_a_row(rows: int, heads: int, sms: int) -> int:
    """How many blocks share each row: as many as there is room for at once on ``sms`` multiprocessors."""
    room = sms * tuning_of("bf16", heads).blocks_per_sm
    return next((blocks for blocks in (8, 2) if blocks * rows <= room), 1)


@functools.cache
def kernel(device: int, tuning: Tuning) -> CudaKernel:
    """The kernel on a device. Raises CudaError or OSError where it cannot be built."""
    cubin = build("sparse_mla.cu", torch.cuda.get_device_capability(device), tuning.macros)
    return CudaKernel(cubin, "sparse_mla_rows", device, _THREADS, tuning.shared, ARGUMENTS)


@functools.cache
def missing_on(device: int, tuning: Tuning) -> str | None:
    """Why the kernel of ``tuning`` cannot run on this device, or None; logged once."""
    return obstacle("sparse MLA", device, lambda index: kernel(index, tuning))


def missing() -> str | None:
    """Why the kernel cannot run on the current device, or None."""
    return missing_here(lambda device: missing_on(device, tuning_of("bf16", 8)))


def refuses(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> str | None:
    """Why the kernel does not serve these arguments, or None."""
    if q.dtype != torch.bfloat16 or (layout == "bf16" and cache.dtype != torch.bfloat16):
        return "takes bfloat16 queries, and rows of bfloat16 or float8"
    if q.shape[1] > MAX_HEADS:
        return f"takes up to {MAX_HEADS} heads, not {q.shape[1]}"
    if cache.data_ptr() % 16 or (q.data_ptr() | out.data_ptr()) % 4:
        return "takes a cache that begins at a multiple of 16 bytes, q and out at one of 4"
    if not q.is_cuda:
        return "q is not on a CUDA device"
    return missing_on(q.get_device(), tuning_of(layout, q.shape[1]))


def slower(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
) -> str | None:
    """As measured on an H200, with 100 and 2048 selected tokens: one block of 16 heads fills a multiprocessor."""
    rows, heads = q.shape[:2]
    if vendor._arch() != 9:
        return "measured on sm_90 only"
    if layout == "bf16" and heads > 8 and blocks_of_a_row(rows, heads, multiprocessors(q.get_device())) == 1:
        return f"{rows} rows of {heads} heads take less time with 64 heads a block"
    return None


def launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    select_lens: torch.Tensor,
    out: torch.Tensor,
    sm_scale: float,
    layout: str,
    blocks: int | None = None,
    tuning: Tuning | None = None,
) -> None:
    """``sparse_mla`` for what ``refuses`` lets through; blocks: that share a row, None: as fits.

    Raises CudaError where the launch is refused.
    """
    rows, heads = q.shape[:2]
    if rows == 0:
        return
    device = q.get_device()
    if blocks is None:
        blocks = blocks_of_a_row(rows, heads, multiprocessors(device))
    if tuning is None:
        tuning = tuning_of(layout, heads)
    kernel(device, tuning).launch(
        rows * blocks, arguments(q, cache, topk, select_lens, out, sm_scale), blocks
    )


def arguments(
    q: torch.Tensor, cache: torch.Tensor, topk: torch.Tensor, select_lens: torch.Tensor, out: torch.Tensor, scale: float
) -> tuple[int | float, ...]:
    """The fields of ``struct Arguments``."""
    pointers = [t.data_ptr() for t in (q, cache, topk, select_lens, out)]
    return (*pointers, scale * 1.4426950408889634, topk.shape[1], q.shape[1], part_of(topk.shape[1]))
