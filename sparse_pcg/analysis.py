"""What each node of a graph does, found by running the graph once on fake tensors and watching the dispatcher.

Nothing is guessed from names: views, allocations, writes, host syncs and devices are read off the ATen operators that
the nodes really call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import note

_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_FREE_PREFIXES = (
    "aten::sym_",
    "aten::detach",
    "aten::lift_fresh",
    "prim::device",
    "aten::_local_scalar_dense",
    "_c10d_functional::wait_tensor",  # one stream waits for another
)


@dataclass
class NodeFacts:
    """What one node does.

    kernels: how many operators with a kernel it calls (views and allocations have none).
    writes: storages (fake, by address) it writes. devices: device types of the tensors it touches.
    sync: the operator with which it reads device data on the host, or "".
    """

    kernels: int = 0
    writes: set[int] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    sync: str = ""


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a (fake or real) tensor's storage."""
    return tensor.untyped_storage()._cdata


def launches(func: Any) -> bool:
    """Whether an operator has a kernel: views, allocations and arithmetic on symbols have none."""
    name = func._schema.name
    view = func.is_view and name not in ("aten::reshape", "aten::contiguous")
    return not view and name not in _ALLOCATIONS and not name.startswith(_FREE_PREFIXES)


class _Watch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.facts = NodeFacts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = self.facts
        if isinstance(func, HigherOrderOperator):
            return self._triton_kernel(func, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                facts.writes |= {storage_of(t) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                leaves = pytree.tree_leaves(kwargs[argument.name])
                facts.writes |= {storage_of(t) for t in leaves if isinstance(t, torch.Tensor)}
        name = func._schema.name
        out = func(*args, **kwargs)
        # Indexing has a data-dependent size only with a mask: what counts is a size that no argument has.
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and symbols_of(out) - symbols_of((args, kwargs))
        ):
            facts.sync = facts.sync or name
        facts.kernels += launches(func)
        self._see(args, kwargs, out)
        return out

    def _see(self, *values: Any) -> None:
        tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
        self.facts.devices |= {t.device.type for t in tensors}

    def _triton_kernel(self, func: Any, kwargs: Any) -> Any:
        """A Triton kernel that the model launches itself: what it writes is read off its code."""
        if func is not triton_kernel_wrap.triton_kernel_wrapper_mutation:
            raise NotImplementedError(f"the graph calls {func}, of which is not known what it writes")
        out = func(**kwargs)
        asked = ("kernel_idx", "constant_args_idx", "kwargs", "tma_descriptor_metadata")
        written = triton_kernel_wrap.get_mutated_tensors(*(kwargs[name] for name in asked))
        values = kwargs["kwargs"]
        self.facts.writes |= {storage_of(values[n]) for n in written if isinstance(values.get(n), torch.Tensor)}
        self.facts.kernels += 1
        self._see(kwargs)
        return out


@dataclass
class Analysis:
    """values: what each node gives, on fake tensors. facts: what it does. mutated: placeholders the graph writes."""

    values: dict[fx.Node, Any]
    facts: dict[fx.Node, NodeFacts]
    mutated: set[fx.Node]


def analyse(gm: fx.GraphModule, fake_mode: FakeTensorMode) -> Analysis:
    """Run ``gm`` node by node on the fake values of its placeholders; sets ``meta["example_value"]`` where missing."""
    values: dict[fx.Node, Any] = {}
    facts: dict[fx.Node, NodeFacts] = {}
    watch = _Watch()
    shape_env = fake_mode.shape_env
    ignore: Callable[[], Any] | None = getattr(shape_env, "ignore_fresh_unbacked_symbols", None)
    quiet = ignore() if ignore is not None and shape_env is not None else torch.no_grad()
    with torch.no_grad(), quiet, fake_mode, watch:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta["example_value"]
            elif node.op == "get_attr":
                values[node] = attribute(gm, str(node.target))
            elif node.op == "output":
                continue
            else:
                watch.facts = facts[node] = NodeFacts()
                values[node] = _run(gm, node, values)
                known = node.meta.get("example_value")
                if known is None:
                    node.meta["example_value"] = values[node]
                elif facts[node].sync:
                    # A second run of an op with a data-dependent result makes a new symbol: keep Dynamo's.
                    values[node] = known
    written = set().union(*(f.writes for f in facts.values())) if facts else set()
    mutated = {
        n for n, v in values.items() if n.op == "placeholder" and isinstance(v, FakeTensor) and storage_of(v) in written
    }
    return Analysis(values, facts, mutated)


def _run(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    try:
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    except Exception as error:
        note(error, f"while analysing {node.name} = {node.target} at {source_line(node)}")
        raise


def attribute(gm: fx.GraphModule, target: str) -> Any:
    """What a dotted ``target`` of a node names in ``gm``."""
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def symbols_of(value: Any) -> set[Any]:
    """The free symbols of a fake value: of its sizes, strides and offset, or of the SymInt itself."""
    found: set[Any] = set()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            parts: tuple[Any, ...] = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        else:
            parts = (leaf,)
        for part in parts:
            if isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found |= part.node.expr.free_symbols
    return found


def source_line(node: fx.Node) -> str:
    """``file:line in function: code`` of the model's line that made this node, or "unknown"."""
    trace = node.stack_trace or ""
    lines = [ln for ln in trace.splitlines() if ln.strip()]
    for i in range(len(lines) - 1, -1, -1):
        stripped = lines[i].strip()
        if stripped.startswith('File "'):
            path, _, rest = stripped[6:].partition('", line ')
            number, _, function = rest.partition(", in ")
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            return f"{path}:{number} in {function}: {code}"
    return "unknown"
