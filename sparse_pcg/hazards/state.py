"""A copy of the model to run, and what a run did to the Python side of it: rebound tensors, changed values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from .findings import is_model_code

_DEPTH = 5  # of objects inside objects that are looked into
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def copied(value: Any, memo: dict[int, Any], pretend: bool) -> Any:
    """A copy that a run may change, aliases kept: modules, containers and tensors are copied.

    Any other object is copied if it can be and shared if not (a process group, a lock). With ``pretend``, an attribute
    that names the CPU becomes the device that stands for the GPU (see ``watch``).
    """
    if id(value) in memo:
        return memo[id(value)]
    result: Any
    if isinstance(value, torch.nn.Module):
        result = value.__class__.__new__(value.__class__)
        memo[id(value)] = result
        result.__dict__.update({k: copied(v, memo, pretend) for k, v in value.__dict__.items()})
        return result
    if isinstance(value, torch.Tensor):
        memo[id(value)] = result = copy.deepcopy(value.detach() if value.grad_fn is not None else value, memo)
        return result
    if type(value) in (list, tuple):
        memo[id(value)] = result = type(value)(copied(v, memo, pretend) for v in value)
        return result
    if type(value) is dict:
        memo[id(value)] = result = {k: copied(v, memo, pretend) for k, v in value.items()}
        return result
    if isinstance(value, torch.device):
        return torch.device("cpu", 0) if pretend and value.type == "cpu" else value
    if isinstance(value, (ModuleType, type)):
        return value
    try:
        result = copy.deepcopy(value, memo)
    except Exception:
        result = value
    memo[id(value)] = result
    return result


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor that is found in a module, a container or an object."""
    return [v for _, v in walk(value) if isinstance(v, torch.Tensor)]


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of tensors, plain values and lengths of containers below ``value``."""
    yield from _walk(value, "", _DEPTH, set())


def _walk(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield path, value
        return
    if id(value) in seen or isinstance(value, (ModuleType, type)) or (callable(value) and not _holds(value)):
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        for name, child in value.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                for key, item in child.items():
                    yield from _walk(item, f"{path}.{key}", depth, seen)
            elif not name.startswith(("_forward", "_backward", "_state_dict", "_load_state", "_non_persistent")):
                yield from _walk(child, f"{path}.{name}", depth, seen)
        return
    if isinstance(value, (list, tuple, set, dict)):
        yield f"len({path})", len(value)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _walk(item, f"{path}[{key!r}]", depth - 1, seen) if depth else ()
        return
    if depth and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield from _walk(item, f"{path}.{name}", depth - 1, seen)


def _holds(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or not hasattr(value, "__code__")


class Snapshot:
    """What a module held before a run."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._before = dict(_identity(module))
        self._held = list(walk(module))  # alive, so that an address is not given to another tensor

    def changes(self) -> dict[str, str]:
        """Path -> "rebound_tensor" or "python_state", of what is not as it was."""
        now = dict(_identity(self.module))
        found = {}
        for path, after in now.items():
            before = self._before.get(path)
            if before != after:
                tensor = "tensor" in (after[0], before[0] if before else "")
                found[path] = "rebound_tensor" if tensor and before is not None else "python_state"
        for path in self._before.keys() - now.keys():
            found[path] = "python_state"
        return found


def _identity(module: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for path, value in walk(module):
        if isinstance(value, torch.Tensor):
            yield path, ("tensor", id(value), value.untyped_storage()._cdata, value.storage_offset())
        else:
            yield path, ("value", value if value == value else "nan")


def blame(module: Any, run: Callable[[], Any], paths: set[str]) -> dict[str, tuple[str, int]]:
    """Run, and give per path of ``paths`` the model's line after which it was first changed."""
    snapshot = Snapshot(module)
    found: dict[str, tuple[str, int]] = {}
    last: list[tuple[str, int]] = [("", 0)]

    def look() -> None:
        if paths - found.keys():
            for path in snapshot.changes().keys() & paths:
                found.setdefault(path, last[0])

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if event == "call":
            return trace if is_model_code(file) else None
        look()
        if event == "line":
            last[0] = file, frame.f_lineno
        elif event == "return":  # what is left of the caller's line runs without a new line event
            caller = frame.f_back
            while caller is not None and not is_model_code(caller.f_code.co_filename):
                caller = caller.f_back
            if caller is not None:
                last[0] = caller.f_code.co_filename, caller.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    look()
    return found
