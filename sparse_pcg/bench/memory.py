"""What captured buckets hold: bytes of the graph pool, and bytes that the driver keeps for the graphs themselves."""

from __future__ import annotations

import gc
from typing import Any

import torch

from ..buckets import default_schedule
from ..kv import PagedKV
from ..models import DSAModel, ModelConfig, preset
from ..models.sharding import Rank
from ..options import Options
from ..runner import PrefillRunner
from .timing import device, provenance

RANKS = 8  # tensor-parallel ranks that the large model is shared between
BUCKETS = 20


def rank_of_glm5_2(num_layers: int = 4) -> ModelConfig:
    """GLM-5.2 with its real widths, as one of eight ranks holds it: 8 heads, an eighth of the experts and MLP."""
    whole = preset("glm5_2", num_layers=num_layers, max_positions=16384)
    return Rank(0, RANKS, expert_parallel=True).part_of(whole)


def spread(sizes: tuple[int, ...], number: int) -> tuple[int, ...]:
    """``number`` of ``sizes``, evenly spread, the largest among them."""
    return tuple(sizes[-1 - i * len(sizes) // number] for i in range(number))[::-1]


def rank_and_pool(bench: str, model: str, largest: int) -> tuple[DSAModel, PagedKV]:
    """The model that ``bench`` measures, "glm5_2" or "tiny", and KV pages for its largest bucket twice over.

    Raises ValueError for another model.
    """
    if model not in ("glm5_2", "tiny"):
        raise ValueError(f"{bench}: model must be 'glm5_2' or 'tiny', got {model!r}")
    where = device()
    config = rank_of_glm5_2() if model == "glm5_2" else preset("tiny")
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    pages = -(-2 * largest // 64) + 2
    kv = PagedKV(config.num_layers, pages, index_layers=config.index_layers, dtype=dtype, device=where)
    return DSAModel(config, dtype=dtype, device=where, seed=0), kv


def run_memory(
    *, model: str = "glm5_2", largest: int = 2048, buckets: int = BUCKETS, compiler: str = "inductor"
) -> dict[str, Any]:
    """Capture ``buckets`` sizes up to ``largest``, big to small, and account for the memory after each.

    model: "glm5_2" (4 layers of one rank of eight) or "tiny". Returns per bucket the pool's bytes and the driver's
    (memory in use on the device that PyTorch's allocator does not hold: graphs, and kernels as they are loaded), the
    ratio of the pool to the biggest bucket's alone, and what is left of both once the graphs are dropped, and when all
    is captured and dropped once more; the head has machine, versions, commit and command.

    Raises ValueError for an unknown model, or more buckets than the schedule has.
    """
    schedule = default_schedule(largest)
    if not 1 <= buckets <= len(schedule):
        raise ValueError(f"memory: buckets must be in 1..{len(schedule)}, got {buckets}")
    weights, kv = rank_and_pool("memory", model, largest)
    sizes = spread(schedule, buckets)
    before = _held()
    rows = []
    alone = 0
    runner = PrefillRunner(weights, kv, Options(capture_sizes=sizes, compiler=compiler))
    # Bucket by bucket, each time with the options of the whole set: what ``capture`` does, with a look after each.
    for size in reversed(sizes):
        runner.sizes = tuple(s for s in sizes if s >= size)
        runner.capture(progress=False)
        now = _held()
        alone = alone or runner.pool_bytes
        rows.append(
            {
                "bucket": size,
                "pool_bytes": runner.pool_bytes,
                "driver_bytes": now["driver"] - before["driver"],
                "seconds": runner.captured[-1].seconds,
            }
        )
    total = runner.pool_bytes
    runner.drop()
    once = _held()
    # The first round leaves the kernels that it loaded with the driver: a second one tells them from a leak.
    runner.capture(progress=False)
    again = runner.pool_bytes
    runner.drop()
    twice = _held()
    return {
        "bench": "memory",
        **provenance(),
        "model": {"name": model, "layers": weights.config.num_layers, "compiler": compiler},
        "buckets": rows,
        "pool_bytes": total,
        "pool_bytes_biggest_alone": alone,
        "ratio": total / alone if alone else 0.0,
        "pool_bytes_captured_again": again,
        "left_after_reset": {name: once[name] - before[name] for name in once},
        "left_by_capturing_again": {name: twice[name] - once[name] for name in twice},
    }


def _held() -> dict[str, int]:
    """Bytes reserved by PyTorch's allocator, and bytes in use on the device beside them."""
    gc.collect()
    if not torch.cuda.is_available():
        return {"reserved": 0, "driver": 0}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {"reserved": reserved, "driver": total - free - reserved}
