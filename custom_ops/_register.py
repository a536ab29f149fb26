"""The one way to define an operator of this package.

An operator is declared once, with its schema, a plain PyTorch reference (the specification, right on any device), a
fake implementation (exact shape, dtype and stride), an argument check and any number of faster providers. ``define``
registers it under ``torch.ops.sparse_pcg`` through ``torch.library.Library``: ``torch.library.custom_op`` costs about
ten times as much a call. The Python body is kept beside the overload so that a replayed plan can call a cut op without
passing the dispatcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from custom_ops.batch_metadata import current_context

NAMESPACE = "sparse_pcg"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

OPS: dict[str, Op] = {}
_BY_OVERLOAD: dict[Any, Op] = {}

_forced: ContextVar[dict[str, str] | None] = ContextVar("sparse_pcg_forced_providers", default=None)
_debug: ContextVar[bool] = ContextVar("sparse_pcg_debug_checks", default=False)


def _always(*args: Any, **kwargs: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    run: takes the op's arguments in schema order, writes mutated arguments in place, returns what the schema says.
    supports: the reason why this provider does not serve these arguments, or None. Called with the same arguments.
    missing: the reason why it cannot run on this machine at all (package absent, too old, wrong GPU), or None.
    slower: the reason why, unless forced, it is passed over for these arguments though it could serve them, or None.
    row_regime: as in ``Op``, for what only this provider does.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None] = _always
    missing: Callable[[], str | None] = _always
    slower: Callable[..., str | None] = _always
    row_regime: Callable[[int], int] | None = None


@dataclass
class Op:
    """A registered operator: what ``define`` was given, and its ``OpOverload``.

    cut: the graph is split at this op (tag ``cudagraph_unsafe``).
    row_regime: given the SM count, the number of rows up to which the op's reduction order depends on the number of
        rows (0: never). None: rows are independent at any count.
    rows: names of the arguments whose first dim counts rows. Where the context asks for it (``valid_rows_only``), and
        as a cut, the op runs on the valid rows of these alone; the other rows of what it writes are zero, or -1.
    decompose: for a composite, ``decompose(bind, *args)`` calls the ops the composite stands for.
        ``bind(name, layer_id=None, rows_like=None)`` gives the named tensor of the current forward context
        (``ForwardContext.tensor``), as an input of the captured part; with ``rows_like`` it is narrowed to that
        argument's number of rows. Written with ops and tensor methods only, no Python reads of shapes.
    short_body: for a cut op, a capturable body that gives the same result where every row selects all it sees.
    """

    name: str
    schema: str
    overload: Any
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    check: Callable[..., None]
    providers: dict[str, Provider]
    preference: tuple[str, ...]
    cut: bool = False
    row_regime: Callable[[int], int] | None = None
    decompose: Callable[..., Any] | None = None
    short_body: Callable[..., Any] | None = None
    rows: tuple[str, ...] = ()
    _env: str = field(init=False)

    def __post_init__(self) -> None:
        self._env = f"SPARSE_PCG_{self.name.upper()}"

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, choose a provider for all of their rows and run it: what the dispatcher calls."""
        # Before rows are left out: what a graph of the whole bucket recorded is what runs on its valid rows.
        provider = self.providers[self._checked_choice(args, kwargs)]
        if self.rows:
            context = current_context()
            if context is not None and context.valid_rows_only and context.metadata is not None:
                args, kwargs = self._valid_rows(context.metadata.num_rows, args, kwargs)
        return provider.run(*args, **kwargs)

    def _checked_choice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        context = current_context()
        known = context.chosen if context is not None and self.cut and not kwargs and not debug_checks_on() else None
        if known is None:
            self.check(*args, **kwargs)
            return self.choose(*args, **kwargs)
        key = (self.name, *[a.shape for a in args if isinstance(a, torch.Tensor)])
        chosen = known.get(key)
        if chosen is None:
            self.check(*args)
            chosen = known[key] = self.choose(*args)
        return chosen

    def cut_body(self, *args: Any, **kwargs: Any) -> Any:
        """``body`` as a break between graphs runs it: what has rows, in it or in what it stands for, on valid ones."""
        context = current_context()
        if context is None or not (self.rows or self.decompose):
            return self.body(*args, **kwargs)
        before, context.valid_rows_only = context.valid_rows_only, True
        try:
            return self.body(*args, **kwargs)
        finally:
            context.valid_rows_only = before

    def _valid_rows(self, valid: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments narrowed to ``valid`` rows; the other rows of those that are written are filled."""
        narrowed: dict[str, Any] = {}
        for argument, value in zip(self.overload._schema.arguments, args, strict=False):
            narrowed[argument.name] = value
        narrowed.update(kwargs)
        for argument in self.overload._schema.arguments:
            value = narrowed.get(argument.name)
            if argument.name not in self.rows or value is None or value.shape[0] <= valid:
                continue
            if argument.alias_info is not None and argument.alias_info.is_write:
                value[valid:].fill_(0 if value.is_floating_point() else -1)
            narrowed[argument.name] = value[:valid]
        return tuple(narrowed.pop(a.name) for a in self.overload._schema.arguments[: len(args)]), narrowed

    def regime(self, sm_count: int) -> int:
        """The largest row regime of the op and of the providers that this machine has; 0 where there is none."""
        # Whether one is missing is asked only of those that declare any: it may take a compilation to know.
        declared = [p.row_regime for p in self.providers.values() if p.row_regime is not None and p.missing() is None]
        return max((rows(sm_count) for rows in (self.row_regime, *declared) if rows is not None), default=0)

    def choose(self, *args: Any, **kwargs: Any) -> str:
        """The name of the provider that serves these arguments: a forced one, else the first preferred that can.

        Raises RuntimeError when the forced provider (``use_provider`` or the environment) cannot serve them.
        """
        forced = forced_provider(self.name)
        if forced:
            why = self.refusal(forced, *args, **kwargs)
            if why is not None:
                raise RuntimeError(f"{self.name}: provider {forced!r} was asked for but cannot serve: {why}")
            return forced
        if not _on_cuda(args):
            return "reference"
        for name in self.preference:
            passed_over = self.refusal(name, *args, **kwargs) or self.providers[name].slower(*args, **kwargs)
            if passed_over is None:
                return name
        return "reference"

    def refusal(self, provider: str, *args: Any, **kwargs: Any) -> str | None:
        """Why ``provider`` does not serve these arguments on this machine; None if it does."""
        if provider not in self.providers:
            return f"no such provider, there are {sorted(self.providers)}"
        chosen = self.providers[provider]
        return chosen.missing() or chosen.supports(*args, **kwargs)


def forced_provider(op: str) -> str | None:
    """The provider that ``use_provider`` or the environment asks for, of the op called ``op``."""
    return (_forced.get() or {}).get(op) or os.environ.get(OPS[op]._env) or None


def _on_cuda(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    check: Callable[..., None] = _always,  # type: ignore[assignment]
    providers: dict[str, Provider] | None = None,
    preference: tuple[str, ...] = (),
    cut: bool = False,
    row_regime: Callable[[int], int] | None = None,
    decompose: Callable[..., Any] | None = None,
    short_body: Callable[..., Any] | None = None,
    rows: tuple[str, ...] = (),
) -> Op:
    """Register an operator.

    schema: without the namespace, e.g. ``"hadamard(Tensor x, float scale) -> Tensor"``.
    preference: provider names, best first, tried for CUDA arguments; the reference comes last by itself and serves
        CPU tensors unless ``use_provider`` or ``SPARSE_PCG_<OP>`` says otherwise.
    """
    name = schema.split("(", 1)[0]
    if name in OPS:
        raise ValueError(f"operator {name!r} is defined already")
    table = {"reference": Provider(reference), **(providers or {})}
    unknown = [p for p in preference if p not in table]
    if unknown:
        raise ValueError(f"{name}: preference names {unknown}, providers are {sorted(table)}")
    tags = (torch.Tag.cudagraph_unsafe,) if cut else ()
    _LIBRARY.define(schema, tags=tags)
    overload = getattr(torch.ops, NAMESPACE).__getattr__(name).default
    op = Op(
        name,
        schema,
        overload,
        reference,
        fake,
        check,
        table,
        preference,
        cut,
        row_regime,
        decompose,
        short_body,
        rows,
    )
    unknown = [r for r in rows if r not in {a.name for a in overload._schema.arguments}]
    if unknown:
        raise ValueError(f"{name}: rows names {unknown}, which are no arguments of it")
    _LIBRARY.impl(name, op.body, "CompositeExplicitAutograd")
    _LIBRARY._register_fake(name, fake)
    OPS[name] = op
    _BY_OVERLOAD[overload] = op
    return op


def providers_of(op: str, *args: Any) -> list[tuple[str, bool, str | None]]:
    """Who can serve the op called ``op``: (provider, usable, reason why not), in the order in which they are tried.

    args: the op's arguments in schema order; without any it is asked what runs on this machine at all. The reference
    comes after those that are preferred to it, and behind it those that are used only where forced. One that is usable
    with a reason is passed over because another is faster for these arguments.
    Raises ValueError for an unknown op.
    """
    if op not in OPS:
        raise ValueError(f"op: no operator {op!r}, there are {sorted(OPS)}")
    table = OPS[op].providers
    found = []
    for name in dict.fromkeys((*OPS[op].preference, "reference", *table)):
        why = OPS[op].refusal(name, *args) if args else table[name].missing()
        slower = table[name].slower(*args) if args and why is None else None
        found.append((name, why is None, why or slower))
    return found


def op_of(overload: Any) -> Op | None:
    """The Op behind an ``OpOverload``, or None for an operator that is not ours."""
    return _BY_OVERLOAD.get(overload)


@contextmanager
def use_provider(op: str, provider: str) -> Iterator[None]:
    """Force ``provider`` ("reference", "triton", ...) for the op called ``op`` inside the block."""
    if op not in OPS:
        raise ValueError(f"op: no operator {op!r}, there are {sorted(OPS)}")
    if provider not in OPS[op].providers:
        raise ValueError(f"provider: {op} has no provider {provider!r}, there are {sorted(OPS[op].providers)}")
    token = _forced.set({**(_forced.get() or {}), op: provider})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def debug_checks(on: bool = True) -> Iterator[None]:
    """Inside the block the ops also check values (slots inside the pool, lengths inside the page table).

    The checks read device memory from the host: never inside a capture.
    """
    token = _debug.set(on)
    try:
        yield
    finally:
        _debug.reset(token)


def debug_checks_on() -> bool:
    """True inside ``debug_checks()``."""
    return _debug.get()


def require(condition: bool, op: str, argument: str, expected: str, got: Any) -> None:
    """Raise ValueError naming op, argument, expected and given value unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{op}: {argument} must be {expected}, got {got}")
