"""Copy pages between two pools, either of which may be pinned host memory.

Neighbours that stay neighbours go as one copy of the copy engine. On CUDA, pages that lie scattered go in one launch of
a kernel, which reads or writes the pinned memory in place: a copy each would keep the host busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Pairs = list[tuple[int, int]]  # (source page, target page)

FEW_RUNS = 16
_BLOCK = 2048


@triton.jit
def _copy_kernel(
    source: tl.tensor,
    target: tl.tensor,
    pairs: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """A program copies BLOCK words of one page."""
    pair = tl.program_id(0)
    old = tl.load(pairs + 2 * pair).to(tl.int64)
    new = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    tl.store(target + new * words + word, tl.load(source + old * words + word, mask=inside), mask=inside)


KERNELS = [
    (_copy_kernel, {"source": "*i32", "target": "*i32", "pairs": "*i32", "words": "i32"}, {"BLOCK": _BLOCK}),
]


def copy_pages(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy page a of ``source`` to page b of ``target`` for each pair (a, b), without waiting where one is on CUDA.

    source, target: uint8 [pages, bytes of a page], contiguous; bytes of a page: a multiple of 4.
    """
    runs = page_runs(pairs)
    device = source.device if source.is_cuda else target.device
    if device.type == "cuda" and len(runs) > FEW_RUNS:
        copy_scattered(source, target, pairs, device)
        return
    for old, new, count in runs:
        target[new : new + count].copy_(source[old : old + count], non_blocking=True)


def copy_scattered(source: torch.Tensor, target: torch.Tensor, pairs: Pairs, device: torch.device) -> None:
    """``copy_pages`` as one launch on ``device``."""
    numbers = torch.tensor(pairs, dtype=torch.int32)
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    words = source.shape[1] // 4
    grid = (len(pairs), triton.cdiv(words, _BLOCK))
    _copy_kernel[grid](source.view(torch.int32), target.view(torch.int32), numbers, words, BLOCK=_BLOCK)


def page_runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """(first source, first target, length) of runs of pairs that go up together."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        if runs:
            first, to, count = runs[-1]
            if (source, target) == (first + count, to + count):
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((source, target, 1))
    return runs
