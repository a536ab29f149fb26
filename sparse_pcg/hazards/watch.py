"""Run a model with its real code on the CPU, as if on a GPU, and watch what it asks of PyTorch.

Nothing needs a GPU: every tensor that exists before the run stands for a device tensor, and so does what is made from
one, or made with its device. ``tensor.device`` answers "cpu:0" for these, so that ``device=x.device`` can be told apart
from a tensor that the model makes on the CPU. Where the model really is on a GPU, devices are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from custom_ops._register import op_of

from ..memory import storage_ptr
from .alone import stand_in
from .findings import Findings, site
from .functions import Functions

_T = torch.Tensor
_ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_READS = frozenset(("host_read", "host_copy", "data_dependent_shape"))  # what a captured op's body must not do


class Observer(Protocol):
    """Sees what each op is given, and its result, and may put another in its place."""

    def given(self, func: Any, tensors: list[torch.Tensor]) -> None: ...

    def seen(self, func: Any, result: Any, written: list[torch.Tensor], cut: bool) -> Any: ...


class Watch:
    """What is known of the tensors of one run, and where findings go.

    cuts: overloads the graph is split at, beside the tagged ones. kinds: report these only (None: all).
    """

    def __init__(
        self,
        findings: Findings,
        cuts: frozenset[Any],
        default: tuple[str, int],
        pretend: bool,
        observer: Observer | None = None,
        kinds: frozenset[str] | None = None,
    ) -> None:
        self.findings, self.cuts, self.default, self.pretend = findings, cuts, default, pretend
        self.observer, self.kinds = observer, kinds
        self.made_on_cpu: Any = WeakIdKeyDictionary()  # tensor -> where it was made
        self.views: Any = WeakIdKeyDictionary()  # tensor -> the kinds of view that led to it
        self.written: set[tuple[int, torch.dtype]] = set()
        self.target: str | None = None  # where the Python function that now runs puts new tensors
        self.inside = False
        self.checks_on_cpu = False  # whether a function runs that reads its arguments on the CPU only, to check them

    def report(self, kind: str, what: str, where: tuple[str, int] | None = None) -> None:
        """Note a finding at ``where``, or at the model's line that now runs."""
        if self.kinds is None or kind in self.kinds:
            self.findings.add(kind, where or site(self.default), what)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor would be on the GPU."""
        return tensor not in self.made_on_cpu if self.pretend else tensor.is_cuda

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a tensor as one that lies on the host."""
        self.made_on_cpu[tensor] = site(self.default)
        return tensor

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch what runs in the block, without autograd."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(Functions(self))
            stack.enter_context(_Ops(self))
            sync = mock.patch.object(torch.cuda, "synchronize", self._synchronize)
            stack.enter_context(sync)
            yield

    def _synchronize(self, *args: Any, **kwargs: Any) -> None:
        self.report("host_read", "torch.cuda.synchronize()")

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside the block nothing is looked at."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    # Ops, as the dispatcher sees them.

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator."""
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, _T)]
        device = [t for t in tensors if self.on_device(t)]
        host = [t for t in tensors if not self.on_device(t) and t.dim() > 0]
        if device and host:
            for tensor in host:
                self.report("cpu_tensor", f"used by {func._schema.name}", self.made_on_cpu.get(tensor))
        name = func._schema.name
        target = self._target(kwargs, device, tensors)
        cut = func in self.cuts or torch.Tag.cudagraph_unsafe in func.tags
        generator = None
        if not cut and target == "device":
            self._look(func, args, device)
            if torch.Tag.nondeterministic_seeded in func.tags:
                generator = self._generator(kwargs, device)
        before = generator.get_state() if generator is not None else None
        written = _written(func, args, kwargs)
        self._note_writes(written, cut)
        if self.observer is not None:
            self.observer.given(func, tensors)
        if func.namespace in ("aten", "prims", "prim"):
            result = func(*args, **kwargs)
        elif (alone := stand_in(func)) is not None:
            with self.silenced():
                result = alone(*args, **kwargs)
        else:
            result = self._custom(func, args, kwargs, cut)
        if generator is not None and before is not None and not torch.equal(generator.get_state(), before):
            self.report("random", name)  # attention without dropout has the tag too, and draws nothing
        if name.removeprefix("aten::") in _ALLOCATIONS:
            result.zero_()  # the same garbage in every run
        if self.observer is not None:
            result = self.observer.seen(func, result, written, cut)
        self._note_views(func, args, result)
        if name == "aten::lift_fresh" and isinstance(result, _T):
            self.to_host(result)  # a number or a list that Python brought
        elif target != "device" and self.pretend:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, _T) and not any(leaf is t for t in tensors):
                    self.to_host(leaf)
        return result

    def _target(self, kwargs: Any, device: list[Any], tensors: list[Any]) -> str:
        given = kwargs.get("device")
        if not self.pretend:
            return "device" if device or (given is not None and given.type == "cuda") else "host"
        if device:
            return "device"
        return self.target or "host" if not tensors else "host"

    def _look(self, func: Any, args: Any, device: list[torch.Tensor]) -> None:
        name = func._schema.name
        if (torch.Tag.data_dependent_output in func.tags or name == "aten::item") and device:
            if not self.checks_on_cpu:
                self.report("host_read", _READ_AS.get(name, name))
        elif torch.Tag.dynamic_output_shape in func.tags and device and _size_is_unknown(func, args):
            self.report("data_dependent_shape", "indexing by a mask" if name == "aten::index" else name)
        elif name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_") and self._masked_store(args):
            self.report("data_dependent_shape", "a store by a mask of more than one number")

    def _generator(self, kwargs: Any, device: list[torch.Tensor]) -> torch.Generator:
        """What an op that may draw random numbers would draw them from."""
        if kwargs.get("generator") is not None:
            return kwargs["generator"]
        if self.pretend:
            return torch.default_generator
        index = device[0].device.index if device else torch.cuda.current_device()
        return torch.cuda.default_generators[index]

    def _masked_store(self, args: Any) -> bool:
        masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        one_number = args[2].numel() == 1 and not self.on_device(args[2])
        return masks and not one_number

    def _note_writes(self, written: list[torch.Tensor], cut: bool) -> None:
        for tensor in written:
            self.written.add((storage_ptr(tensor), tensor.dtype))
            chain = self.views.get(tensor, ())
            if not cut and _slice_between_dtypes(chain):
                self.report("nested_dtype_view", "written through view(dtype), a slice, view(dtype)")

    def _note_views(self, func: Any, args: Any, result: Any) -> None:
        if not func.is_view or not args or not isinstance(args[0], _T):
            return
        name = func._schema.name
        kind = "dtype" if name == "aten::view" and func._overloadname == "dtype" else "view"
        kind = "slice" if name in ("aten::slice", "aten::select", "aten::narrow", "aten::split") else kind
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, _T):
                self.views[leaf] = (*self.views.get(args[0], ()), kind)

    # Operators that are not PyTorch's.

    def _custom(self, func: Any, args: Any, kwargs: Any, cut: bool) -> Any:
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, _T)]
        unwritten = [t for t in leaves if not any(t is w for w in _written(func, args, kwargs))]
        if op_of(func) is not None or self.kinds is not None or self.observer is not None:
            with self.silenced():
                return func(*args, **kwargs)
        before = [t.clone() for t in unwritten]
        faked = self._fake(func, args, kwargs)
        body = None if cut else _only_body(func)
        if body is None:
            with self.silenced():
                result = func(*args, **kwargs)
        else:
            inner = Watch(self.findings, self.cuts, site(self.default), self.pretend, kinds=_READS)
            with self.silenced(), inner.active():
                result = body(*args, **kwargs)
        name = func._schema.name
        for tensor, old in zip(unwritten, before, strict=True):
            if not torch.equal(_bytes(tensor), _bytes(old)):
                self.report("op_mutation", name)
        given = {storage_ptr(t) for t in leaves} - {0}
        returns = func._schema.returns
        outs = [r for r in pytree.tree_leaves(result) if isinstance(r, _T)]
        if any(storage_ptr(o) in given for o in outs) and all(r.alias_info is None for r in returns):
            self.report("op_alias", name)
        if faked is not None:
            self._compare(name, faked, outs)
        return result

    def _fake(self, func: Any, args: Any, kwargs: Any) -> list[Any] | None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with mode:
                fake = pytree.tree_map_only(_T, mode.from_tensor, (args, kwargs))
                return [r for r in pytree.tree_leaves(func(*fake[0], **fake[1])) if isinstance(r, _T)]
        except (torch._subclasses.fake_tensor.DynamicOutputShapeException, AssertionError):
            return None
        except Exception as error:
            self.report("op_fake", f"{func._schema.name} ({str(error).splitlines()[0] if str(error) else error!r})")
            return None

    def _compare(self, name: str, fake: list[Any], real: list[Any]) -> None:
        def described(tensors: list[Any]) -> list[str]:
            return [f"{t.dtype} {list(t.shape)} strides {_strides(t)}" for t in tensors]

        if described(fake) != described(real):
            says, is_ = ", ".join(described(fake)) or "nothing", ", ".join(described(real)) or "nothing"
            self.report("op_fake", f"{name} (fake: {says}; real: {is_})")


_READ_AS = dict.fromkeys(("aten::_local_scalar_dense", "aten::item"), "item(), int(), bool() or an if on a tensor")


def _strides(tensor: torch.Tensor) -> list[int]:
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    marked = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in marked for t in pytree.tree_leaves(named.get(name)) if isinstance(t, _T)]


def _size_is_unknown(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return True


def _slice_between_dtypes(chain: tuple[str, ...]) -> bool:
    kinds = [k for k in chain if k != "view"]
    return any(
        kinds[i] == "dtype" and "slice" in kinds[i:j] and kinds[j] == "dtype"
        for i in range(len(kinds))
        for j in range(i + 1, len(kinds))
    )


def _only_body(func: Any) -> Callable[..., Any] | None:
    """The one kernel that serves every device, so that what it does here it does on the GPU; else None."""
    name = func.name()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, "CPU") or has(name, "CUDA") or not has(name, "CompositeExplicitAutograd"):
        return None
    kernel = torch.library.get_kernel(name, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # type: ignore[attr-defined]
    return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)


class _Ops(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watch.inside:
            return func(*args, **(kwargs or {}))
        return self.watch.op(func, args, kwargs or {})
