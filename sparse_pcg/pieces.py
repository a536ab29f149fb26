"""Compile the pieces of a split graph, identical ones once.

Two pieces are the same when their nodes, their values' types, and the aliasing of their inputs are the same, whatever
weights or caches they are given. 78 layers come down to a handful of compiled pieces.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap

from .analysis import Analysis, attribute, storage_of
from .counters import COUNTS, logger
from .errors import note
from .split import CUT, LIVE, PIECE, Segment, alias_groups


@dataclass
class Distinct:
    """A compiled piece: its number among the distinct ones, its key, what runs it, and how long it took (seconds)."""

    number: int
    key: str
    run: Callable[..., Sequence[Any]]
    seconds: float


def compile_pieces(
    segments: list[Segment],
    analysis: Analysis,
    real_storage: dict[int, int],
    alignment: dict[fx.Node, int],
    compiler: str,
) -> list[Distinct | None]:
    """Per segment its compiled form; None for a cut. Host and live segments run as PyTorch runs them."""
    found: dict[str, Distinct] = {}
    result: list[Distinct | None] = []
    for segment in segments:
        if segment.kind == CUT:
            result.append(None)
            continue
        assert segment.module is not None
        if segment.kind != PIECE:
            result.append(Distinct(-1, "", segment.module.forward, 0.0))
            continue
        key = piece_key(segment, analysis, real_storage, alignment)
        if key not in found:
            start = time.perf_counter()
            run = _compile(segment, compiler, _own_storage(segment, analysis, real_storage))
            found[key] = Distinct(len(found), key, run, time.perf_counter() - start)
            COUNTS.unique_pieces += 1
        result.append(found[key])
    live = [s for s in segments if s.kind == LIVE]
    for segment in live:
        logger.info("a piece is not captured: %s", segment.why)
    return result


def _own_storage(segment: Segment, analysis: Analysis, real_storage: dict[int, int]) -> list[Any]:
    """Fake inputs to compile with. An input that overlaps no other is given a storage of its own.

    What the compiler sees of a view of a pool is then the same for every layer: it would otherwise bake in where in
    the shared storage the view lies, although nothing of the piece depends on it.
    """
    groups = alias_groups(segment.inputs, analysis, real_storage)
    storages = [
        storage_of(v) if isinstance(v := analysis.values.get(n), torch.Tensor) else None for n in segment.inputs
    ]
    examples: list[Any] = []
    assert segment.module is not None
    placeholders = [n for n in segment.module.graph.nodes if n.op == "placeholder"]
    for node, group, storage in zip(placeholders, groups, storages, strict=True):
        value = node.meta["example_value"]
        if group >= 0 and groups.count(group) == 1 and storages.count(storage) > 1:
            with value.fake_mode:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        examples.append(value)
    return examples


def _compile(segment: Segment, compiler: str, examples: list[Any]) -> Callable[..., Sequence[Any]]:
    assert segment.module is not None
    if compiler == "eager":
        return segment.module.forward
    from .inductor_fixes import compile_piece, ensure_supported

    ensure_supported()
    try:
        return compile_piece(segment.module, examples)
    except Exception as error:
        note(error, f"while compiling the piece at {segment.source} (ops: {', '.join(segment.ops[:8])})")
        raise


def piece_key(segment: Segment, analysis: Analysis, real_storage: dict[int, int], alignment: dict[fx.Node, int]) -> str:
    """A hash of all that the compiled code depends on.

    Names and symbols are numbered by first use. The storage offset of an input counts only where the input shares its
    storage with another: compiled code bakes in the offsets of aliased inputs, and takes any other pointer as it comes.
    """
    assert segment.module is not None
    symbols: dict[str, int] = {}
    numbers: dict[fx.Node, int] = {}
    groups = alias_groups(segment.inputs, analysis, real_storage)
    shared = {g for g in groups if g >= 0 and groups.count(g) > 1}
    parts: list[str] = []
    for node, group in zip(segment.inputs, groups, strict=True):
        value = analysis.values.get(node)
        if group in shared and isinstance(value, torch.Tensor):
            parts.append(f"alias{group}+{_canonical(value.storage_offset(), symbols)}")
        if isinstance(value, torch.Tensor):
            parts.append(f"align{alignment.get(node, 0)}")
    for node in segment.module.graph.nodes:
        numbers[node] = len(numbers)
        args = fx.map_arg((node.args, _named(node)), lambda n: f"%{numbers[n]}")
        target = "" if node.op in ("placeholder", "output") else _target(node, segment.module)
        parts.append(
            f"{node.op} {target} {_literals(args, symbols)} {_describe(node.meta.get('example_value'), symbols)}"
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _named(node: fx.Node) -> dict[str, Any]:
    """A node's keyword arguments; a Triton kernel's constants stand in for the number that each launch gives them."""
    named = dict(node.kwargs)
    if node.target is triton_kernel_wrap.triton_kernel_wrapper_mutation:
        constants = triton_kernel_wrap.kernel_side_table.get_constant_args(named["constant_args_idx"])  # type: ignore[arg-type]
        named["constant_args_idx"] = tuple(sorted((k, repr(v)) for k, v in constants.items()))
    return named


def _target(node: fx.Node, module: fx.GraphModule) -> str:
    if node.op in ("get_attr", "call_module"):
        value = attribute(module, str(node.target))
        return f"{value.code}" if isinstance(value, fx.GraphModule) else f"{type(value).__qualname__}@{id(value)}"
    if isinstance(node.target, str):
        return node.target
    return f"{getattr(node.target, '__module__', '')}.{node.target}"


def _literals(value: Any, symbols: dict[str, int]) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(_literals(v, symbols) for v in value)})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_literals(v, symbols)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_literals((value.start, value.stop, value.step), symbols)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _canonical(value, symbols)
    return f"{type(value).__name__}:{value!r}"


def _describe(value: Any, symbols: dict[str, int]) -> str:
    if isinstance(value, torch.Tensor):
        sizes = [_canonical(s, symbols) for s in (*value.shape, -1, *value.stride())]
        return f"{type(value).__name__} {value.dtype} {value.device} {','.join(sizes)} {value.requires_grad}"
    return _literals(value, symbols)


def _canonical(size: Any, symbols: dict[str, int]) -> str:
    """A size with its symbols renumbered by first use; a symbol's range is part of what code may rely on."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = size.node.expr
        names = {}
        for symbol in sorted(expression.free_symbols, key=str):
            first = str(symbol) not in symbols
            number = symbols.setdefault(str(symbol), len(symbols))
            span = size.node.shape_env.var_to_range.get(symbol) if first else None
            names[symbol] = f"<{number}{'' if span is None else f' in {span}'}>"
        text = str(expression)
        for symbol in sorted(names, key=lambda s: -len(str(s))):
            text = text.replace(str(symbol), names[symbol])
        return text
    return str(size)


def misalignment(tensors: dict[fx.Node, torch.Tensor]) -> dict[fx.Node, int]:
    """Bytes by which each graph input misses a 16-byte boundary: compiled code may rely on alignment."""
    return {node: t.data_ptr() % 16 for node, t in tensors.items()}


def real_storages(inputs: list[fx.Node], analysis: Analysis, tensors: Sequence[Any]) -> dict[int, int]:
    """Fake storage -> real storage address, over the tensors given for the graph's inputs."""
    found = {}
    for node, tensor in zip(inputs, tensors, strict=True):
        value = analysis.values[node]
        if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
            found[storage_of(value)] = tensor.untyped_storage().data_ptr() or storage_of(value)
    return found
