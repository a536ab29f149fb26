"""The CUDA C++ kernel of index keys that are transformed (index_keys.cu): compiled at first use, launched."""

from __future__ import annotations

import functools

import torch

from custom_ops._nvrtc import CudaKernel, build, missing_here, obstacle

LAYOUT = "PPPPPPPqif"  # struct Arguments
THREADS = 64
_LANES = 4  # threads of a row
_WIDE = 8  # elements of a load
_ALIGNED = 16  # elements that rows begin at multiples of: with others Triton's sums are in another order
_AFFINE = {torch.float32: "float4", torch.bfloat16: "uint4"}  # loads of weight and bias


def macros(affine: torch.dtype) -> tuple[str, ...]:
    """Options of the compiler. affine: dtype of weight and bias."""
    return f"-DTHREADS={THREADS}", "-DBLOCKS_PER_SM=4", f"-DAFFINE={_AFFINE[affine]}", "--fmad=false"


@functools.cache
def kernel(device: int, affine: torch.dtype = torch.float32) -> CudaKernel:
    """The kernel on a device; affine: as for ``macros``. Raises CudaError or OSError where it cannot be built."""
    cubin = build("index_keys.cu", torch.cuda.get_device_capability(device), macros(affine))
    return CudaKernel(cubin, "prepare_keys", device, THREADS, 0, LAYOUT)


@functools.cache
def missing_on(device: int, affine: torch.dtype = torch.float32) -> str | None:
    """Why the kernel cannot run on this device, or None; logged once. affine: as for ``macros``."""
    return obstacle("index keys", device, lambda index: kernel(index, affine))


def missing() -> str | None:
    """Why the kernel cannot run on the current device, or None."""
    return missing_here(missing_on)


def refuses(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> str | None:
    """Why the kernel does not serve these arguments, or None."""
    if k.dtype != torch.bfloat16 or interleaved or not (hadamard and round_scale):
        return "takes bfloat16, pairs of halves, the transform and rounded scales"
    if bias is not None and bias.dtype != weight.dtype:
        return "takes weight and bias of one dtype"
    if k.stride(1) != 1 or k.stride(0) % _ALIGNED:
        return f"takes rows that begin at multiples of {_ALIGNED} elements, elements side by side"
    if any(t is not None and t.data_ptr() % 16 for t in (k, weight, bias, cos_sin_cache)):
        return "takes k, weight, bias and cos_sin_cache at multiples of 16 bytes"
    if not k.is_cuda:
        return "k is not on a CUDA device"
    return missing_on(k.get_device(), weight.dtype)


def arguments(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[int | float, ...]:
    """The fields of struct Arguments, in the order of ``LAYOUT``."""
    return (
        k.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        cache.data_ptr(),
        slots.data_ptr(),
        k.stride(0) // _WIDE,
        k.shape[0],
        eps,
    )


def blocks(rows: int) -> int:
    """Blocks of a launch."""
    return -(-rows * _LANES // THREADS)


def launch(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    hadamard: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
    round_scale: bool,
) -> None:
    """``index_k_prepare_store`` for what ``refuses`` lets through. Raises CudaError if the launch is refused."""
    if k.shape[0]:
        fields = arguments(k, weight, bias, eps, positions, cos_sin_cache, cache, slots)
        kernel(k.get_device(), weight.dtype).launch(blocks(k.shape[0]), fields)
