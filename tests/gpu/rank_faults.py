"""What one rank does in test_tensor_parallel_faults.py: ``python -m tests.gpu.rank_faults SCENARIO``, RANK etc. set."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sparse_pcg
from sparse_pcg.collectives import Ranks
from sparse_pcg.counters import LIVE
from sparse_pcg.launch import launched
from tests.sparse_pcg.rank_worker import Kept, outcome, say, select_other_tokens
from tests.sparse_pcg.toys import LIBRARY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Fault:
    """What the op ``toy::shaky`` does beside doubling its argument, on rank 1, in a capture."""

    kind = ""


def _shaky(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1 and x.is_cuda and torch.cuda.is_current_stream_capturing():
        if Fault.kind == "sync":
            x.sum().item()
        elif Fault.kind == "memory":
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        elif Fault.kind == "thread":  # the capture ends without this thread being told: NCCL is the first to find out
            thread = threading.Thread(target=lambda: outcome(torch.cuda.synchronize))
            thread.start()
            thread.join()
    return x * 2


LIBRARY.define("shaky(Tensor x) -> Tensor")
LIBRARY.impl("shaky", _shaky, "CompositeExplicitAutograd")
LIBRARY._register_fake("shaky", lambda x: torch.empty_like(x))


class Model(nn.Module):
    """All-reduces before and after a cut, and on both sides of the op at fault; ``seen`` counts the calls."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.register_buffer("seen", torch.zeros(2, device=DEVICE))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", self.group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[0].add_(1)
        y = self.sum(torch.relu(x))
        out = torch.empty_like(y)
        torch.ops.toy.mix_into(y, out)
        self.seen[1].add_(1)
        return self.sum(torch.ops.toy.shaky(self.sum(out))) + 1


def data(rows: int, turn: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + 10 * turn + rank)
    return torch.randint(-4, 5, (rows, 64), generator=generator).float().to(DEVICE)


def expected(rows: int, turn: int) -> torch.Tensor:
    """Whole numbers: sums are exact in any order."""
    return sum(torch.relu(data(rows, turn, rank)) for rank in range(2)).cumsum(0) * 8 + 1  # type: ignore[union-attr]


def ranks() -> Ranks:
    """Those of the live graph."""
    return next(graph.ranks for graph in LIVE if getattr(graph, "ranks", None) is not None)  # type: ignore[attr-defined]


def captures_that_fail(rank: int, fn: Any, model: Model) -> None:
    """Sizes 8 and 16 fail on rank 1, after a collective of the same piece was captured; 4 and 32 do not."""
    kept = Kept()
    logging.getLogger("sparse_pcg").addHandler(kept)
    calls = 0
    for rows, kind in ((8, "sync"), (4, ""), (16, "memory"), (32, "")):
        Fault.kind, right, before = kind, [], sparse_pcg.stats()
        for turn in range(6):
            right.append(torch.equal(fn(data(rows, turn, rank)), expected(rows, turn)))
            calls += 1
        after = sparse_pcg.stats()
        say(
            step=f"size {rows}",
            right=right,
            once=model.seen.tolist() == [calls, calls],
            captures=after.captures - before.captures,
            replays=after.replays - before.replays,
            fallbacks=after.fallbacks,
        )
    for turn in range(40):  # captured and not, in turn
        rows = (8, 4, 16, 32)[turn % 4]
        calls += not torch.equal(fn(data(rows, turn, rank)), expected(rows, turn))
    say(step="in turn", wrong=calls - 24, log=[t for t in kept.texts if "capture" in t])
    began = time.perf_counter()
    for _ in range(200):
        ranks().vote("a capture", None)
    say(step="vote", microseconds=(time.perf_counter() - began) / 200 * 1e6)


def killed_in_a_replay(rank: int, fn: Any) -> None:
    """Rank 1 dies between two replays; rank 0's GPU waits for it inside a graph."""
    for turn in range(3):
        fn(data(4, turn, rank))
    if rank == 1:
        torch.cuda.synchronize() if DEVICE == "cuda" else None
        say(step="killed")
        os.kill(os.getpid(), signal.SIGKILL)
    say(step="waits", value=fn(data(4, 4, rank)).sum().item())


def broken_communicator(rank: int, fn: Any) -> None:
    """NCCL itself meets the end of a capture on rank 1: what of the communicator?"""
    fn(data(4, 0, rank))
    Fault.kind = "thread"
    fn(data(4, 1, rank))
    fn(data(4, 2, rank))
    torch.cuda.synchronize()
    say(step="goes on", right=torch.equal(fn(data(4, 3, rank)), expected(4, 3)))


def main() -> None:
    scenario, rank = sys.argv[1], int(os.environ["RANK"])
    with launched(DEVICE) as mesh:
        assert mesh is not None
        model = Model(mesh.get_group().group_name)
        fn = sparse_pcg.compile(model, capture_sizes=[4, 8, 16, 32], compiler="eager")
        say(step="began")
        if scenario == "poison":
            broken_communicator(rank, fn)
            return
        captures_that_fail(rank, fn, model)
        own, broadcast = select_other_tokens(rank, mesh.get_group(), DEVICE)
        say(step="selections", own=own, broadcast=broadcast)
        killed_in_a_replay(rank, fn)


if __name__ == "__main__":
    main()
