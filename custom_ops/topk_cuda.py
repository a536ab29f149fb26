"""The CUDA C++ kernels of the top-k selection (topk.cu): compiled at first use, launched for a batch of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from custom_ops._nvrtc import CudaKernel, build, missing_here, multiprocessors, obstacle

_LAYOUT = "PPPPPPqqiii"  # struct Arguments
_OPTIONS = ("--prec-div=false", "--prec-sqrt=false")  # of the sample's rank, which need not be exact
_CLUSTER = 8  # blocks at most that share a row
_SHARE = 8192  # columns at least of a row to each that shares it


@dataclass(frozen=True, eq=False)
class Tuning:
    """How topk.cu is built; the names are its macros in lower case. Hashed by identity: every launch looks one up."""

    threads: int = 512
    capacity: int = 8192
    max_k: int = 2048
    unroll: int = 4
    in_registers: int = 4
    log_bins: int = 11
    blocks_per_sm: int = 2
    sample_sigmas: float = 4.0
    split: int = 0

    @property
    def macros(self) -> list[str]:
        return [f"-D{name.upper()}={value}" for name, value in vars(self).items()]

    @property
    def shared(self) -> int:
        """Bytes of ``struct Shared``."""
        return 8 * self.capacity + 4 * 2**self.log_bins + 8 * 32 + 4 * (64 + 1 + 3 + 2)


# By time on an H200. Rows of up to 4 * threads * in_registers columns are read once into registers. Of longer ones the
# time goes to instructions and to waiting, which many small blocks hide; the wider, the more must fit of what a sample
# lets through.
SHORT = Tuning(threads=256, capacity=3392, unroll=1, log_bins=10, blocks_per_sm=7)
MEDIUM = Tuning(threads=256, capacity=4096, unroll=1, in_registers=8, log_bins=10, blocks_per_sm=5)
STREAM = Tuning(threads=256, capacity=3392, log_bins=10, blocks_per_sm=6, sample_sigmas=3.5)
WIDE = Tuning(threads=256, capacity=4096, log_bins=10, blocks_per_sm=5)
LONG = Tuning(capacity=6144, blocks_per_sm=3)
ALONE = Tuning(threads=1024, blocks_per_sm=1)
SPLIT = Tuning(threads=1024, unroll=2, blocks_per_sm=1, split=1)
TUNINGS = (SHORT, MEDIUM, STREAM, WIDE, LONG, ALONE, SPLIT)


def tuning_of(rows: int, width: int, blocks: int, multiprocessors: int) -> Tuning:
    """What serves rows of ``width`` columns, each shared by ``blocks``.

    Few rows take the time of one: more threads each. The selection is the same by any.
    """
    if blocks > 1:
        return SPLIT
    if width <= 4096:
        return SHORT
    if rows <= multiprocessors and width <= 16384:
        return ALONE
    if rows <= 2 * multiprocessors or width > 32768:
        return LONG
    return MEDIUM if width <= 8192 else STREAM if width <= 20480 else WIDE


@functools.cache
def kernel(device: int, tuning: Tuning) -> CudaKernel:
    """The kernel on a device. Raises CudaError or OSError where it cannot be built."""
    cubin = build("topk.cu", torch.cuda.get_device_capability(device), [*tuning.macros, *_OPTIONS])
    return CudaKernel(cubin, "topk_rows", device, tuning.threads, tuning.shared, _LAYOUT)


@functools.cache
def missing_on(device: int, tuning: Tuning) -> str | None:
    """Why the kernel of ``tuning`` cannot run on this device, or None; logged once."""
    return obstacle("top-k", device, lambda index: kernel(index, tuning))


def missing() -> str | None:
    """Why the kernels cannot run on the current device, or None."""
    return missing_here(lambda device: missing_on(device, SHORT))


def refuses(logits: torch.Tensor, rows: int, k: int) -> str | None:
    """Why the kernels do not serve these arguments for ``rows`` of a result, or None."""
    if k > LONG.max_k:
        return f"k is at most {LONG.max_k}, not {k}"
    if not logits.is_cuda:
        return "logits are not on a CUDA device"
    device = logits.get_device()
    return missing_on(device, choice(rows, logits.shape[1], multiprocessors(device))[0])


def blocks_of_a_row(rows: int, width: int, multiprocessors: int) -> int:
    """1, or for few and long rows how many blocks share each."""
    blocks = 1
    # Pairs find their places while there are as many multiprocessors as blocks; of larger clusters each needs a run of
    # them that are free.
    while (
        blocks < _CLUSTER
        and (2 if blocks == 1 else 4) * blocks * rows <= multiprocessors
        and 2 * blocks * _SHARE <= width
    ):
        blocks *= 2
    return blocks


@functools.lru_cache(maxsize=1024)  # a launch asks for it twice: whether there is a kernel, and which
def choice(rows: int, width: int, multiprocessors: int, blocks: int | None = None) -> tuple[Tuning, int]:
    """What serves rows of ``width`` columns, and how many blocks share each, where that is not given."""
    if blocks is None:
        blocks = blocks_of_a_row(rows, width, multiprocessors)
    return tuning_of(rows, width, blocks, multiprocessors), blocks


def launch(
    out: torch.Tensor,
    logits: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor,
    request_of_row: torch.Tensor | None,
    page_table: torch.Tensor | None,
    valid_rows: int,
    tuning: Tuning | None = None,
    blocks: int | None = None,
) -> None:
    """Write the selection of each row into ``out`` int32 [T, k], contiguous; the arguments of ``launch_topk``.

    blocks: that share a row; None for it and for the tuning: as fits the shape and the device. Raises CudaError
    where the launch is refused.
    """
    rows, k = out.shape
    if rows == 0:
        return
    device = logits.get_device()
    width = logits.shape[1]
    best, blocks = choice(rows, width, multiprocessors(device), blocks)
    kernel(device, tuning or best).launch(
        rows * blocks,
        (
            logits.data_ptr(),
            starts.data_ptr() if starts is not None else 0,
            lengths.data_ptr(),
            request_of_row.data_ptr() if request_of_row is not None else 0,
            page_table.data_ptr() if page_table is not None else 0,
            out.data_ptr(),
            logits.stride(0),
            page_table.stride(0) if page_table is not None else 0,
            valid_rows,
            k,
            width,
        ),
        blocks,
    )
