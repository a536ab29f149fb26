"""First pass over a Dynamo graph: bring it into the form that the splitter relies on.

Composites are decomposed, with the tensors that their captured part needs bound as further inputs of the graph;
constants become inputs too, so that identical layers stay identical pieces; ``size()`` becomes ``sym_size`` (no
torch.Size crosses a cut); grad-mode switches go, since everything runs without autograd.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from custom_ops._register import op_of
from custom_ops.batch_metadata import current_context

from .counters import logger
from .errors import OptionError
from .handed_objects import drop_unread


@dataclass(frozen=True)
class BoundInput:
    """An input that the rewrite added: ``resolve()`` gives the tensor now; ``rows`` narrows its first dim.

    rows: the symbolic row count (an int or SymInt) of the argument it goes with, or None for the whole tensor.
    static: the tensor stays at its address for the life of its owner. layer_id: of the layer whose cache it is.
    """

    name: str
    resolve: Callable[[], torch.Tensor]
    rows: Any
    static: bool
    layer_id: int | None = None


def overload_of(node: fx.Node) -> Any:
    """The OpOverload that a node calls, for ``torch.ops.ns.op`` as well as ``torch.ops.ns.op.default``; else None."""
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        return getattr(target, "default" if "default" in names else names[0])
    return None


def map_nodes(tree: Any, fn: Callable[[fx.Node], Any]) -> Any:
    """``tree`` (arguments of a node) with every node replaced by ``fn`` of it, which may be anything."""
    return fx.map_arg(tree, cast(Any, fn))


def cut_overloads(names: Iterable[str]) -> frozenset[Any]:
    """The overloads named by ``Options.cut_ops``. Raises OptionError for a name of no registered op."""
    found = set()
    for name in names:
        parts = name.replace("::", ".").split(".")
        namespace = getattr(torch.ops, parts[0]) if parts[0] else None
        packet = getattr(namespace, parts[1], None) if namespace is not None and len(parts) in (2, 3) else None
        overloads = [] if packet is None else packet.overloads()
        chosen = parts[2:] or overloads
        if not chosen or any(o not in overloads for o in chosen):
            raise OptionError(
                f"option 'cut_ops': got {name!r}, accepted: a registered op as 'ns::op', 'ns.op' or 'ns.op.overload'"
            )
        found |= {getattr(packet, o) for o in chosen}
    return frozenset(found)


def is_cut(node: fx.Node, named: frozenset[Any]) -> bool:
    """Whether the graph is split at this node: by tag, or by name."""
    overload = overload_of(node)
    return overload is not None and (overload in named or torch.Tag.cudagraph_unsafe in overload.tags)


def rewrite(gm: fx.GraphModule, fake_mode: FakeTensorMode) -> list[BoundInput]:
    """Rewrite ``gm`` in place; returns the inputs that were appended to its placeholders, in order."""
    bound: list[BoundInput] = []
    _drop_grad_mode(gm.graph)
    drop_unread(gm.graph)
    _constants_to_inputs(gm, fake_mode, bound)
    _sizes_to_symbols(gm.graph)
    _decompose(gm.graph, fake_mode, bound)
    gm.graph.lint()
    gm.recompile()
    return bound


def _drop_grad_mode(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (torch._C._set_grad_enabled,):
            graph.erase_node(node)


def _append_placeholder(graph: fx.Graph, name: str, example: Any) -> fx.Node:
    last = [n for n in graph.nodes if n.op == "placeholder"]
    if last:
        with graph.inserting_after(last[-1]):
            node = graph.placeholder(name)
    else:
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(name)
    node.meta["example_value"] = example
    return node


def _constants_to_inputs(gm: fx.GraphModule, fake_mode: FakeTensorMode, bound: list[BoundInput]) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(node.target)(gm)
        if not isinstance(value, torch.Tensor):
            continue
        fake = fake_mode.from_tensor(value, static_shapes=True)
        name = f"constant_{node.name}"
        replacement = _append_placeholder(gm.graph, name, fake)
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
        bound.append(BoundInput(name, partial(_itself, value), None, True))


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _sizes_to_symbols(graph: fx.Graph) -> None:
    """``x.size()`` and ``x.shape`` that stayed in the graph: one ``sym_size`` per dim that is read."""
    for node in list(graph.nodes):
        whole_size = node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
        shape = node.op == "call_function" and node.target is getattr and node.args[1:2] == ("shape",)
        if not (whole_size or shape):
            continue
        source = node.args[0]
        example = source.meta["example_value"]
        with graph.inserting_before(node):
            dims = tuple(_dim(graph, source, d, example) for d in range(example.dim()))
        for user in list(node.users):
            if user.op == "call_function" and user.target is operator.getitem:
                size = dims[user.args[1]]  # type: ignore[index]
                for reader in list(user.users):
                    _inline(user, size, reader)
                graph.erase_node(user)
            else:
                _inline(node, dims, user)
        graph.erase_node(node)


def _dim(graph: fx.Graph, source: fx.Node, dim: int, example: torch.Tensor) -> Any:
    size = example.shape[dim]
    if isinstance(size, int):
        return size
    node = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
    node.meta["example_value"] = size
    return node


def _inline(node: fx.Node, value: Any, user: fx.Node) -> None:
    """In ``user``, replace ``node`` by a node, a literal, or a tuple of these."""
    user.args = map_nodes(user.args, lambda n: value if n is node else n)
    user.kwargs = map_nodes(user.kwargs, lambda n: value if n is node else n)


class _GraphBind:
    """``bind`` for decompositions, on FX proxies: each tensor of the context becomes an input of the graph, once."""

    def __init__(
        self, graph: fx.Graph, tracer: fx.proxy.TracerBase, fake_mode: FakeTensorMode, bound: list[BoundInput]
    ):
        self.graph, self.tracer, self.fake_mode, self.bound = graph, tracer, fake_mode, bound
        self.seen: dict[tuple[Any, ...], fx.Node] = {}

    def __call__(self, name: str, layer_id: int | None = None, rows_like: fx.Proxy | None = None) -> fx.Proxy:
        context = current_context()
        assert context is not None
        rows = None if rows_like is None else self.shape(rows_like)[0]
        key = (name, layer_id, str(rows))
        if key not in self.seen:
            real = context.tensor(name, layer_id)
            fake: torch.Tensor = self.fake_mode.from_tensor(real, static_shapes=True)
            if rows is not None:
                with self.fake_mode:
                    fake = torch.empty((rows, *real.shape[1:]), dtype=real.dtype, device=real.device)
            label = f"bound_{name}" + ("" if layer_id is None else f"_{layer_id}")
            self.seen[key] = _append_placeholder(self.graph, label, fake)
            resolve = partial(_from_context, name, layer_id)
            self.bound.append(BoundInput(label, resolve, rows, rows is None, layer_id))
        return fx.Proxy(self.seen[key], self.tracer)

    @staticmethod
    def shape(argument: Any) -> tuple[Any, ...]:
        """The shape of an argument; dims that are static are ints."""
        example = argument.node.meta["example_value"] if isinstance(argument, fx.Proxy) else argument
        return tuple(example.shape)


def _from_context(name: str, layer_id: int | None) -> torch.Tensor:
    context = current_context()
    if context is None:
        raise RuntimeError(
            f"{name}: no forward context is current in this thread; run the model under use_context(...)"
        )
    return context.tensor(name, layer_id)


def _decompose(graph: fx.Graph, fake_mode: FakeTensorMode, bound: list[BoundInput]) -> None:
    tracer = fx.proxy.GraphAppendingTracer(graph)
    bind = _GraphBind(graph, tracer, fake_mode, bound)
    progress = True
    while progress:  # a composite may decompose into composites
        progress = False
        for node in list(graph.nodes):
            op = op_of(overload_of(node)) if node.op == "call_function" else None
            if op is None or op.decompose is None:
                continue
            context = current_context()
            if context is None or context.metadata is None:
                logger.info("%s stays whole: no forward context is current while compiling", op.name)
                continue
            if op.name in context.whole:
                continue
            _expand(graph, tracer, fake_mode, node, op.decompose, bind)
            progress = True


def _expand(
    graph: fx.Graph,
    tracer: fx.proxy.TracerBase,
    fake_mode: FakeTensorMode,
    node: fx.Node,
    decompose: Callable[..., Any],
    bind: _GraphBind,
) -> None:
    before = set(graph.nodes)
    with graph.inserting_before(node):
        args = map_nodes(node.args, lambda n: fx.Proxy(n, tracer))
        kwargs = map_nodes(node.kwargs, lambda n: fx.Proxy(n, tracer))
        result = decompose(bind, *args, **kwargs)
    for fresh in graph.nodes:
        if fresh in before or fresh.op == "placeholder":
            continue
        fresh.stack_trace = node.stack_trace
        fresh.meta["from_composite"] = str(node.target)
    if result is not None:
        node.replace_all_uses_with(fx.map_arg(result, lambda p: p) if not isinstance(result, fx.Proxy) else result.node)
    graph.erase_node(node)
