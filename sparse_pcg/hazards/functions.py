"""The Python side of a watched run: where tensors are made and moved, and reads that the dispatcher never sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from .watch import Watch

DEVICE = torch.device("cpu", 0)  # stands for the GPU
_CPU = torch.device("cpu")
_T = torch.Tensor
_DEVICE_OF = _T.device.__get__  # type: ignore[attr-defined]
# What hands data to Python without passing the dispatcher, where the data is on the CPU.
_SILENT_READS = {
    _T.tolist: "tolist()",
    _T.numpy: "numpy()",
    _T.__array__: "a numpy conversion",
    _T.__repr__: "printing a tensor",
}
# What reads values on the CPU to check its arguments, and on a GPU leaves that to its kernels.
_CHECKED_ON_CPU = (torch.quantile, torch.nanquantile, _T.quantile, _T.nanquantile)
_MOVES = (_T.to, _T.cpu, _T.cuda)


class Functions(TorchFunctionMode):
    """Tells ``watch`` of functions of tensors, and answers for the device that CPU tensors stand for."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = dict(kwargs or {}), self.watch
        if watch.inside:
            return func(*args, **kwargs)
        if func is torch._C._set_grad_enabled and args and args[0]:
            watch.report("autograd", "autograd is switched on")
            return None
        if func is _T.backward:
            watch.report("autograd", "backward()")
            return None
        first = args[0] if args and isinstance(args[0], _T) else None
        on_device = first is not None and watch.on_device(first)
        if func is _T.data_ptr and on_device:
            watch.report("python_read", "data_ptr()")
        if func in _SILENT_READS and on_device:
            watch.report("host_read", _SILENT_READS[func])
            return self._logged(func, func(*args, **kwargs))
        if not watch.pretend:
            if func in (_T.to, _T.cpu) and on_device and not (result := func(*args, **kwargs)).is_cuda:
                watch.report("host_copy", f"{func.__name__}()")
                return result
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            return DEVICE if on_device else func(*args)
        args, kwargs, target = _plain_devices(func, args, kwargs, watch)
        if func in _MOVES and first is not None:
            target = {_T.cpu: "host", _T.cuda: "device"}.get(func, target)
            if target is not None and (target == "device") != on_device:
                return self._moved(first, func, args, kwargs, target)
            if func is _T.cuda:
                return first
        before = watch.target
        if target is None and any(isinstance(a, _T) and watch.on_device(a) for a in pytree.tree_leaves(args)):
            target = "device"
        watch.target = target or before
        checks, watch.checks_on_cpu = watch.checks_on_cpu, watch.checks_on_cpu or _checks_on_cpu(func, args, kwargs)
        try:
            if target == "device" and func in (torch.tensor, torch.as_tensor, _T.new_tensor):
                watch.report("cpu_tensor", f"{func.__name__}() brings Python values to the device")
                with watch.silenced():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        finally:
            watch.target, watch.checks_on_cpu = before, checks

    def _moved(self, tensor: torch.Tensor, func: Any, args: Any, kwargs: Any, target: str) -> torch.Tensor:
        """A copy between host and device."""
        watch = self.watch
        if target == "device":
            watch.report("cpu_tensor", f"{func.__name__}() copies it to the device", watch.made_on_cpu.get(tensor))
        else:
            watch.report("host_copy", f"{func.__name__}()")
        with watch.silenced():
            moved = func(*args, **kwargs) if func is _T.to else tensor
            moved = moved.clone()
        if target == "host":
            moved = self._logged(func, moved)
            watch.to_host(moved)
        return moved

    def _logged(self, func: Any, result: Any) -> Any:
        observer = self.watch.observer
        if observer is None:
            return result
        with self.watch.silenced():
            return observer.seen(func, result, [], True)


def _checks_on_cpu(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.nn.functional.one_hot:  # without a number of classes it reads the largest id, on a GPU too
        return int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1)) >= 0
    return func in _CHECKED_ON_CPU


def _plain_devices(func: Any, args: Any, kwargs: Any, watch: Watch) -> tuple[Any, Any, str | None]:
    """Arguments with every device replaced by the CPU, and whether it stood for the device or the host."""
    target: list[str] = []

    def plain(value: Any, named: bool) -> Any:
        if isinstance(value, str) and (named or func is _T.to) and value.split(":")[0] in ("cpu", "cuda"):
            value = torch.device(value)
        if isinstance(value, torch.device):
            target.append("device" if value.type == "cuda" or value == DEVICE else "host")
            return _CPU
        return value

    if func is _T.to and len(args) > 1 and isinstance(args[1], _T):
        target.append("device" if watch.on_device(args[1]) else "host")
    args = tuple(plain(a, False) for a in args)
    kwargs = {k: plain(v, k == "device") for k, v in kwargs.items()}
    return args, kwargs, target[0] if target else None
