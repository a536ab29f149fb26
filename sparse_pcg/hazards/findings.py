"""What ``check`` reports: the kinds of hazard, what each does to a captured graph, and what to do about it."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType

import torch

import custom_ops


@dataclass(frozen=True)
class Kind:
    """harm: what it does to a captured graph. fix: what to do."""

    harm: str
    fix: str


KINDS: dict[str, Kind] = {
    "host_read": Kind(
        "Python reads a value from the device: a capture fails there, and a recorded plan keeps the first value",
        "keep the value on the device (torch.where, masks, index_select), read it before the forward, or move the "
        "code that needs it into a cut op",
    ),
    "host_copy": Kind(
        "device data is copied to the host: a capture fails there",
        "keep the tensor on the device, or move the code that needs it on the host into a cut op",
    ),
    "data_dependent_shape": Kind(
        "the size of a result depends on the data: no graph can hold it, so it runs live between two graphs",
        "keep the shape and mask instead (torch.where, masked_fill, a sort with a count), or give a fixed size",
    ),
    "cpu_tensor": Kind(
        "a tensor made on the CPU inside the forward meets device tensors: it is computed once, at capture",
        "make it on the device (device=x.device), or once, as a buffer in __init__",
    ),
    "row_mixing": Kind(
        "rows mix: where a batch is padded to a bucket, pad rows reach the valid rows through this op",
        "reduce within each row, mask the pad rows out first, or make the op a cut that reads the valid row count",
    ),
    "rebound_tensor": Kind(
        "the forward puts another tensor where the graph reads one at a fixed address: replays go on with the old one",
        "write in place (copy_, index_copy_) into a buffer made once",
    ),
    "python_state": Kind(
        "the forward changes Python state: a replay runs no Python, so it changes once, at capture",
        "keep the state in a tensor that is written in place, or update it outside the forward or in a cut op",
    ),
    "python_read": Kind(
        "the trace depends on a Python value that belongs to the batch: another value is another graph, or is frozen",
        "pass it as a tensor, or read it inside a cut op, whose body runs anew at each replay",
    ),
    "size_read": Kind(
        "the code branches on the number of rows: one trace does not hold for all captured sizes, and what it sees is "
        "the bucket, not the batch",
        "write it for any number of rows, or branch outside the model",
    ),
    "random": Kind(
        "the op draws random numbers: a replay cannot be compared with the same rows uncaptured",
        "call eval(), or draw outside the model and pass the numbers",
    ),
    "autograd": Kind(
        "the forward relies on autograd, and graphs run without it",
        "write the derivative out, or leave this part of the model uncompiled",
    ),
    "nested_dtype_view": Kind(
        "a slice between two dtype views is written: the compiler copies the whole tensor at each call",
        "slice first and view once, or do the views inside a custom op",
    ),
    "mixed_dtype_alias": Kind(
        "two tensors of different dtypes share memory, and one is written: the compiler refuses such inputs",
        "keep one of them and make the other view inside the forward or inside a custom op",
    ),
    "graph_break": Kind(
        "Dynamo cannot trace this line, and fullgraph=True is an error there",
        "write it with tensor operations, wrap it in a custom op, or use sparse_pcg.record",
    ),
    "not_captured": Kind(
        "this part of the graph cannot be captured and runs live at each replay",
        "see the message; where it must be so, make it a cut op",
    ),
    "op_alias": Kind(
        "a custom op returns memory of an argument without saying so in its schema",
        "write into the argument and return nothing, or return a fresh tensor",
    ),
    "op_mutation": Kind(
        "a custom op writes an argument that its schema does not mark as written: the write may be dropped or moved",
        "mark the argument as Tensor(a!) in the schema, or name it in mutates_args",
    ),
    "op_fake": Kind(
        "a custom op's fake implementation does not describe what the op returns",
        "make shape, dtype and strides of the fake result those of the real one (torch.library.opcheck tells)",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One hazard. kind: a key of ``KINDS``. file, line: of the model. message: what happens. fix: what to do."""

    kind: str
    file: str
    line: int
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.message}\n    fix: {self.fix}"


class Findings:
    """Collects findings, one per kind and line."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, int], Finding] = {}

    def add(self, kind: str, where: tuple[str, int], what: str) -> None:
        """Note ``what`` (which op, which name) of ``kind`` at ``where``."""
        file, line = where
        message = f"{what}: {KINDS[kind].harm}" if what else KINDS[kind].harm
        self.found.setdefault((kind, file, line), Finding(kind, file, line, message, KINDS[kind].fix))

    def at(self, where: tuple[str, int]) -> bool:
        """Whether anything was found at this line."""
        return any(key[1:] == where for key in self.found)

    def listed(self) -> list[Finding]:
        """In the order of file and line."""
        return sorted(self.found.values(), key=lambda f: (f.file, f.line, f.kind))


_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_OPS = os.path.dirname(os.path.abspath(custom_ops.__file__))
_STDLIB = (os.path.dirname(os.path.abspath(contextlib.__file__)), sysconfig.get_paths()["stdlib"])


def is_model_code(file: str) -> bool:
    """Whether a file may hold the model: not PyTorch, the standard library, our operators, or this package."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    if "site-packages" in path or "dist-packages" in path:
        return not path.startswith((_TORCH, _HERE, _OPS))
    return not path.startswith((_TORCH, _HERE, _OPS, *_STDLIB))


def site(default: tuple[str, int]) -> tuple[str, int]:
    """File and line of the innermost frame that is the model's; ``default`` where the stack has none of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_model_code(file):
            return file, frame.f_lineno
        if frame.f_code.co_name == "run_model" and os.path.abspath(file).startswith(_HERE):
            return default  # beyond it is the caller of check()
        frame = frame.f_back
    return default
