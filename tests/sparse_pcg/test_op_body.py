"""Which ops a plan calls past the dispatcher, and that what they do is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparse_pcg
from sparse_pcg import session
from sparse_pcg.op_body import past_dispatcher

LIBRARY = torch.library.Library("op_body", "DEF")


def _define(name: str, key: str = "CompositeExplicitAutograd") -> Any:
    def body(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> None:
        x.add_(y, alpha=scale)

    LIBRARY.define(f"{name}(Tensor(a!) x, Tensor y, *, float scale=1.0) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
    LIBRARY.impl(name, body, key)
    return getattr(torch.ops.op_body, name).default


ADD, ON_CPU, IMPLICIT = _define("add"), _define("add_cpu", "CPU"), _define("add_implicit", "CompositeImplicitAutograd")
CAST = _define("cast")
LIBRARY.impl("cast", torch.library.fallthrough_kernel, "AutocastCPU")


@torch.library.custom_op("op_body::custom", mutates_args={"x"})
def _custom(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> None:
    x.add_(y, alpha=scale)


class Seen(TorchDispatchMode):
    """Names of the ops that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [ADD, ON_CPU, IMPLICIT, torch.ops.op_body.custom.default], ids=str)
def test_an_op_written_in_python_does_the_same(op: Any) -> None:
    x, y = torch.ones(3), torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
    body = past_dispatcher(op, (x, y), {"scale": 3.0})
    with Seen() as seen, torch.no_grad():
        body(x, y, scale=3.0)
    assert x.tolist() == [7.0] * 3
    assert seen.names == ["aten.add_.Tensor"]


@pytest.mark.parametrize(
    "what, x",
    [
        ("conjugate", torch.ones(2, dtype=torch.complex64).conj()),
        ("negative", torch.ones(2, dtype=torch.complex64).conj().imag),
        ("sparse", torch.ones(2).to_sparse()),
        ("meta", torch.ones(2, device="meta")),
        ("no tensor", 3),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_the_dispatcher_would_treat_first_is_left_to_it(what: str, x: Any) -> None:
    assert past_dispatcher(ADD, (x,), {}) is ADD
    assert past_dispatcher(ADD, (torch.ones(2), torch.ones(2)), {}) is not ADD


def test_a_capture_in_inference_mode_calls_past_the_dispatcher_too() -> None:
    x, y = torch.ones(2), torch.ones(2)
    with torch.inference_mode():
        mine = torch.ones(2)
        assert past_dispatcher(ADD, (x, y), {}) is not ADD
        assert past_dispatcher(ADD, (mine, y), {}) is not ADD
        assert past_dispatcher(ADD, (x.to_sparse(), y), {}) is ADD


def test_ops_that_are_left_to_the_dispatcher() -> None:
    two = (torch.ones(2), torch.ones(2))
    written_in_cpp = torch.ops.aten.add_.Tensor
    assert past_dispatcher(written_in_cpp, two, {}) is written_in_cpp  # it would keep other threads from running
    assert past_dispatcher(CAST, two, {}) is CAST
    assert past_dispatcher(print, two, {}) is print


def test_a_tensor_subclass_is_left_to_the_dispatcher() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert past_dispatcher(ADD, (torch.ones(2).as_subclass(Wrapped), torch.ones(2)), {}) is ADD


def test_plans_call_cuts_past_the_dispatcher() -> None:
    seen_by: list[Any] = []

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + 1
        torch.ops.op_body.add(z, y)
        return z * 2

    x, y = torch.ones(3), torch.ones(3)
    with session.watching(lambda graph, inputs, outputs: seen_by.append((graph, inputs))):
        sparse_pcg.compile(model, capture_sizes=[3], compiler="eager")(x, y)
    graph, inputs = seen_by[0]
    for plan in (sparse_pcg.record(model, x, y), graph.plan(inputs)):
        x.fill_(5)
        with Seen() as seen:
            plan.replay()
        assert not [name for name in seen.names if "op_body" in name]
        assert "aten.add_.Tensor" in seen.names
        assert plan.outputs[0].tolist() == [14.0] * 3
        x.fill_(1)
