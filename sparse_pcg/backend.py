"""The entry points: the torch.compile backend, ``compile``, ``freeze`` and ``reset``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from . import counters, session
from .compiled_graph import CompiledGraph
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
        return _uncompiled(gm, chosen)
    return CompiledGraph(gm, example_inputs, chosen)


def _uncompiled(gm: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """After ``freeze()`` a graph that Dynamo traced anew runs as it is, and each call is counted."""
    reason = "recompile"
    if any(graph.grad_enabled != torch.is_grad_enabled() for graph in LIVE):
        reason = "grad_mode"
    detail = f"Dynamo traced the model again after freeze() ({reason})"
    if options.strict:
        raise FrozenError(f"with strict=True: {detail}")

    def run(*args: Any) -> Any:
        count_fallback(reason, detail)
        with torch.no_grad():
            return gm.forward(*args)

    return run


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
            dim = 0 if self._dims is None else self._dims[name]
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            first = first or (value, dim)
            if value.shape[dim] >= 2:  # Dynamo makes sizes 0 and 1 graphs of their own
                torch._dynamo.maybe_mark_dynamic(value, dim)
        counting = nullcontext() if first is None else session.counting_tokens(*first)
        with torch.no_grad(), counting:
            return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)


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
