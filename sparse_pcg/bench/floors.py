"""The least that an operator of a few rows can take: launches one after another, loads that wait for one another."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .timing import device

STRIDE = 1 << 14  # elements between two loads: none is of a line, or of a small page, that an earlier one brought


@triton.jit
def _chase_kernel(steps: tl.tensor, out: tl.tensor, LOADS: tl.constexpr) -> None:
    """LOADS loads, each from where the one before says; then one element is stored."""
    at = tl.program_id(0).to(tl.int64)
    for _ in tl.static_range(LOADS):
        at = tl.load(steps + at)
    tl.store(out, at)


def floor_run(launches: int, loads: int) -> tuple[Callable[[], None], torch.Tensor]:
    """A chain of kernels of one program, the first with ``loads`` loads in a row, the others with none.

    Returns what launches it, and the int64 [1] that it writes: the place it ends at if it is of one launch.
    """
    steps = torch.zeros(loads * STRIDE + 1, dtype=torch.int64, device=device())
    places = torch.arange(loads, device=steps.device) * STRIDE
    steps[places] = places + STRIDE
    out = torch.zeros(1, dtype=torch.int64, device=steps.device)

    def run() -> None:
        for launch in range(launches):
            _chase_kernel[(1,)](steps, out, LOADS=0 if launch else loads, num_warps=1)

    return run, out
