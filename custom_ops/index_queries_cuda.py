"""The CUDA C++ kernel of index queries that are transformed (index_queries.cu): compiled at first use, launched."""

from __future__ import annotations

import functools

import torch

from custom_ops._nvrtc import CudaKernel, build, missing_here, multiprocessors, obstacle

LAYOUT = "PPPPPqqII"  # struct Arguments
THREADS = 128
BLOCKS_PER_SM = 8  # that run at once: 64 registers a thread
MACROS = (f"-DTHREADS={THREADS}", f"-DBLOCKS_PER_SM={BLOCKS_PER_SM}", "--fmad=false")
_LANES = 4  # threads of a row
_WIDE = 8  # elements of a load


@functools.cache
def kernel(device: int) -> CudaKernel:
    """The kernel on a device. Raises CudaError or OSError where it cannot be built."""
    cubin = build("index_queries.cu", torch.cuda.get_device_capability(device), MACROS)
    return CudaKernel(cubin, "prepare_queries", device, THREADS, 0, LAYOUT)


@functools.cache
def missing_on(device: int) -> str | None:
    """Why the kernel cannot run on this device, or None; logged once."""
    return obstacle("index queries", device, kernel)


def missing() -> str | None:
    """Why the kernel cannot run on the current device, or None."""
    return missing_here(missing_on)


def refuses(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    round_scale: bool,
) -> str | None:
    """Why the kernel does not serve these arguments, or None."""
    if q.dtype != torch.bfloat16 or interleaved or not (hadamard and round_scale):
        return "takes bfloat16, pairs of halves, the transform and rounded scales"
    strides = (q.stride(0) * (q.shape[0] > 1), q.stride(1) * (q.shape[1] > 1), _WIDE * (q.stride(2) - 1))
    if strides[2] or any(n % _WIDE for n in strides) or (q.data_ptr() | cos_sin_cache.data_ptr()) % 16:
        return "takes rows that begin at multiples of 16 bytes, elements side by side"
    if not q.is_cuda:
        return "q is not on a CUDA device"
    return missing_on(q.get_device())


def blocks(rows: int, sms: int) -> int:
    """Blocks of a launch on ``sms`` multiprocessors: no more than run at once."""
    # They loop: a block that reads its next rows while it computes does not wait for memory.
    return min(-(-rows * _LANES // THREADS), sms * BLOCKS_PER_SM)


def launch(
    q_fp8: torch.Tensor, q_scale: torch.Tensor, q: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Write both results, contiguous, for what ``refuses`` lets through. Raises CudaError if the launch is refused."""
    rows = q.shape[0] * q.shape[1]
    if rows:
        device = q.get_device()
        kernel(device).launch(
            blocks(rows, multiprocessors(device)),
            (
                q.data_ptr(),
                positions.data_ptr(),
                cos_sin_cache.data_ptr(),
                q_fp8.data_ptr(),
                q_scale.data_ptr(),
                q.stride(0) // _WIDE,
                q.stride(1) // _WIDE,
                rows,
                q.shape[1],
            ),
        )
