"""SGLang's ``split_graph`` beside our splitter, on generated graphs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_pcg.compiled_graph import CompiledGraph
from sparse_pcg.options import Options

from .harness import kernels

register_custom_op = kernels.srt("utils.custom_op").register_custom_op
config = kernels.srt("compilation.compilation_config")


@register_custom_op(mutates_args=["out"])
@config.register_split_op()
def generated_break(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    out.copy_(x * factor)


def _program(seed: int) -> Callable[[torch.Tensor], Any]:
    """Straight-line code over a few live tensors [rows, 6]: arithmetic, views, writes in place, breaks."""
    rng = random.Random(seed)
    steps = rng.choices(["add", "mul", "view", "inplace", "break", "break2", "rows"], k=rng.randint(5, 14))
    picks = [(rng.random(), rng.random()) for _ in steps]
    last = rng.randint(1, 3)

    def run(x: torch.Tensor) -> Any:
        live = [x + 1.0, x * 2.0]
        for step, (i, j) in zip(steps, picks, strict=True):
            a, b = live[int(i * len(live))], live[int(j * len(live))]
            if step == "add":
                live.append(a + torch.sin(b))
            elif step == "mul":
                live.append(a * 0.5 - b)
            elif step == "view":
                live.append(a.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6))
            elif step == "inplace":
                a.add_(b)
            elif step == "rows":
                live.append(a * a.shape[0])
            else:
                out = torch.empty_like(a)
                torch.ops.sglang.generated_break(a, out, 1.5)
                if step == "break2":
                    torch.ops.sglang.generated_break(b, out, 0.5)
                live.append(out)
        return tuple(live[-last:])

    return run


def _arithmetic(nodes: Any) -> list[str]:
    """What is computed, in order; sizes and views may lie in either neighbour."""
    skipped = ("size", "getitem", "view", "transpose", "reshape", "empty_like")
    names = [getattr(n.target, "__name__", str(n.target)) for n in nodes if n.op.startswith("call")]
    return [name for name in names if not any(word in name for word in skipped)]


@pytest.mark.parametrize("seed", range(12))
def test_same_pieces_between_the_same_breaks(seed: int) -> None:
    split_graph = kernels.srt("compilation.backend").split_graph
    found: dict[str, Any] = {}

    def backend(gm: torch.fx.GraphModule, examples: list[Any]) -> Any:
        theirs, items = split_graph(copy.deepcopy(gm), ["sglang.generated_break"])
        ours = CompiledGraph(gm, examples, Options(cut_ops=("sglang.generated_break",), graphs="off", compiler="eager"))
        found.update(theirs=theirs, items=items, ours=ours)
        return theirs

    torch._dynamo.reset()
    x = torch.randn(5, 6)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    compiled = torch.compile(_program(seed), backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = _program(seed)(x.clone())
        first = compiled(x.clone())
    cuts = [item for item in found["items"] if item.is_splitting_graph]
    assert len(cuts) == sum(s.kind == "cut" for s in found["ours"].segments)
    theirs: list[list[str]] = [[]]
    for item in found["items"]:
        if item.is_splitting_graph:
            theirs.append([])
        else:
            theirs[-1] += _arithmetic(item.graph.graph.nodes)
    ours: list[list[str]] = [[]]
    for segment in found["ours"].segments:
        if segment.kind == "cut":
            ours.append([])
        else:
            ours[-1] += _arithmetic(segment.nodes)
    assert ours == theirs
    for one, other in zip(first, expected, strict=True):
        assert torch.equal(one, other)
    rows = 9
    again = torch.randn(rows, 6)
    with torch.no_grad():
        inputs = [rows if isinstance(v, (int, torch.SymInt)) else again.clone() for v in _placeholders(found["theirs"])]
        given = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
        for one, other in zip(found["ours"](*inputs), found["theirs"](*given), strict=True):
            assert torch.equal(one, other)


def _placeholders(gm: torch.fx.GraphModule) -> list[Any]:
    return [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
