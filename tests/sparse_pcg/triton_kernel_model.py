"""A model that launches a Triton kernel of its own, compiled by the backend; a script, since Dynamo must see Triton.

On a CPU the launch itself is replaced; what the kernel writes is read off its code all the same. Prints JSON.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import torch.utils._triton
import triton
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap as wrap
from triton.backends.compiler import GPUTarget

from sparse_pcg import backend, session

torch.utils._triton.has_triton = lambda *args, **kwargs: True
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))


FACTORS = (2, 5, 2, 2)


@triton.jit
def _scale_kernel(x, out, n, factor: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def _launch(*, kernel_idx: int, constant_args_idx: int, kwargs: Any, **rest: Any) -> None:
    constants = wrap.kernel_side_table.get_constant_args(constant_args_idx)
    kwargs["out"].copy_(kwargs["x"] * constants["factor"])


wrap.triton_kernel_wrapper_mutation.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd] = _launch

_LIBRARY = torch.library.Library("sparse_pcg_triton_test", "FRAGMENT")
_LIBRARY.define("half(Tensor(a!) x) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


def _half(x: torch.Tensor) -> None:
    x.mul_(0.5)


_LIBRARY.impl("half", _half, "CompositeExplicitAutograd")
_LIBRARY._register_fake("half", lambda x: None)


def model(x: torch.Tensor, given: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Four layers; the second has another constant, and the last reads one argument and writes another."""
    for layer in range(4):
        y = given if layer == 3 else x + 1
        out = total if layer == 3 else torch.empty_like(y)
        _scale_kernel[(triton.cdiv(y.numel(), 128),)](y, out, y.numel(), factor=FACTORS[layer], BLOCK=128)
        torch.ops.sparse_pcg_triton_test.half(out)
        x = x + out if layer == 3 else out
    return x


if __name__ == "__main__":
    seen: list[Any] = []
    options = {"capture_sizes": [8], "compiler": "eager"}
    compiled = torch.compile(model, backend=backend.sparse_pcg, fullgraph=True, dynamic=False, options=options)
    x, given, total = torch.randn(8, 4), torch.randn(8, 4), torch.zeros(8, 4)
    want = x
    for factor in FACTORS[:3]:
        want = (want + 1) * factor * 0.5
    want = want + given * FACTORS[3] * 0.5
    with session.watching(lambda graph, inputs, outputs: seen.append(graph)), torch.no_grad():
        equal = [torch.equal(compiled(x, given, total), want) for _ in range(3)]
    graph = seen[0]
    found = {"equal": equal, "kinds": [s.kind for s in graph.segments], "distinct": graph.distinct_count}
    print(json.dumps({**found, "kernels": graph.kernels_of, "written": [graph.names[i] for i in graph.written]}))
