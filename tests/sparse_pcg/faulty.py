"""A model with a fault in each marked line, and the operators it calls; the marks name what ``check`` must find."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LIBRARY = torch.library.Library("faulty", "FRAGMENT")


def _define(schema: str, body: Any, fake: Any, tags: tuple[Any, ...] = ()) -> None:
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    LIBRARY._register_fake(name, fake)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().max().item()  # fault: host_read
    return x * (largest == largest)


def _count(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x * 1


def _reverse(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(0) * float(x.sum() != 0))  # a cut may mix rows and read on the host


_define("reverse(Tensor x, Tensor(a!) out) -> ()", _reverse, lambda x, out: None, (torch.Tag.cudagraph_unsafe,))
_define("normalise(Tensor x) -> Tensor", _normalise, torch.empty_like)
_define("same(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
_define("count(Tensor x, Tensor counter) -> Tensor", _count, lambda x, counter: torch.empty_like(x))
_define("widen(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)


class Serving:
    """What an engine keeps for the batch that it serves."""

    def __init__(self) -> None:
        self.kv_len = 3


SERVING = Serving()


class Faulty(nn.Module):
    """Call with x [T, 8], ids int64 [T], and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(8))
        self.register_buffer("pool", torch.zeros(64, dtype=torch.uint8))
        self.register_buffer("counter", torch.zeros(1))
        self.drop = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scale: int) -> torch.Tensor:
        y = self.lin(x)
        out = torch.empty_like(y)
        torch.ops.faulty.reverse(y, out)
        y = y + out
        if y.sum().item() > 1e9:  # fault: host_read
            y = y + 1
        y = y + int(ids[0])  # fault: host_read
        y = y + ids.tolist()[0]  # fault: host_read
        y = y + y.cpu()[0].to(y.device)  # fault: host_copy  # fault: cpu_tensor
        y = y + (y > 0).nonzero().shape[0]  # fault: data_dependent_shape
        y[y > 100] = y[y > 100] * 2  # fault: data_dependent_shape
        places = torch.arange(x.shape[0])  # fault: cpu_tensor
        y = y + places.to(y.device)[:, None]
        y = y * torch.tensor([1.0] * 8, device=y.device)  # fault: cpu_tensor
        y = y - y.mean(0)  # fault: row_mixing
        y = y + y.roll(1, 0)  # fault: row_mixing
        self.state = y[0] * 0.5  # fault: rebound_tensor
        self.calls += 1  # fault: python_state
        y = y * SERVING.kv_len  # fault: python_read
        y = y * scale  # fault: python_read
        if x.shape[0] > 16:  # fault: size_read
            y = y + 1
        y = self.drop(y)  # fault: random
        with torch.enable_grad():  # fault: autograd
            y = y * 1
        self.pool.view(torch.int32)[2:10].view(torch.float32).copy_(y[0])  # fault: nested_dtype_view
        print(end="")  # fault: graph_break
        y = torch.ops.faulty.normalise(y)
        y = y + torch.ops.faulty.same(y)  # fault: op_alias
        y = torch.ops.faulty.count(y, self.counter)  # fault: op_mutation
        return torch.ops.faulty.widen(y).float()  # fault: op_fake
