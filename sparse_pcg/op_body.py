"""What the dispatcher would call for an op, so that a plan can call it at each replay."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

_OF_PYTHON = re.compile(r"registered at .*\.py:\d+")
_AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def past_dispatcher(call: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """What ``call(*args, **kwargs)`` comes to for arguments of these devices, below autograd: ``call`` itself unless it
    is an op written in Python and the arguments are plain tensors on a CPU or a CUDA device.

    An op written in C++ is left to the dispatcher, which lets other threads run meanwhile. The op is the one that is
    registered now; autocast and version counters do not see the call, as they do not see what a graph holds.
    """
    kernel_of = getattr(torch.library, "get_kernel", None)
    if kernel_of is None or not isinstance(call, torch._ops.OpOverload):
        return call
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    kinds = {t.device.type for t in tensors}
    if not kinds or not kinds <= set(_AUTOCAST) or not all(_is_plain(t) for t in tensors):
        return call
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(call.name(), _AUTOCAST[kind]) for kind in kinds):
        return call
    key = torch._C.DispatchKey.CUDA if "cuda" in kinds else torch._C.DispatchKey.CPU
    kernel = kernel_of(call, key)
    if not _OF_PYTHON.search(repr(kernel)):
        return call
    return partial(kernel.call_boxed, torch._C.DispatchKeySet(key))


def _is_plain(tensor: torch.Tensor) -> bool:
    """No subclass, layout, lazy conjugation or the like, which the dispatcher would treat first."""
    with torch.inference_mode(False):  # a tensor made inside has fewer keys than any other
        plain = torch._C._dispatch_keys(torch.empty(0, device=tensor.device))
    return (torch._C._dispatch_keys(tensor) | plain) == plain
