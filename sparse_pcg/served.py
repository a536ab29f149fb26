"""What the runners of target and draft give and take: the KV pools they need, what a capture and a forward leave."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from custom_ops._register import NAMESPACE, op_of
from custom_ops.batch_metadata import BatchMetadata, ForwardContext

from .compiled_graph import CompiledGraph
from .plan import Plan
from .rewrite import overload_of
from .split import PIECE

EMULATED_SMS = 132  # what a device without SMs is taken for: the row regimes of an H200


class KV(Protocol):
    """What a runner needs of the KV pools."""

    @property
    def num_pages(self) -> int: ...

    def request(self) -> Any: ...

    def context(self, metadata: BatchMetadata | None, workspace_bytes: int = ...) -> ForwardContext: ...


@dataclass
class Bucket:
    """What serves one number of rows. results: which outputs of the graph the model returns, in its order."""

    graph: CompiledGraph
    inputs: list[Any]
    results: list[int]
    plans: dict[str, Plan]


@dataclass(frozen=True)
class Captured:
    """One captured bucket: seconds it took and bytes by which the pool grew."""

    bucket: int
    variants: tuple[str, ...]
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Served:
    """What a forward left: the model's results, of all rows that ran, and the graph that was replayed if any.

    last_rows: int64, the row of each request's last token (more entries than requests).
    """

    results: list[torch.Tensor]
    last_rows: torch.Tensor
    bucket: int | None
    variant: str | None


def row_regimes(graph: CompiledGraph, device: torch.device) -> dict[str, int]:
    """The row regimes of the ops inside the pieces of ``graph``, by name; without those that have none."""
    sms = EMULATED_SMS
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[str, int] = {}
    for segment in graph.segments:
        for node in segment.nodes if segment.kind == PIECE else ():
            op = op_of(overload_of(node))
            if op is not None and (regime := op.regime(sms)):
                found[f"{NAMESPACE}::{op.name}"] = regime
    return found


def row_parameters(model: torch.nn.Module, names: Sequence[str]) -> list[str]:
    """Which of the row buffers ``names`` the model's forward takes; ValueError for a required parameter of none."""
    rows = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name in names:
            rows.append(name)
        elif parameter.default is inspect.Parameter.empty:
            raise ValueError(f"model.forward: no row buffer for required parameter {name!r}, there are {names}")
    return rows


def listed(results: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a model returned, as a list."""
    return [results] if isinstance(results, torch.Tensor) else list(results)


def tracked(sizes: list[int], progress: bool) -> Any:
    """``sizes``, with a progress bar if wanted."""
    if not progress or not sizes:
        return sizes
    from rich.progress import track

    return track(sizes, description="capturing", transient=True)


@contextmanager
def no_grad() -> Iterator[None]:
    """One grad mode for compiling, capturing and serving: Dynamo makes a graph per mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
