"""Repairs of silent Inductor miscompiles of operators that write their arguments, active around one compile.

Stock Inductor gives wrong results, without any error, for three patterns that a model with a paged KV pool is
made of:

``offset_slice``
    An operator writes a slice of a graph input whose storage offset is not zero (``pool[1][4:12]``):
    functionalisation derives the slice's start from the absolute offset, so other rows are written.
``pending_read``
    A value read lazily from a buffer (``v = pool[slots]``) is used after an operator wrote that buffer: the
    operator call is placed before the read, which then sees the new content.
``dropped_clone``
    An operator writes ``x`` and reads a copy of ``x``: graph passes take the copy for a no-op and remove it,
    so the operator reads what it has just written.

A fourth costs time, not results:

``self_copy``
    An operator writes a dtype view of an input (``pool.view(torch.uint8)``): the whole input is copied onto
    itself at the end.

``repaired()`` wraps the functions at fault and puts them back on exit. They are private to PyTorch, so this
module is the one place that knows their names; on a PyTorch where they do not look as expected it raises.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_settings
import torch._higher_order_ops.auto_functionalize as auto_functionalize
import torch._inductor.compile_fx as inductor_compile_fx
import torch._inductor.config as inductor_settings
import torch._inductor.fx_passes.post_grad as post_grad
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import ir
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.virtualized import V
from torch._library.utils import zip_schema
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from sparse_pcg.compile_cache import cache_dir

TRUSTED_VERSIONS = ((2, 11), (2, 12), (2, 13), (2, 14))
REPAIRS = ("offset_slice", "pending_read", "dropped_clone", "self_copy")

_enabled = REPAIRS  # tests take one out
_keep_alive: list[torch.library.Library] = []
_lock = threading.RLock()
_depth = 0


class UnsupportedTorch(RuntimeError):
    """This PyTorch cannot be repaired: its internals have changed, or a repair does not hold on it."""


@dataclass(frozen=True)
class Patch:
    """One function to replace: ``wrap(original)`` stands in for ``owner.name`` while the repair is active.

    parameters: the original's parameter names as this module knows them.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Any]

    def original(self) -> Any:
        """The descriptor to put back; raises UnsupportedTorch unless it is the function known here."""
        found = inspect.getattr_static(self.owner, self.name, None)
        function = getattr(found, "__func__", found)
        given = tuple(inspect.signature(function).parameters) if callable(function) else None
        if given is None or given[: len(self.parameters)] != self.parameters:
            raise UnsupportedTorch(
                f"torch {torch.__version__}: {self.owner.__name__}.{self.name} should take "
                f"{self.parameters}, found {given}; this version needs repairs of its own"
            )
        return found


def inductor_config() -> dict[str, Any]:
    """The Inductor settings a piece is compiled under.

    ``reorder_for_locality`` moves reads of a pool past a write of it, which costs a copy of the pool. Graphs
    are captured by the caller, never by Inductor. A remote cache knows nothing of our cache directory.
    """
    return {
        "enable_auto_functionalized_v2": True,
        "reorder_for_locality": False,
        "keep_output_stride": True,
        "triton.cudagraphs": False,
        "graph_partition": False,
        "fx_graph_remote_cache": False,
    }


def _repair_slice(original: Callable[..., Any]) -> Callable[..., Any]:
    def try_use_slice(base: torch.Tensor, tensor: torch.Tensor) -> tuple[int, Any, Any] | None:
        found = original(base, tensor)
        offset = base.storage_offset()
        if found is None or statically_known_true(offset == 0):
            return found
        dim, start, end = found
        if statically_known_true(base.size(dim) == tensor.size(dim)):
            return found  # the whole base: nothing was derived from an offset
        stride = tensor.stride(dim)
        if not statically_known_true(offset % stride == 0):
            return None
        shift = offset // stride
        return dim, start - shift, end - shift

    return try_use_slice


def _repair_pending_reads(original: Callable[..., Any]) -> Any:
    def create(cls: type, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kernel, torch._ops.OpOverload) and kernel._schema.is_mutable:
            for info, value in zip_schema(kernel._schema, args, kwargs):
                if info.alias_info is None or not info.alias_info.is_write:
                    continue
                for written in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(written, ir.IRNode):
                        written.realize()
                        V.graph.mark_buffer_mutated(written.get_name())
        return original(cls, kernel, *args, **kwargs)

    return classmethod(create)


def _written_args(node: fx.Node) -> list[fx.Node] | None:
    """The tensors a functionalised operator call writes; None for any other node."""
    hops = torch.ops.higher_order
    if node.target is hops.auto_functionalized_v2:
        return pytree.tree_leaves(node.kwargs["_all_bases"])
    if node.target is hops.triton_kernel_wrapper_functional:
        named: Any = node.kwargs["kwargs"]
        return [named[name] for name in node.kwargs["tensors_to_clone"]]  # type: ignore[union-attr]
    return None


def _tensors(node: fx.Node) -> list[Any]:
    return [
        leaf if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor) else None
        for leaf in pytree.tree_leaves((node.args, node.kwargs))
    ]


def _repair_noops(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a graph pass so that what an operator reads stays apart from what it writes.

    Arguments that share storage before the pass (the model passes the same pool twice) are left so.
    """

    def keep_apart(graph: Any, *args: Any, **kwargs: Any) -> Any:
        before = _separate_reads(_graph_of(graph))
        result = original(graph, *args, **kwargs)
        graph = _graph_of(graph if result is None else result)
        for node in [n for n in graph.nodes if n in before]:
            _copy_merged_reads(graph, node, before[node])
        return result

    return keep_apart


def _graph_of(graph: Any) -> fx.Graph:
    return graph.graph if isinstance(graph, fx.GraphModule) else graph


def _separate_reads(graph: fx.Graph) -> dict[fx.Node, dict[int, torch.Tensor]]:
    """For each operator call that writes: flat position -> value of the arguments in no written storage."""
    found = {}
    for node in graph.nodes:
        written = _written_args(node)
        if written is not None:
            storages = {get_node_storage(w) for w in written if isinstance(w, fx.Node)}
            found[node] = {
                position: leaf.meta["val"]
                for position, leaf in enumerate(_tensors(node))
                if leaf is not None and get_node_storage(leaf) not in storages
            }
    return found


def _copy_merged_reads(graph: fx.Graph, node: fx.Node, reads: dict[int, torch.Tensor]) -> None:
    storages = {get_node_storage(w) for w in _written_args(node) or [] if isinstance(w, fx.Node)}
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    merged = [p for p in reads if isinstance(leaves[p], fx.Node) and get_node_storage(leaves[p]) in storages]
    for position in merged:
        with graph.inserting_before(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (leaves[position],))
        copy.meta["val"] = reads[position]
        leaves[position] = copy
    if merged:
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)


def _repair_self_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_grad_passes(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        result = original(gm, *args, **kwargs)
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            target, source = node.args[:2]
            root = source
            while isinstance(root, fx.Node) and root.target is torch.ops.aten.view.dtype:
                root = root.args[0]
            if root is target and source.meta["val"].dtype == target.meta["val"].dtype:
                node.replace_all_uses_with(target)
                gm.graph.erase_node(node)
        gm.recompile()
        return result

    return post_grad_passes


def _patches() -> dict[str, tuple[Patch, ...]]:
    return {
        "offset_slice": (Patch(auto_functionalize, "try_use_slice", ("base", "tensor"), _repair_slice),),
        "pending_read": (
            Patch(ir.FallbackKernel, "create", ("cls", "kernel", "args", "kwargs"), _repair_pending_reads),
        ),
        "dropped_clone": (
            Patch(inductor_compile_fx, "joint_graph_passes", ("graph",), _repair_noops),
            Patch(post_grad, "remove_noop_ops", ("graph",), _repair_noops),
        ),
        "self_copy": (Patch(inductor_compile_fx, "post_grad_passes", ("gm", "is_inference"), _repair_self_copies),),
    }


@contextmanager
def repaired() -> Iterator[None]:
    """Inside the block Inductor compiles without the three miscompiles, and with ``inductor_config()``.

    Re-entrant. One thread at a time: another one that enters waits. Raises UnsupportedTorch where a function
    to be wrapped is not the one known; nothing is changed then.
    """
    global _depth
    with _lock, ExitStack() as stack:
        patches = [patch for repair in _enabled for patch in _patches()[repair]] if _depth == 0 else []
        for patch, found in [(patch, patch.original()) for patch in patches]:
            setattr(patch.owner, patch.name, patch.wrap(getattr(found, "__func__", found)))
            stack.callback(setattr, patch.owner, patch.name, found)
        _depth += 1
        stack.callback(_leave)
        stack.enter_context(inductor_settings.patch(inductor_config()))
        stack.enter_context(functorch_settings.patch(enable_remote_autograd_cache=False))
        if _depth == 1:
            stack.enter_context(torch.compiler.config.patch(cache_key_tag=_key()))  # type: ignore[attr-defined]
        yield


def _key() -> str:
    return "+".join(("sparse_pcg", version(), *_enabled, torch.compiler.config.cache_key_tag))


def _leave() -> None:
    global _depth
    _depth -= 1


@functools.cache
def version() -> str:
    """Digest of this module's source: two versions of the repairs never share compiled entries."""
    source = inspect.getsource(sys.modules[__name__])
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def compile_piece(gm: fx.GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """Compile one piece with Inductor.

    gm: a graph over tensors and SymInts that are all inputs (no parameters of its own); left unchanged.
    fake_inputs: one FakeTensor or SymInt per input, of one fake mode; symbolic sizes stay symbolic.
    Returns ``fn(*inputs)``, which gives the graph's outputs, always as a tuple or list, with the fake
    strides, and writes the inputs that the graph writes. Raises ValueError for a real tensor among the
    inputs.
    """
    real = [i for i, given in enumerate(fake_inputs) if _is_real(given)]
    if real:
        raise ValueError(f"compile_piece: fake_inputs must be fake tensors, got real ones at {real}")
    graph = copy.deepcopy(gm.graph)
    output = next(iter(reversed(graph.nodes)))
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    # the inputs' own fake mode: it knows their symbols; a context of our own: the ambient trace is left alone
    context = TracingContext(detect_fake_mode(list(fake_inputs)) or FakeTensorMode())
    with repaired(), cache_dir(version()), torch.no_grad(), tracing(context):
        return inductor_compile_fx.compile_fx(fx.GraphModule(gm, graph), list(fake_inputs))  # type: ignore


def _is_real(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and not isinstance(given, FakeTensor)


def self_test() -> list[str]:
    """Compile a small model per miscompile, caches off, compare with eager: the repairs that do not hold."""
    write = _self_test_op()

    def models(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        write(a[1:3], a[:1] * 0)
        before = b[1:3] * 2
        write(b, before[:1])
        write(c, c.clone())
        return a + 1, before + b[1:3], c + 1

    def inputs() -> list[torch.Tensor]:
        return [torch.arange(48.0).view(6, 8)[2:] for _ in range(3)]

    mode = FakeTensorMode()
    no_graphs, no_programs = {"fx_graph_cache": False}, {"enable_autograd_cache": False}
    with inductor_settings.patch(no_graphs), functorch_settings.patch(no_programs):
        compiled = compile_piece(fx.symbolic_trace(models), [mode.from_tensor(a) for a in inputs()])
    given, expected = inputs(), inputs()
    pairs = zip(given, compiled(*given), expected, models(*expected), strict=True)
    right = [torch.equal(a, e) and torch.equal(out, want) for a, out, e, want in pairs]
    return [name for name, ok in zip(REPAIRS, right, strict=False) if not ok]


@functools.cache
def _self_test_op() -> Any:
    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        x.zero_()
        x.add_(y)

    _keep_alive.append(library := torch.library.Library("sparse_pcg_self_test", "DEF"))
    library.define("write(Tensor(a!) x, Tensor y) -> ()")
    library.impl("write", write, "CompositeExplicitAutograd")
    library._register_fake("write", lambda x, y: None)
    return torch.ops.sparse_pcg_self_test.write


@functools.cache
def ensure_supported() -> None:
    """Raise UnsupportedTorch unless the repairs hold on this PyTorch; on one not tried before, run the
    self-test.

    Cached: the backend calls it before it compiles.
    """
    for patches in _patches().values():
        for patch in patches:
            patch.original()
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) in TRUSTED_VERSIONS:
        return
    failures = self_test()
    if failures:
        raise UnsupportedTorch(
            f"torch {torch.__version__} is not one of the tried versions {TRUSTED_VERSIONS}, and these "
            f"repairs of Inductor miscompiles do not hold on it: {', '.join(failures)}; use compiler='eager'"
        )
