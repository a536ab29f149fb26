"""What the ranks of a shared model find, each in a process of its own: torchrun's, or two that this one forks.

Arguments of ``-m tests.sparse_pcg.shared_model``: a folder for one JSON file per rank and name, the device type, then
the names of what to look at. Without a GPU TRITON_INTERPRET must be 1.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sparse_pcg
from sparse_pcg import Batch, DraftRunner, Options, PrefillRunner, demo
from sparse_pcg.bench import ttft
from sparse_pcg.errors import CaptureError
from sparse_pcg.graphs import EmulatedDevice
from sparse_pcg.kv import PagedKV, page_table
from sparse_pcg.launch import launched
from sparse_pcg.models import DSAModel, NextN, Rank, preset
from sparse_pcg.split import CUT, PIECE
from sparse_pcg.verification import pages_of, row_distance, same_bytes
from tests.gpu import prefill_bench
from tests.sparse_pcg import toys  # noqa: F401  (registers operators)
from tests.sparse_pcg.forked import free_port, run_ranks

CONFIG = replace(preset("tiny"), num_layers=2, indexer_types=("full", "shared"))
BUCKETS = (16, 64)
# Batches of (request, new tokens): bucket 64, 16, 64 again with more than index_topk tokens, 16, 64.
SERVED = ((("a", 50),), (("b", 9),), (("a", 40), ("b", 5)), (("a", 12),), (("c", 33), ("b", 20)))


def model(mesh: DeviceMesh, device: str, dtype: torch.dtype, expert_parallel: bool, compiler: str) -> dict[str, Any]:
    """The modes of a shared model and its draft against one another, and against one rank alone."""
    rank = Rank.of(mesh, expert_parallel)
    layers, worlds = CONFIG.num_layers, []
    for part in (rank, Rank()):
        target = DSAModel(CONFIG, dtype, device, rank=part)
        kv = PagedKV(layers + 1, 32, index_layers=(*CONFIG.index_layers, layers), dtype=dtype, device=device)
        runner = PrefillRunner(target, kv, Options(capture_sizes=BUCKETS, compiler=compiler))
        worlds.append((runner, DraftRunner(NextN(target), kv, runner)))
    (ours, draft), (alone, alone_draft) = worlds
    draft.capture(progress=False)
    segments = ours.graphs()[0].segments
    reduced = {k: sum(op.endswith("all_reduce") for s in segments if s.kind == k for op in s.ops) for k in (PIECE, CUT)}
    found: dict[str, Any] = {"reduced": reduced, "cuts": ours.graphs()[0].cut_count, "batches": []}
    requests = {name: ours.kv.request() for name in "abc"}
    for number, parts in enumerate(SERVED):
        for name, new in parts:
            requests[name].extend(new)
        news = [new for _, new in parts]
        pages = [requests[name] for name, _ in parts]
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(CONFIG.vocab_size, (sum(news),), generator=generator)
        before = [p.num_tokens - n for p, n in zip(pages, news, strict=True)]
        batch = Batch(ids, news, before, page_table(pages))
        held = sorted({page for p in pages for page in p.pages})
        found["batches"].append(_served(ours, alone, draft, alone_draft, batch, held))
    found["fallbacks"] = sparse_pcg.stats().fallbacks
    found["text"] = str(sparse_pcg.explain(ours))
    if rank.index == 0 and device == "cpu":  # asks no other rank
        found["findings"] = [f.kind for f in sparse_pcg.check(ours)]
    sparse_pcg.reset()
    return found


def _served(
    ours: PrefillRunner,
    alone: PrefillRunner,
    draft: DraftRunner,
    alone_draft: DraftRunner,
    batch: Batch,
    pages: list[int],
) -> dict[str, Any]:
    whole, eager = alone.forward(batch, "eager"), ours.forward(batch, "eager")
    tails = whole.logits.argmax(1)
    modes = {}
    for mode in ("uncaptured", "breaks", "replay"):
        out = ours.forward(batch, mode)
        after = draft.forward(batch, whole.hidden, tails, mode=mode)
        modes[mode] = [out.hidden, out.logits, after.hidden, after.logits, *pages_of(ours, pages)]
    whole_draft = alone_draft.forward(batch, whole.hidden, tails, mode="eager")
    hidden = [torch.empty_like(out.hidden) for _ in range(dist.get_world_size())]
    dist.all_gather(hidden, out.hidden)
    return {
        "bucket": out.bucket,
        "variant": out.variant,
        "bitwise": [all(map(same_bytes, modes["replay"], modes[other])) for other in ("uncaptured", "breaks")],
        "ranks alike": same_bytes(hidden[0], hidden[-1]),
        "from one rank": _median(out.hidden, whole.hidden),
        "eager from one rank": _median(eager.hidden, whole.hidden),
        "draft from one rank": _median(after.hidden, whole_draft.hidden),
        "logits from one rank": _median(out.logits, whole.logits),
    }


def _median(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(row_distance(got, want).median())


def reduced(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.ops._c10d_functional.all_reduce(x, "sum", group)


class Sums(nn.Module):
    """Sums over the ranks where a compiler or a split can go wrong: of what is used after, of views and late reads of a
    pool, of an input, and one that is under way across a cut."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.register_buffer("pool", torch.zeros(32, 8))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wait = torch.ops._c10d_functional.wait_tensor
        scaled = x * 2 + 1
        total = wait(reduced(scaled, self.group))
        torch.ops.toy.store(scaled - total, slots, self.pool)
        read = self.pool[slots] * 3
        late = wait(reduced(read, self.group))
        torch.ops.toy.store(late + read, slots, self.pool)
        top = wait(reduced(self.pool[4:12], self.group))
        started = reduced(x, self.group)
        out = torch.empty_like(x)
        torch.ops.toy.mix_into(late + total, out)
        return out + wait(started), top, scaled, self.pool[slots]


def sums(mesh: DeviceMesh, device: str, compiler: str) -> dict[str, Any]:
    """``Sums``, compiled and replayed, against itself as it is."""
    group = mesh.get_group().group_name
    plain = Sums(group).to(device)
    compiled = sparse_pcg.compile(copy.deepcopy(plain), capture_sizes=(12,), compiler=compiler)
    distances = []
    for turn in range(4):
        rows = 7 if turn == 3 else 12
        generator = torch.Generator().manual_seed(10 * turn + mesh.get_local_rank())
        x = torch.randn(rows, 8, generator=generator).to(device)
        slots = torch.randperm(32, generator=torch.Generator().manual_seed(turn))[:rows].to(device)
        got, want = [*compiled(x, slots), compiled.module.pool], [*plain(x, slots), plain.pool]
        distances.append(max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True)))
    stats = sparse_pcg.stats()
    sparse_pcg.reset()
    return {"distances": distances, "captures": stats.captures, "replays": stats.replays}


def served_demo(mesh: DeviceMesh, device: str) -> dict[str, Any]:
    """The demo's own judgement."""
    demo.REPEATS = 1
    result = demo.run_demo(demo.read_prompt(None), "eager", torch.device(device), progress=False, mesh=mesh)
    sparse_pcg.reset()
    return {"ok": result.ok, "ranks": result.ranks, "diffs": [row.rank_diff for row in result.rows]}


def bench(mesh: DeviceMesh, device: str) -> dict[str, Any]:
    """The prefill bench where the second rank cannot capture the first row's floor and has no time for a third row."""
    line = "rows OUT --model tiny --layers 2 --rows 0+8,64+8,0+9 --turns 1 --seconds 3600 --compiler eager --name tp2"
    args = prefill_bench.parse(line.replace("OUT", sys.argv[1]).split())
    rows = itertools.count()
    late = 0.0
    first_row, capture, now = ttft._row, EmulatedDevice.capture, time.perf_counter

    def row(*arguments: Any) -> dict[str, Any]:
        nonlocal late
        number = next(rows)
        late = 7200.0 * number * mesh.get_local_rank()
        if number == 0 and mesh.get_local_rank() == 1:
            EmulatedDevice.capture = fails  # type: ignore[method-assign]
        return first_row(*arguments)

    def fails(*arguments: Any) -> Any:
        EmulatedDevice.capture = capture  # type: ignore[method-assign]
        raise CaptureError("capture failed: of this rank alone")

    ttft._row, ttft.time = row, SimpleNamespace(perf_counter=lambda: now() + late)  # type: ignore[assignment]
    try:
        prefill_bench.measure(args, Rank.of(mesh, expert_parallel=True))
    finally:
        ttft._row, ttft.time = first_row, time  # type: ignore[assignment]
    sparse_pcg.reset()
    written = Path(sys.argv[1]) / "h200x2-ttft-tp2.json"
    return {"result": json.loads(written.read_text()) if mesh.get_local_rank() == 0 else {}, "rows": next(rows)}


WHAT: dict[str, Callable[[DeviceMesh, str], dict[str, Any]]] = {
    "columns": lambda mesh, device: model(mesh, device, torch.float32, False, "eager"),
    "experts": lambda mesh, device: model(mesh, device, torch.float32, True, "eager"),
    "bfloat16": lambda mesh, device: model(mesh, device, torch.bfloat16, False, "eager"),
    "inductor": lambda mesh, device: model(mesh, device, torch.bfloat16, False, "inductor"),
    "sums": lambda mesh, device: sums(mesh, device, "eager"),
    "sums inductor": lambda mesh, device: sums(mesh, device, "inductor"),
    "demo": served_demo,
    "bench": bench,
}


def find(rank: int | None = None) -> None:
    """What one rank does. rank: None if torchrun has said it."""
    if rank is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    out, device, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    with launched(device) as mesh:
        assert mesh is not None
        for name in names:
            torch._dynamo.reset()
            began = time.process_time()
            found = WHAT[name](mesh, device)
            found["seconds"] = time.process_time() - began  # of one core
            (out / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(found))


def main() -> None:
    if "RANK" in os.environ:
        find()
        return
    folder = Path(sys.argv[1])
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ends = run_ranks(2, folder, find, where)
    print(*((folder / f"{kind}{rank}").read_text() for kind in ("out", "err") for rank in (0, 1)))
    sys.exit(any(status for status, _ in ends))


if __name__ == "__main__":
    main()
