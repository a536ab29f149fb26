"""The CUDA driver by its C interface, for launches that cost the host little."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

INVALID_CONTEXT = 201  # what a thread is told that has not used CUDA yet


class CudaError(RuntimeError):
    """The driver or the compiler refused; the message says what it said."""


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library; calls of it let other threads run. Raises OSError where there is none."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    cuda.cuGraphLaunch.argtypes = [ctypes.c_void_p] * 2
    return cuda


def check(code: int) -> None:
    """Raise CudaError with the driver's text unless ``code`` is 0."""
    if code:
        said = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(said))
        raise CudaError(f"CUDA error {code}: {(said.value or b'unknown').decode()}")


def again(code: int, device: int, call: Callable[[], int]) -> None:
    """After a ``call`` that gave ``code``: once more in a thread that has not used CUDA yet. Raises CudaError."""
    if code == INVALID_CONTEXT:
        torch.cuda.set_device(device)
        code = call()
    check(code)
