"""The symbolic sizes of a graph's inputs, and how to read their values off the arguments of a call.

A captured graph is valid for one value of every symbol it sees. They are found by symbol, never by position: the same
size may come as an int argument, as a dim of a tensor, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from .analysis import Analysis, symbols_of


def _read_value(i: int, args: Sequence[Any]) -> int:
    return int(args[i])


def _read_size(i: int, dim: int, args: Sequence[Any]) -> int:
    return args[i].shape[dim]


def _read_stride(i: int, dim: int, args: Sequence[Any]) -> int:
    return args[i].stride(dim)


def _read_offset(i: int, args: Sequence[Any]) -> int:
    return args[i].storage_offset()


def symbol_sources(placeholders: list[fx.Node], analysis: Analysis) -> dict[Any, Callable[[Sequence[Any]], int]]:
    """Per free symbol of the inputs, how to read its value off the flat arguments: found by symbol, not by position."""
    sources: dict[Any, Callable[[Sequence[Any]], int]] = {}
    for i, node in enumerate(placeholders):
        value = analysis.values[node]
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            sources.setdefault(value.node.expr, partial(_read_value, i))
    for i, node in enumerate(placeholders):
        value = analysis.values[node]
        if not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                sources.setdefault(size.node.expr, partial(_read_size, i, dim))
        for dim, size in enumerate(value.stride()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                sources.setdefault(size.node.expr, partial(_read_stride, i, dim))
        offset = value.storage_offset()
        if isinstance(offset, torch.SymInt) and offset.node.expr.is_Symbol:
            sources.setdefault(offset.node.expr, partial(_read_offset, i))
    needed: set[Any] = set()
    for node in placeholders:
        needed |= symbols_of(analysis.values[node])
    return {s: read for s, read in sources.items() if s in needed}


def row_symbol(
    placeholders: list[fx.Node], analysis: Analysis, moving: list[int], declared: tuple[int, int] | None
) -> tuple[Any, int]:
    """The symbol of the token dim, or (None, its size) where that is fixed.

    declared: position and dim of the argument that counts tokens, where the caller said so. Else it is the first
    symbolic size of the first argument that has one.
    """
    if declared is not None:
        size = analysis.values[placeholders[declared[0]]].shape[declared[1]]
        symbolic = isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
        return (size.node.expr, 0) if symbolic else (None, int(size) if isinstance(size, int) else 0)
    for i in moving:
        for size in analysis.values[placeholders[i]].shape:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                return size.node.expr, 0
    return None, 0


def row_reader(rows: Any, sources: dict[Any, Callable[[Sequence[Any]], int]]) -> Callable[[Sequence[Any]], int] | None:
    if rows is None:
        return None
    if isinstance(rows, int):
        return lambda args: rows
    expression = rows.node.expr
    if expression in sources:
        return sources[expression]
    used = [s for s in sources if s in expression.free_symbols]
    return lambda args: int(expression.subs({s: sources[s](args) for s in used}))
