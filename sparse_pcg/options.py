"""Options of the backend, as one frozen dataclass. A bad name or value is an error at the first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .buckets import default_schedule
from .errors import OptionError

COMPILERS = ("inductor", "eager")
GRAPHS = ("auto", "cuda", "emulate", "off")


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., backend="sparse_pcg", options={...})`` accepts.

    capture_sizes: token counts that graphs are captured for; positive ints, kept sorted and unique.
    compiler: "inductor", or "eager" to run the pieces as PyTorch runs them (for debugging).
    cut_ops: further ops to split at, beside those tagged ``cudagraph_unsafe``; "ns::op", "ns.op" or "ns.op.default".
    graphs: "cuda", "emulate" (the rules of CUDA graphs without a GPU), "off", or "auto": by the device of the inputs.
    short_graphs: the runner also captures one graph without cuts, for batches where every row selects all it sees.
    static_outputs: a plain call returns the graph's own output buffers, valid until the next call, not copies.
    strict: after ``freeze()``, raise instead of leaving the captured graphs.
    debug_checks: compare addresses on each call of the runner, check values in ops, poison buffers before replay.
    workspace_bytes: bound on the indexer logits that exist at one time.
    """

    capture_sizes: tuple[int, ...] = default_schedule(2048)
    compiler: str = "inductor"
    cut_ops: tuple[str, ...] = ()
    graphs: str = "auto"
    short_graphs: bool = True
    static_outputs: bool = False
    strict: bool = False
    debug_checks: bool = False
    workspace_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        sizes = self.capture_sizes
        if (
            isinstance(sizes, (str, bytes))
            or not hasattr(sizes, "__iter__")
            or not (listed := list(sizes))
            or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in listed)
        ):
            _refuse("capture_sizes", sizes, "a non-empty sequence of positive ints")
        object.__setattr__(self, "capture_sizes", tuple(sorted(set(listed))))
        if self.compiler not in COMPILERS:
            _refuse("compiler", self.compiler, " or ".join(map(repr, COMPILERS)))
        if self.graphs not in GRAPHS:
            _refuse("graphs", self.graphs, ", ".join(map(repr, GRAPHS)))
        names = self.cut_ops
        if (
            isinstance(names, (str, bytes))
            or not hasattr(names, "__iter__")
            or not all(isinstance(n, str) for n in names)
        ):
            _refuse("cut_ops", self.cut_ops, "a sequence of op names such as 'ns::op'")
        object.__setattr__(self, "cut_ops", tuple(self.cut_ops))
        for name in ("short_graphs", "static_outputs", "strict", "debug_checks"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        if (
            not isinstance(self.workspace_bytes, int)
            or isinstance(self.workspace_bytes, bool)
            or self.workspace_bytes <= 0
        ):
            _refuse("workspace_bytes", self.workspace_bytes, "a positive int (bytes)")

    @classmethod
    def of(cls, given: Mapping[str, Any] | Options | None) -> Options:
        """Options from a mapping. Raises OptionError (a ValueError) naming option, value and what is accepted."""
        if isinstance(given, Options):
            return given
        named: dict[str, Any] = dict(given or {})
        known = [f.name for f in dataclasses.fields(cls)]
        for name, value in named.items():
            if name not in known:
                raise OptionError(f"unknown option {name!r} (given {value!r}); accepted options: {', '.join(known)}")
        return cls(**named)

    def to_dict(self) -> dict[str, Any]:
        """As ``torch.compile(options=...)`` takes them."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def _refuse(name: str, value: Any, accepted: str) -> None:
    raise OptionError(f"option {name!r}: got {value!r}, accepted: {accepted}")
