"""Graph devices: how a piece is captured and replayed.

``CudaDevice`` records CUDA graphs. ``EmulatedDevice`` follows the same rules on a machine without a GPU: inputs and
outputs at fixed storages, Python values frozen at capture, outputs overwritten by the next replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

from custom_ops._driver import driver

from .errors import CaptureError, OptionError, first_line
from .graph_launch import GraphLaunch
from .memory import Pool, StableOutputs, alias, storage_ptr, view_like


class GraphDevice(Protocol):
    """Captures functions into graphs whose memory comes from a pool."""

    def new_pool(self) -> Pool: ...

    def session(self, pool: Pool) -> contextlib.AbstractContextManager[None]:
        """Around the captures of one bucket."""
        ...

    def capture(
        self,
        fn: Callable[..., Sequence[Any]],
        args: Sequence[Any],
        pool: Pool,
        ready: Callable[[], None] | None = None,
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Capture ``fn(*args)``, with its effect taking place exactly once.

        ready: called between a capture that worked and its first launch; what it raises is raised, with no effect.
        Returns what replays it, and its outputs, at the addresses that each replay writes. Raises CaptureError, with
        no effect, where it cannot be captured.
        """
        ...

    def refused(self, fn: Callable[..., Any], args: Sequence[Any], pool: Pool) -> bool:
        """Whether a capture of ``fn(*args)`` fails, found out without any effect."""
        ...


_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class EmulatedGraph:
    """A captured call: runs again on the same arguments, its outputs go to the same addresses."""

    def __init__(self, fn: Callable[..., Sequence[Any]], args: Sequence[Any], pool: Pool) -> None:
        self._fn, self._args = fn, tuple(args)
        outputs = fn(*self._args)
        self.outputs = StableOutputs(outputs, self._args, pool)

    def replay(self) -> None:
        """Run the captured call."""
        self.outputs.copy_from(self._fn(*self._args))


class EmulatedDevice:
    """CUDA graph rules without CUDA."""

    def new_pool(self) -> Pool:
        """An empty pool of host memory."""
        return Pool(torch.device("cpu"))

    @contextmanager
    def session(self, pool: Pool) -> Iterator[None]:
        """Hand out the pool from its start: this bucket lies over the others."""
        pool.begin_bucket()
        yield

    def capture(
        self,
        fn: Callable[..., Sequence[Any]],
        args: Sequence[Any],
        pool: Pool,
        ready: Callable[[], None] | None = None,
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Run once and keep the outputs' addresses."""
        if ready is not None:
            ready()
        graph = EmulatedGraph(fn, args, pool)
        return graph.replay, graph.outputs.tensors

    def refused(self, fn: Callable[..., Any], args: Sequence[Any], pool: Pool) -> bool:
        """Never known: to find out would be to run it."""
        return False


class CudaDevice:
    """CUDA graphs: one stream, one pool, capture calls without device-wide syncs."""

    _streams: ClassVar[dict[int, torch.cuda.Stream]] = {}
    _capturing: ClassVar[threading.RLock] = threading.RLock()  # held by the thread that captures

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())

    def new_pool(self) -> Pool:
        """A graph memory pool. It would end with its last graph, between two buckets too: an empty one keeps it."""
        handle = torch.cuda.graph_pool_handle()
        with self._capturing, torch.cuda.stream(self.stream):
            owner = self.begin(handle)
            self.end(owner, empty=True)
        return Pool(self._device, handle, owner)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The one stream that all captures on this device use: blocks of a pool belong to a stream."""
        index = self._device.index
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(self._device)
        return self._streams[index]

    @contextmanager
    def session(self, pool: Pool) -> Iterator[None]:
        """On the capture stream, with garbage collection off: destroying an old graph would break a capture.

        One thread at a time: there is one capture stream, and what others launch on it would be captured.
        """
        with self._capturing:
            was_enabled = gc.isenabled()
            gc.collect()
            gc.disable()
            current = torch.cuda.current_stream(self._device)
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    torch.cuda.current_blas_handle()  # made lazily, per stream; in a capture that would break it
                    yield
            finally:
                current.wait_stream(self.stream)
                pool.held.clear()
                if was_enabled:
                    gc.enable()

    def begin(self, handle: Any) -> torch.cuda.CUDAGraph:
        """Start a capture on the current stream. What another thread allocates meanwhile does not break it.

        Raises CaptureError inside another capture.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("capture failed: this is inside another capture")
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph, empty: bool = False) -> GraphLaunch:
        """End the capture; returns what launches the graph on the current stream. ``empty``: it may hold nothing."""
        with warnings.catch_warnings():
            if empty:
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()
        return GraphLaunch(graph, self._device.index)

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Bring stream, allocators and random generator back to where they were before a capture that failed.

        ``capture_end`` does all that, but not where the driver has called the capture off: it raises first, and no
        capture could begin in this pool again. So it is given an empty capture to end.
        """
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        cuda = driver()
        left = ctypes.c_void_p()
        cuda.cuStreamEndCapture(stream, ctypes.byref(left))
        if left:
            cuda.cuGraphDestroy(left)
        cuda.cuStreamBeginCapture_v2(stream, _THREAD_LOCAL)
        with contextlib.suppress(RuntimeError):  # it had ended well, and what came after it failed
            self.end(graph, empty=True)
        with contextlib.suppress(RuntimeError):  # an error that is still pending is this capture's
            torch.cuda.synchronize(self._device)

    def capture(
        self,
        fn: Callable[..., Sequence[Any]],
        args: Sequence[Any],
        pool: Pool,
        ready: Callable[[], None] | None = None,
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Record ``fn(*args)`` and launch the recording once, since recording itself runs nothing.

        Raises CaptureError where it cannot be recorded; nothing has run then, and captures made before still work.
        """
        graph = None
        try:
            graph = self.begin(pool.handle)
            outputs = list(fn(*args))
            launch = self.end(graph)
        except Exception as error:
            if graph is not None:
                self.abandon(graph)
            raise CaptureError(f"capture failed: {type_and_message(error)}") from error
        except BaseException:
            if graph is not None:
                self.abandon(graph)
            raise
        if ready is not None:
            try:
                ready()
            except BaseException:
                outputs.clear()  # the traceback keeps this frame, but not the pool's memory
                graph.reset()
                raise
        launch()
        # Later pieces of this bucket must not be given this memory while a later step reads it, later buckets must be:
        # what the plan keeps does not own, the pool holds the outputs until the recording lets go of them.
        pool.hold(outputs)
        return launch, _without_ownership(outputs, args)

    def refused(self, fn: Callable[..., Any], args: Sequence[Any], pool: Pool) -> bool:
        """Whether a capture of ``fn(*args)`` fails. Nothing runs, nothing is kept."""
        graph = None
        try:
            graph = self.begin(pool.handle)
            fn(*args)
            self.end(graph, empty=True)
        except Exception:
            if graph is not None:
                self.abandon(graph)
            return True
        return False


def type_and_message(error: BaseException) -> str:
    """Without the rest: CUDA's errors go on with advice that does not hold for a capture."""
    return f"{type(error).__name__}: {first_line(error)}"


def _without_ownership(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Aliases of ``outputs`` that do not keep their memory; views of inputs stay as they are."""
    kept = {storage_ptr(t) for t in inputs if isinstance(t, torch.Tensor)} | {0}
    backing: dict[int, torch.Tensor] = {}
    result: list[Any] = []
    for out in outputs:
        if not isinstance(out, torch.Tensor) or (pointer := storage_ptr(out)) in kept:
            result.append(out)
            continue
        if pointer not in backing:
            backing[pointer] = alias(pointer, out.untyped_storage().nbytes(), out.device)
        result.append(view_like(backing[pointer], out, 0))
    return result


def device_for(mode: str, tensors: Sequence[Any]) -> GraphDevice | None:
    """The device that ``Options.graphs`` asks for, given the graph's inputs; None for "off"."""
    if mode == "off":
        return None
    cuda = next((t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda), None)
    if mode == "cuda" and cuda is None:
        raise OptionError("option 'graphs': got 'cuda', accepted where an input is on a CUDA device; none is")
    if cuda is not None and mode in ("auto", "cuda"):
        return CudaDevice(cuda)
    return EmulatedDevice()
