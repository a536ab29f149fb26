"""Kernels of one operator that overlap: the next one is launched while the one before still runs.

The first kernel of an operator is launched as any other and says at once that the next may come; the next ones are
launched with ``launch_pdl``. Such a kernel may read what was there before the operator, and write what only it
writes, at any time. All else waits for the kernel before it; every program waits before it ends, so that the end of
the last kernel is the end of all.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(PDL: tl.constexpr) -> None:
    """The kernel after this one may start once all programs of this one have come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_kernel_before(PDL: tl.constexpr) -> None:
    """Until the kernel before this one has ended and what it wrote can be read."""
    if PDL:
        gdc_wait()


@functools.cache
def _capable(index: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)


def overlaps(x: torch.Tensor) -> bool:
    """Whether the device of ``x`` can: NVIDIA GPUs from compute capability 9.0."""
    return x.is_cuda and _capable(x.get_device())
