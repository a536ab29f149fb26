"""What the ranks do in tests of several processes: ``-m tests.sparse_pcg.rank_worker`` with SCENARIO SIZE INIT FOLDER
TIMEOUT for each one to run.

Each line that a rank prints into its file in FOLDER is JSON: what happened, for the test to judge. ``ends.json`` has
the exit status of each rank, and when it ended.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import torch.distributed as dist
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.distributed.device_mesh import init_device_mesh

import custom_ops
import sparse_pcg
from custom_ops.batch_metadata import BatchMetadata, ForwardContext, use_context
from sparse_pcg import compile_cache, compiled_graph
from sparse_pcg.graphs import EmulatedDevice
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import preset
from sparse_pcg.models.dsa import DSAModel
from sparse_pcg.models.sharding import Rank
from tests.sparse_pcg.forked import run_ranks
from tests.sparse_pcg.toys import same

CONFIG = preset("tiny", num_layers=1, index_topk=8)
SIZES = (8, 16)


def say(**facts: Any) -> None:
    print(json.dumps({"time": time.time(), **facts}), flush=True)


def outcome(call: Callable[[], Any]) -> str:
    """The error that a call raises, as text; empty if none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Refusing(EmulatedDevice):
    """Refuses, on rank ``rank``, the capture number ``at``."""

    rank, at, made = -1, -1, 0

    def capture(self, fn: Any, args: Any, pool: Any, ready: Any = None) -> Any:
        Refusing.made += 1
        if Refusing.made == Refusing.at and dist.get_rank() == Refusing.rank:
            raise sparse_pcg.CaptureError("capture failed: out of memory")
        return super().capture(fn, args, pool, ready)


class Kept(logging.Handler):
    """The messages of the package's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def new_runner(**options: Any) -> sparse_pcg.PrefillRunner:
    """Of the model that all processes share."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = DSAModel(CONFIG, dtype=torch.float32, rank=Rank.of(mesh))
    kv = PagedKV(CONFIG.num_layers, 4, index_layers=CONFIG.index_layers, dtype=torch.float32, poison=True)
    chosen = {"compiler": "eager", "capture_sizes": SIZES, **options}
    return sparse_pcg.PrefillRunner(model, kv, sparse_pcg.Options(**chosen), selection_group=dist.group.WORLD)


def batch_of(rows: int) -> sparse_pcg.Batch:
    ids = torch.randint(CONFIG.vocab_size, (rows,), generator=torch.Generator().manual_seed(rows))
    return sparse_pcg.Batch(ids, [rows], [0], torch.tensor([[1]], dtype=torch.int32))


def compile_at_once(folder: str) -> None:
    """Before the processes know of each other: both compile the same piece into one empty cache."""

    def body(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.mix_into(torch.softmax(x * 3, 1).sin(), out)
        return torch.relu(out) + x

    here = Path(folder, f"ready{os.getpid()}")
    here.touch()
    while len(list(Path(folder).glob("ready*"))) < 2:
        time.sleep(0.002)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    got = sparse_pcg.compile(body, capture_sizes=[8])(x)
    say(step="compiled", close=torch.allclose(got, body(x)), cache=compile_cache.cache_path("x"))


def lists_that_differ(rank: int) -> None:
    """Nothing has run when it is noticed, and the ranks go on."""
    fn, x = _toy(capture_sizes=(8, 16) if rank == 0 else (8, 32)), torch.ones(8, 2)
    say(step="differ", error=outcome(lambda: fn(x)), captures=sparse_pcg.stats().captures)


def one_capture_fails(rank: int) -> sparse_pcg.PrefillRunner:
    """The second piece of the bucket of 16, on rank 1: both ranks run that bucket uncaptured."""
    kept = Kept()
    logging.getLogger("sparse_pcg").addHandler(kept)
    compiled_graph.device_for = lambda mode, tensors: Refusing()
    Refusing.rank, Refusing.at = 1, 2
    runner = new_runner(debug_checks=True)
    with torch.no_grad():
        runner.capture(progress=False)
    # Of long requests: the short graphs hold no cut and are captured apart.
    served = []
    for rows in (12, 6, 14):
        plain = runner.forward(batch_of(rows), "uncaptured")
        replay = runner.forward(batch_of(rows))
        served.append((rows, replay.bucket, same(plain.hidden, replay.hidden), plain.hidden.double().sum().item()))
    found = [text for text in kept.texts if "not captured" in text or "capture failed" in text]
    fallbacks = sparse_pcg.stats().fallbacks
    say(
        step="failing",
        variants={size: runner.variants(size) for size in SIZES},
        served=served,
        log=found,
        fallbacks=fallbacks,
    )
    return runner


def batches_that_differ(runner: sparse_pcg.PrefillRunner, rank: int) -> None:
    """Under ``debug_checks`` the ranks compare what each serves."""
    say(step="batches", error=outcome(lambda: runner.forward(batch_of(6 + rank))))
    runner.forward(batch_of(6))


def select_other_tokens(rank: int, group: Any, device: str) -> list[Any]:
    """What ranks with other queries select: each on its own, then with ``group`` in the context."""
    metadata = BatchMetadata.allocate(8, 1, 1, 4, device)
    metadata.kv_lens.copy_(torch.arange(1, 9))
    metadata.page_table.fill_(1)
    metadata.num_rows, metadata.num_requests, metadata.max_kv_len = 8, 1, 8
    cache = torch.zeros(2, 8448, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    cache[:, :8192] = torch.randn(2, 8192, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, 8192:] = torch.ones(2, 64).view(torch.uint8)
    generator.manual_seed(rank)
    q = torch.randn(8, 4, 128, generator=generator).to(device, torch.float8_e4m3fn)
    chosen = []
    for shared in (None, group):
        context = ForwardContext(metadata, index_k={0: cache.to(device)}, selection_group=shared)
        out = torch.full((8, 4), -7, dtype=torch.int32, device=device)
        with use_context(context):
            custom_ops.indexer_topk(0, q, torch.ones(8, 4, device=device), out)
        chosen.append(out.tolist())
    return chosen


def selections_that_differ(runner: sparse_pcg.PrefillRunner, rank: int) -> None:
    """With a group in the context every rank has what the first selected; the runner puts its own there."""
    own, broadcast = select_other_tokens(rank, runner._context(runner.metadata).selection_group, "cpu")
    say(step="selections", own=own, broadcast=broadcast)


def killed_in_a_replay(runner: sparse_pcg.PrefillRunner, rank: int) -> None:
    """The other rank's next replay fails with an error that names this one."""
    runner.options = dataclasses.replace(runner.options, debug_checks=False)
    runner.forward(batch_of(6))
    if rank == 1:
        say(step="killed")
        os.kill(os.getpid(), signal.SIGKILL)
    runner.forward(batch_of(6))
    say(step="survived")


def faults(rank: int) -> None:
    lists_that_differ(rank)
    runner = one_capture_fails(rank)
    batches_that_differ(runner, rank)
    selections_that_differ(runner, rank)
    killed_in_a_replay(runner, rank)


def _toy(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    group = dist.group.WORLD.group_name

    def body(x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(torch.relu(x), "sum", group)) + 1

    return sparse_pcg.compile(body, **{"capture_sizes": [4], "compiler": "eager", **options})


def stopped(rank: int) -> None:
    """The last rank is stopped: it is there, but shows no sign of life while the others wait for it in a replay."""
    fn, x = _toy(), torch.ones(4, 2)
    for _ in range(3):
        assert fn(x)[0, 0] == dist.get_world_size() + 1
    assert sparse_pcg.stats().replays == 1
    if rank == dist.get_world_size() - 1:
        say(step="stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    fn(x)
    say(step="survived")


def raises(rank: int) -> None:
    """Rank 0, which keeps the store, ends with an error while the others come to compile."""
    fn = _toy()
    if rank == 0:
        fn(torch.ones(4, 2))
        say(step="raised")
        raise KeyError("no such page")
    fn(torch.ones(4, 2))
    fn(torch.ones(4, 2))
    say(step="survived")


def act(scenario: str, size: int, init: str, rank: int) -> None:
    """One rank."""
    if scenario == "faults":
        compile_at_once(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    say(step="began", cache=compile_cache.cache_path("x"))
    {"faults": faults, "stopped": stopped, "raises": raises}[scenario](rank)


def main() -> None:
    torch.set_num_threads(1)
    pick_vec_isa()  # what a first compile asks of the C++ compiler: once for all ranks, who begin with empty caches
    words = iter(sys.argv[1:])
    for scenario, count, init, out, timeout in zip(words, words, words, words, words, strict=True):
        size, folder = int(count), Path(out)
        (folder / "cache").mkdir()
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "SPARSE_PCG_RANK_TIMEOUT": timeout}
        ends = run_ranks(
            size,
            folder,
            partial(act, scenario, size, init),
            environment,
            size - 1 if scenario == "stopped" else None,
        )
        (folder / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
