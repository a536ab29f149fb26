"""What tracing the model shows: breaks, values that the trace depends on, and parts that no graph can hold."""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..analysis import analyse
from ..compiled_graph import _copy_graph, _fake_mode
from ..rewrite import rewrite
from ..split import LIVE, split
from .alone import Alone
from .findings import Findings, is_model_code
from .state import tensors_of

# What earlier calls were given must not show: with one value of a number, and one shape, per name that Dynamo has seen,
# it would make symbols of both, and a number that the trace depends on would go unseen.
_ALONE = {"automatic_dynamic_shapes": False, "specialize_int": True}
_VALUES = (int, float, bool, str)
_ARGUMENT = re.compile(r"^(L\['args'\]|args)\[")
_GLOBAL = re.compile(r"^G\['([^']+)'\]((?:\.\w+)+)$")
_PLACE = re.compile(r" \((\S.*?):(\d+) in ")  # the first: what follows is the model's text, which may have another
_USER_LINE = re.compile(r"#\s*(\S+):(\d+) in ")


def trace(
    module: Callable[..., Any],
    args: Sequence[Any],
    dims: dict[int, int],
    sizes: Sequence[int],
    cuts: frozenset[Any],
    findings: Findings,
    default: tuple[str, int],
) -> None:
    """Trace ``module(*args)`` with Dynamo and add what it shows. dims: argument number -> token dim."""
    for number, dim in dims.items():
        torch._dynamo.maybe_mark_dynamic(args[number], dim)
    rows = next((args[number].shape[dim] for number, dim in dims.items()), 0)
    tracer = _Tracer(rows, sizes, cuts, findings, default)
    try:
        bound = inspect.signature(getattr(module, "forward", module)).bind(*args).arguments
        numbers = {name: value for name, value in bound.items() if type(value) in (int, float)}
        tracer.numbers = numbers | {f"L[{name!r}]": value for name, value in numbers.items()}
        with torch.no_grad(), torch._dynamo.config.patch(_ALONE):
            compiled = torch.compile(
                _fresh(module), backend=tracer, fullgraph=True, options={"guard_filter_fn": tracer.guards}
            )
            compiled(*args)
    except Exception as error:
        tracer.broken(error)
        tracer.whole = False
        others = [s for t in tensors_of(module) for s in t.shape]
        tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        others += [size for i, a in tensors for d, size in enumerate(a.shape) if d != dims.get(i)]
        if rows in others:
            tracer.sizes = []  # every size is a symbol now, and equal sizes are one: which is meant cannot be told
        try:
            # Past the first break: each later one shows in the graph that ends there.
            with torch.no_grad(), torch._dynamo.config.patch(_ALONE):
                again = torch.compile(
                    _fresh(module), backend=tracer, dynamic=True, options={"guard_filter_fn": tracer.guards}
                )
                again(*args)
        except Exception as later:
            tracer.broken(later)


def _fresh(module: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code and globals of its own: what Dynamo keeps for it goes with it."""

    def run(*args: Any) -> Any:
        return module(*args)

    namespace = {"__builtins__": __builtins__}
    return types.FunctionType(run.__code__.replace(), namespace, "run", None, run.__closure__)


class _Tracer:
    """A torch.compile backend that looks at graphs and runs them as they are."""

    def __init__(
        self,
        rows: int,
        sizes: Sequence[int],
        cuts: frozenset[Any],
        findings: Findings,
        default: tuple[str, int],
    ) -> None:
        self.rows = rows
        self.sizes = [s for s in sizes if s >= 2]
        self.cuts, self.findings, self.default = cuts, findings, default
        self.whole = True
        self.numbers: dict[str, Any] = {}  # guards on numbers among the arguments, by the name in a resumed frame
        self._files: set[str] = set()

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self._add_break(reason.user_stack, str(reason.reason))
        self._files |= {f.filename for n in gm.graph.nodes for f in _frames(n)}
        self._sizes(gm)
        if self.whole:
            self._segments(gm)

        def run(*args: Any) -> Any:
            with Alone():
                return gm.forward(*args)

        return run

    def broken(self, error: BaseException) -> None:
        """An error that ended a trace."""
        stack = getattr(error, "real_stack", None) or getattr(error, "user_stack", None)
        text = str(getattr(error, "msg", "") or error)
        if stack:
            self._add_break(stack, text)
        elif not self.findings.found:
            self.findings.add("graph_break", self.default, _first_line(text))

    def _add_break(self, stack: Any, text: str) -> None:
        frames = [f for f in stack or () if is_model_code(f.filename)]
        where = (frames[-1].filename, frames[-1].lineno or 0) if frames else self.default
        if not self.findings.at(where):  # a read on the host is a break too: once is enough
            self.findings.add("graph_break", where, _first_line(text))

    # Sizes: a trace that does not hold for all captured sizes.

    def _sizes(self, gm: fx.GraphModule) -> None:
        symbols, env = _row_symbols(gm, self.rows)
        for guard in env.guards if env is not None else ():
            used = guard.expr.free_symbols & symbols
            if not used or guard.expr.free_symbols - symbols:
                continue
            fails = [s for s in self.sizes if guard.expr.subs(dict.fromkeys(used, s)) == False]  # noqa: E712
            if fails:
                self.findings.add("size_read", self._user_line(str(guard.sloc)), f"traced with {guard.expr}")

    def _user_line(self, text: str) -> tuple[str, int]:
        found = _USER_LINE.search(text)
        if found is None:
            return self.default
        tail, line = found.group(1), int(found.group(2))
        loaded = [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]
        names = [f for f in (self.default[0], *self._files, *loaded) if f.endswith(tail) and is_model_code(f)]
        return (names[0] if names else tail), line

    # Python values.

    def guards(self, entries: Sequence[Any]) -> list[bool]:
        """A ``guard_filter_fn``: keeps every guard, and looks for values that belong to the batch."""
        for entry in entries:
            if entry.guard_type not in ("CONSTANT_MATCH", "EQUALS_MATCH") or type(entry.value) not in _VALUES:
                continue
            named = str(entry.name)
            stack = entry.orig_guard.user_stack
            frames = [f for f in stack or () if is_model_code(f.filename)]
            where = (frames[-1].filename, frames[-1].lineno or 0) if frames else self.default
            if _ARGUMENT.match(named) or self.numbers.get(named, self) == entry.value:
                self.findings.add("python_read", where, f"the number {entry.value!r} of an argument")
            elif _is_state_of_an_object(named, where[0]):
                self.findings.add("python_read", where, f"{named.rsplit('.', 1)[1]} of a global object")
        return [True] * len(entries)

    # Parts that cannot be captured.

    def _segments(self, gm: fx.GraphModule) -> None:
        own = _copy_graph(gm)
        fake_mode = _fake_mode(gm)
        rewrite(own, fake_mode)
        for segment in split(own, analyse(own, fake_mode), self.cuts):
            if segment.kind != LIVE:
                continue
            place = _PLACE.search(segment.why)
            where = (place.group(1), int(place.group(2))) if place else self.default
            if not self.findings.at(where):
                self.findings.add("not_captured", where, segment.why[: place.start()] if place else segment.why)


def _is_state_of_an_object(named: str, file: str) -> bool:
    """Whether a value is an attribute of an instance (not of a module, a class, an enum, or anything frozen).

    named: how Dynamo names it, from the globals of the module in ``file``.
    """
    found = _GLOBAL.match(named)
    if found is None:
        return False
    first, path = found.group(1), found.group(2).split(".")[1:]
    if first.startswith("__import_"):
        home = sys.modules.get(first.removeprefix("__import_").replace("_dot_", "."))
        owner: Any = home
    else:
        home = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file), None)
        owner = getattr(home, first, None)
    for part in path[:-1]:
        owner = getattr(owner, part, None)
    if owner is None or callable(owner) or isinstance(owner, (types.ModuleType, type, enum.Enum, torch.nn.Module)):
        return False
    parameters: Any = getattr(type(owner), "__dataclass_params__", None)  # None: no dataclass
    frozen = parameters is not None and parameters.frozen
    return hasattr(owner, "__dict__") and not frozen


def _frames(node: fx.Node) -> list[Any]:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return [types.SimpleNamespace(filename=f, lineno=int(n)) for f, n in found]


def _row_symbols(gm: fx.GraphModule, rows: int) -> tuple[set[Any], Any]:
    """The symbols that count rows among the sizes of the graph's inputs, and the environment with their guards."""
    inputs = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = [v for v in inputs if isinstance(v, torch.Tensor) and getattr(v, "fake_mode", None) is not None]
    env = tensors[0].fake_mode.shape_env if tensors else None  # type: ignore[attr-defined]
    if env is None:
        return set(), None
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return {symbol for symbol, value in values.items() if int(value) == rows}, env


def _first_line(text: str) -> str:
    lines = [ln.strip() for ln in text.splitlines() if ln.strip()]
    return lines[0] if lines else "an error without a message"
