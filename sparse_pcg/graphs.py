"""Graph devices: how a piece is captured and replayed.

``CudaDevice`` records CUDA graphs. ``EmulatedDevice`` follows the same rules on a machine without a GPU: inputs and
outputs at fixed storages, Python values frozen at capture, outputs overwritten by the next replay.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

from .errors import CaptureError, OptionError
from .memory import Pool, StableOutputs, storage_ptr, view_like


class GraphDevice(Protocol):
    """Captures functions into graphs whose memory comes from a pool."""

    def new_pool(self) -> Pool: ...

    def session(self, pool: Pool) -> contextlib.AbstractContextManager[None]:
        """Around the captures of one bucket."""
        ...

    def capture(
        self, fn: Callable[..., Sequence[Any]], args: Sequence[Any], pool: Pool
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Capture ``fn(*args)``, with its effect taking place exactly once.

        Returns what replays it, and its outputs, at the addresses that each replay writes.
        """
        ...


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
        self, fn: Callable[..., Sequence[Any]], args: Sequence[Any], pool: Pool
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Run once and keep the outputs' addresses."""
        graph = EmulatedGraph(fn, args, pool)
        return graph.replay, graph.outputs.tensors


class CudaDevice:
    """CUDA graphs: one stream, one pool, capture calls without device-wide syncs."""

    _streams: ClassVar[dict[int, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())

    def new_pool(self) -> Pool:
        """A graph memory pool; the captured graphs of its owner keep it alive."""
        return Pool(self._device, torch.cuda.graph_pool_handle())

    @property
    def stream(self) -> torch.cuda.Stream:
        """The one stream that all captures on this device use: blocks of a pool belong to a stream."""
        index = self._device.index
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(self._device)
        return self._streams[index]

    @contextmanager
    def session(self, pool: Pool) -> Iterator[None]:
        """On the capture stream, with garbage collection off: destroying an old graph would break a capture."""
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                torch.cuda.current_blas_handle()  # made lazily, per stream; making it inside a capture would break that
                yield
        finally:
            current.wait_stream(self.stream)
            pool.held.clear()
            if was_enabled:
                gc.enable()

    def capture(
        self, fn: Callable[..., Sequence[Any]], args: Sequence[Any], pool: Pool
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Record ``fn(*args)`` and launch the recording once, since recording itself runs nothing."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            outputs = list(fn(*args))
        except BaseException as error:
            with contextlib.suppress(Exception):
                graph.capture_end()
            torch.cuda.synchronize(self._device)
            raise CaptureError(f"capture failed: {type(error).__name__}: {error}") from error
        graph.capture_end()
        graph.replay()
        # Later pieces of this bucket must not be given this memory, later buckets must: owning references live until
        # the session ends, what the plan keeps does not own.
        pool.held.extend(outputs)
        return graph.replay, _without_ownership(outputs, args)


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
            nbytes = out.untyped_storage().nbytes()
            storage = torch._C._construct_storage_from_data_pointer(pointer, out.device, nbytes)
            with torch.inference_mode(False):
                empty = torch.empty(0, dtype=torch.uint8, device=out.device)
                backing[pointer] = empty.set_(storage, 0, (nbytes,), (1,))
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
