"""Launches of captured graphs, past PyTorch's own replay where a launch is all that does.

``CUDAGraph.replay`` guards the device, asks whether the stream captures and visits random generators at every launch. A
plan finds such things out once a replay, and launches by address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from custom_ops._driver import again, driver

from .errors import note


class GraphLaunch:
    """A captured graph on a device; called, it launches through PyTorch on the current stream.

    address: of the driver's executable graph, which lives as long as this object; 0 where PyTorch has to launch it.
    settled: whether that is known. The first launch tells: random numbers inside a graph make PyTorch move their
    generator, and write its place to memory, before each launch.
    """

    def __init__(self, graph: Any, device: int) -> None:
        self._graph, self.device = graph, device
        self.address = 0
        self.settled = not hasattr(graph, "raw_cuda_graph_exec")

    def __call__(self) -> None:
        if self.settled:
            self._graph.replay()
            return
        generator = torch.cuda.default_generators[self.device]
        before = generator.get_offset()
        with _Calls() as calls:
            self._graph.replay()
        self.settled = True
        if not calls.seen and generator.get_offset() == before:
            self.address = self._graph.raw_cuda_graph_exec()


class _Calls(TorchDispatchMode):
    """Whether any op is called inside."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = True
        return func(*args, **(kwargs or {}))


class Flat:
    """The steps of a plan as a replay runs them: graphs by address, each with the call that comes after it.

    steps: kept, and with them the graphs. settled: whether it stays as it is after the steps have run.
    """

    def __init__(self, steps: list[Callable[[], Any]], labels: list[str]) -> None:
        self.steps, self._labels = steps, labels
        graphs = [s for s in steps if isinstance(s, GraphLaunch)]
        self.settled = all(g.settled for g in graphs)
        self._device = next((g.device for g in graphs if g.address), None)
        self._launch: Callable[[int, int], int] = _no_driver if self._device is None else driver().cuGraphLaunch
        self._rows: list[tuple[int, Callable[[], Any]]] = []
        self._places: list[int] = []  # per row, its last step
        for place, step in enumerate(steps):
            address = step.address if isinstance(step, GraphLaunch) and step.device == self._device else 0
            if address or not self._rows or self._rows[-1][1] is not _nothing:
                self._rows.append((address, _nothing if address else step))
                self._places.append(place)
            else:
                self._rows[-1], self._places[-1] = (self._rows[-1][0], step), place

    def run(self) -> None:
        """All steps, in order; graphs on the stream that is current on their device. An error names its step."""
        device, stream = self._device, 0
        rows, places = self._rows, self._places
        if device is not None:
            if torch._C._cuda_getDevice() != device:
                with torch.cuda.device(device):
                    return self.run()
            if torch._C._cuda_isCurrentStreamCapturing() or torch.autograd._profiler_enabled():
                # PyTorch refuses to launch inside a capture, and its profiler sees the launches that it makes; of ops
                # called past the dispatcher it would not know the names.
                rows = [(0, partial(_named, *pair)) for pair in zip(self._labels, self.steps, strict=False)]
                places = list(range(len(rows)))
            stream = torch._C._cuda_getCurrentRawStream(device)
        launch, call, code = self._launch, _nothing, 0
        left = iter(rows)
        try:
            for address, call in left:
                if address and (code := launch(address, stream)):
                    assert device is not None  # what has an address has a device
                    again(code, device, partial(launch, address, stream))
                    code = 0
                call()
        except Exception as error:
            place = places[len(rows) - length_hint(left) - 1]
            before = bool(code) and call is not _nothing  # the graph, and not the call after it
            note(error, f"while replaying {self._labels[place - before]}")
            raise


def _named(label: str, step: Callable[[], Any]) -> None:
    with torch.profiler.record_function(label):
        step()


def _nothing() -> None:
    """Stands where a graph comes right after a graph."""


def _no_driver(address: int, stream: int) -> int:
    raise AssertionError("no step of this plan is launched by address")
