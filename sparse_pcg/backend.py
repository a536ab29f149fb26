"""The entry points: the torch.compile backend, ``compile``, ``freeze`` and ``reset``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from . import counters, session
from .compiled_graph import CompiledGraph, structure
from .counters import COUNTS, LIVE, count_fallback
from .errors import FrozenError, OptionError
from .options import Options


def sparse_pcg(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: Any = None,
) -> Callable[..., Any]:
    """The backend behind ``torch.compile(model, backend="sparse_pcg", options={...})``.

    options: see ``Options``. Raises OptionError (a ValueError) for an unknown option or a bad value.
    """
    if mode is not None:
        raise OptionError(f"option 'mode': got {mode!r}, accepted: none; this backend takes options={{...}} only")
    chosen = Options.of(options)
    COUNTS.graphs += 1
    if session.frozen():
        return TracedFrozen(gm, chosen)
    return CompiledGraph(gm, example_inputs, chosen)


class OwnBackend:
    """The backend as an object of its own: Dynamo shares what it compiled between callers with an equal backend."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        return sparse_pcg(gm, example_inputs, **settings)


class TracedFrozen:
    """A graph that Dynamo traced after ``freeze()``: runs as it is, each call counted; after ``reset()`` compiled."""

    def __init__(self, gm: fx.GraphModule, options: Options) -> None:
        self._gm, self._options = gm, options
        self._grad_enabled = torch.is_grad_enabled()
        self._compiled: CompiledGraph | None = None
        alike = [g for g in LIVE if isinstance(g, CompiledGraph) and g.structure == structure(gm)]
        self._reason = "recompile"
        if alike and all(g.grad_enabled != self._grad_enabled for g in alike):
            self._reason = "grad_mode"
        self._detail = f"Dynamo traced the model again after freeze() ({self._reason})"
        if options.strict:
            raise FrozenError(f"with strict=True: {self._detail}")

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None and not session.frozen():
            # Dynamo's guards are made by now: a compiler that specialises on sizes could not add to them any more.
            options = dataclasses.replace(self._options, compiler="eager")
            self._compiled = CompiledGraph(self._gm, args, options)
        if self._compiled is not None:
            return self._compiled(*args)
        count_fallback(self._reason, self._detail)
        with torch.no_grad():
            return self._gm.forward(*args)


class CompiledModule:
    """What ``compile`` returns: call it like the module."""

    def __init__(self, module: Callable[..., Any], dynamic_dims: Mapping[str, int] | None, options: Options) -> None:
        self.module = module
        self.options = options
        self._signature = inspect.signature(module.forward if isinstance(module, torch.nn.Module) else module)
        self._dims = None if dynamic_dims is None else dict(dynamic_dims)
        for name in self._dims or {}:
            if name not in self._signature.parameters:
                raise ValueError(f"dynamic_dims: no parameter {name!r}, there are {list(self._signature.parameters)}")
        self.compiled: Callable[..., Any] = torch.compile(
            module, backend=sparse_pcg, fullgraph=True, options=options.to_dict()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs).arguments
        first: tuple[torch.Tensor, int] | None = None
        for name in self._dims or bound:
            value = bound.get(name)
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            dim = 0 if self._dims is None else self._dims[name] % value.dim()
            first = first or (value, dim)
            if value.shape[dim] >= 2:  # Dynamo makes sizes 0 and 1 graphs of their own
                torch._dynamo.maybe_mark_dynamic(value, dim)
        counting = nullcontext() if first is None else session.counting_tokens(*first)
        with torch.no_grad(), counting:
            return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None:
            raise AttributeError(name)
        value = getattr(module, name)
        if not inspect.ismethod(value):
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is module else result  # eval(), to(), ... return the module: this one

        return method


def compile(
    module: Callable[..., Any], *, dynamic_dims: Mapping[str, int] | None = None, **options: Any
) -> CompiledModule:
    """Compile ``module`` with dims declared dynamic, so that the first size already gives the dynamic graph.

    dynamic_dims: {parameter name: dim}; the first is the token dim. None: dim 0 of every tensor argument.
    options: see ``Options``. Runs without autograd whatever mode the caller is in.
    """
    return CompiledModule(module, dynamic_dims, Options.of(options))


def freeze() -> None:
    """From now on nothing is captured or compiled inside a call: what is not captured runs uncompiled or uncaptured.

    Each such call is counted by reason in ``stats().fallbacks``, or raises FrozenError where ``strict=True``.
    """
    session.set_frozen(True)


def reset() -> None:
    """Drop captured graphs, pools and counters, and lift ``freeze()``. Compiled modules are captured anew."""
    for owner in (*session.RESETTABLE, *LIVE):
        owner.drop()
    session.set_frozen(False)
    counters.clear()
