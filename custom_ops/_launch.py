"""Launches of Triton kernels that cost the host little: what Triton asks of every argument is found out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from triton.runtime.jit import JITFunction


class Launcher:
    """A kernel whose parameters are ``pointers`` pointers, each always of one type, then integers, then ``constants``.

    A compiled kernel that is given addresses takes them as they are; Triton's own launch inspects every tensor and asks
    the driver about it, which takes several times as long as the launch itself.
    """

    def __init__(self, kernel: Any, pointers: int, constants: Mapping[str, Any]) -> None:
        self._kernel, self._constants = kernel, dict(constants)
        self._compiled: dict[Any, Any] = {}
        self._interpreted = not isinstance(kernel, JITFunction)
        if not self._interpreted:
            integers = [p for p in kernel.params if not p.is_constexpr][pointers:]
            self._specialized = [i for i, p in enumerate(integers) if not p.do_not_specialize]
            self._values = [constants[p.name] for p in kernel.params if p.is_constexpr]

    def __call__(
        self,
        grid: tuple[int, int],
        addresses: Sequence[int],
        integers: Sequence[int],
        tensors: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """Launch on the current stream. tensors: what lies at ``addresses``, with its types; called to compile."""
        together = 0
        for address in addresses:
            together |= address
        if self._interpreted or together % 16:
            self._kernel[grid](*tensors(), *integers, **self._constants)
            return
        key = (torch._C._cuda_getDevice(), *[integers[i] for i in self._specialized])
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*tensors(), *integers, **self._constants)
        else:
            compiled[(grid[0], grid[1], 1)](*addresses, *integers, *self._values)
