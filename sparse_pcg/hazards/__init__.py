"""``check``: everything in a model that would break a capture or change its meaning, found without a GPU.

The model's real code runs on the CPU, on a copy of it, as if its tensors were on a GPU (``watch``); it runs again with
other values in the last rows to see whether rows mix (``rows``), twice over to see what it leaves changed (``state``),
and is traced once with Dynamo (``tracing``). Nothing goes by the names in the model's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from custom_ops.batch_metadata import ROW_BUFFERS, use_context

from ..batch import Batch, check_batch, fill
from ..memory import storage_ptr
from ..options import Options
from ..rewrite import cut_overloads
from .findings import KINDS, Finding, Findings
from .rows import Rows, find_mixing
from .state import Snapshot, blame, copied, tensors_of
from .tracing import trace
from .watch import Watch

__all__ = ["KINDS", "Finding", "check"]

LEAST_ROWS = 4


def check(
    module: Any,
    *args: Any,
    cut_ops: Iterable[str] = (),
    dynamic_dims: Mapping[str, int] | None = None,
    capture_sizes: Iterable[int] | None = None,
) -> list[Finding]:
    """Capture hazards of ``module(*args)``, each with the model's file and line and what to do; [] if there are none.

    module: a module or function, compiled or not; or a runner, which brings its own batch. It is copied, and must run
    on the CPU where there is no GPU. args: as for a call, at least 4 rows. cut_ops, dynamic_dims, capture_sizes: as
    for ``compile`` (dynamic_dims None: dim 0 of every tensor argument that has as many rows as the first).
    Raises ValueError naming the argument for one that cannot be checked, and what the model itself raises.
    """
    options = Options.of({"cut_ops": tuple(cut_ops), **({} if capture_sizes is None else _sizes(capture_sizes))})
    module = _unwrapped(module)
    with ExitStack() as stack:
        if hasattr(module, "kv") and hasattr(module, "metadata") and hasattr(module, "model"):
            if args:
                raise ValueError(f"args: a runner brings its own batch, got {len(args)} arguments")
            options = module.options
            module, args = _served(module, stack)
        if not callable(module):
            raise ValueError(f"module: must be a module, a function or a runner, got {type(module).__name__}")
        return _Checker(module, args, options, dynamic_dims).run()


def _sizes(sizes: Iterable[int]) -> dict[str, Any]:
    return {"capture_sizes": tuple(sizes)}


def _unwrapped(module: Any) -> Any:
    from ..backend import CompiledModule

    if isinstance(module, CompiledModule):
        module = module.module
    return getattr(module, "_orig_mod", module)


def _served(runner: Any, stack: ExitStack) -> tuple[Any, tuple[Any, ...]]:
    """A runner's model, and its arguments for one request in free pages, as ``verify`` makes them."""
    fitting = [s for s in runner.sizes if s >= LEAST_ROWS]
    if not fitting:
        raise ValueError(f"runner: none of its capture_sizes {runner.sizes} has {LEAST_ROWS} rows or more")
    rows = fitting[0] if fitting[0] >= 16 or len(fitting) == 1 else next((s for s in fitting if s >= 16), fitting[-1])
    request = stack.enter_context(runner.kv.request())
    request.extend(rows)
    vocab = int(runner.model.config.vocab_size)
    device = runner.device
    ids = (torch.arange(rows) * 7 + 3).remainder(vocab).to(device)
    batch = Batch(ids, [rows], [0], torch.tensor([request.pages], dtype=torch.int32, device=device))
    fill(runner.metadata, batch, check_batch(batch, runner.kv.num_pages, False), runner._staging)
    stack.enter_context(use_context(runner.kv.context(runner.metadata)))
    buffers = {n: getattr(runner.metadata, n) for n in ROW_BUFFERS} | runner.further_rows
    parameters = list(inspect.signature(runner.model.forward).parameters)
    names = [n for n in parameters if n in buffers]
    if parameters[: len(names)] != names:
        raise ValueError("runner: the row buffers must be the first parameters of the model's forward")
    return runner.model, tuple(buffers[n][:rows] for n in names)


class _Checker:
    def __init__(
        self, module: Any, args: tuple[Any, ...], options: Options, dynamic_dims: Mapping[str, int] | None
    ) -> None:
        self.module, self.args, self.options = module, args, options
        self.findings = Findings()
        self.cuts = cut_overloads(options.cut_ops)
        self.pretend = not any(t.is_cuda for t in tensors_of((module, args)))
        self.default = _where(module)
        self.dims = _token_dims(module, args, dynamic_dims)

    def run(self) -> list[Finding]:
        module, args = self._copy()
        with torch.random.fork_rng():
            self._watched(module, args, self._watch())
            self._state(module, args)
            if self.dims:
                number, dim = next(iter(self.dims.items()))
                self._rows(Rows(self.args[number].shape[dim]))
            module, args = self._copy(pretend=False)
            trace(module, args, self.dims, self.options.capture_sizes, self.cuts, self.findings, self.default)
        return self.findings.listed()

    def _copy(self, pretend: bool = True) -> tuple[Any, tuple[Any, ...]]:
        memo: dict[int, Any] = {}
        pretend = pretend and self.pretend
        return copied(self.module, memo, pretend), tuple(copied(a, memo, pretend) for a in self.args)

    def _watch(self, observer: Any = None, kinds: frozenset[str] | None = None) -> Watch:
        return Watch(self.findings, self.cuts, self.default, self.pretend, observer, kinds)

    def _watched(self, module: Any, args: tuple[Any, ...], watch: Watch) -> None:
        torch.manual_seed(0)
        with watch.active():
            run_model(module, args)
        dtypes: dict[int, set[torch.dtype]] = {}
        for tensor in tensors_of((module, args)):
            if pointer := storage_ptr(tensor):
                dtypes.setdefault(pointer, set()).add(tensor.dtype)
        for pointer, _ in watch.written:
            if len(dtypes.get(pointer, ())) > 1:
                named = " and ".join(sorted(map(str, dtypes[pointer])))
                self.findings.add("mixed_dtype_alias", self.default, f"tensors of {named}")

    def _quiet_run(self, module: Any, args: tuple[Any, ...]) -> Any:
        with self._watch(kinds=frozenset()).active():
            return run_model(module, args)

    def _state(self, module: Any, args: tuple[Any, ...]) -> None:
        """What a second run changes; the first may have set up what is made on demand."""
        snapshot = Snapshot(module)
        self._quiet_run(module, args)
        changes = snapshot.changes()
        if not changes:
            return
        places = blame(module, lambda: self._quiet_run(module, args), set(changes))
        for path, kind in changes.items():
            where = places.get(path, self.default)
            self.findings.add(kind, where if where[1] else self.default, f"self{path}" if path[0] == "." else path)

    def _rows(self, rows: Rows) -> None:
        def run(observer: Any, perturb: bool, state: set[int]) -> Any:
            module, args = self._copy()
            if perturb:
                args = tuple(rows.perturbed(a, self.dims[i]) if i in self.dims else a for i, a in enumerate(args))
            state |= {storage_ptr(t) for t in tensors_of((module, args))} - {0}
            torch.manual_seed(0)
            with self._watch(observer, frozenset()).active():
                return run_model(module, args)

        find_mixing(run, rows, self.findings, self.default)


def run_model(module: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the model; its frames are those above this one."""
    return module(*args)


def _where(module: Any) -> tuple[str, int]:
    """Where the model's forward is written."""
    code = getattr(module, "forward", module)
    try:
        return inspect.getsourcefile(code) or "unknown", inspect.getsourcelines(code)[1]
    except (TypeError, OSError):
        return "unknown", 0


def _token_dims(module: Any, args: tuple[Any, ...], declared: Mapping[str, int] | None) -> dict[int, int]:
    """Argument number -> its token dim."""
    names: list[str] = []
    if declared is not None:
        names = list(inspect.signature(getattr(module, "forward", module)).parameters)
        unknown = [n for n in declared if n not in names]
        if unknown:
            raise ValueError(f"dynamic_dims: no parameter {unknown[0]!r}, there are {names}")
    dims: dict[int, int] = {}
    rows = None
    for number, value in enumerate(args):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if declared is not None and (number >= len(names) or names[number] not in declared):
            continue
        dim = 0 if declared is None else declared[names[number]] % value.dim()
        rows = rows or value.shape[dim]
        if value.shape[dim] == rows:
            dims[number] = dim
    if rows is not None and rows < LEAST_ROWS:
        raise ValueError(f"args: must have at least {LEAST_ROWS} rows to tell valid rows from pads, got {rows}")
    return dims
