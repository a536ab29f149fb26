"""Time to first token under load: lanes in a closed loop whose requests share prefill chunks, however served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..batch import Batch
from ..buckets import default_schedule
from ..counters import logger
from ..kv import RequestPages, page_table
from .prefill import MODES, PAGE, World, median_ms, rank_config
from .timing import provenance, write_json
from .ttft import ROWS, capture_all

BUCKETS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LANES = (1, 4, 8, 16)
CHUNK = 8192  # new tokens of a batch at most, over all lanes
OFFSET = 0.03  # seconds from a lane's first token to its next request
# Requests of a single lane, of several lanes in all, and of each of them at least; of long prompts half as many.
ALONE, TOGETHER, LEAST = 16, 24, 3


@dataclass
class _Request:
    """A request on its way to its first token. arrival: seconds since the loop began."""

    lane: int
    arrival: float
    ids: torch.Tensor
    prefix: int
    pages: RequestPages | None = None
    done: int = 0


def run_serve(
    *,
    model: str = "glm5_2",
    layers: int | None = None,
    experts: int = 4,
    rows: Sequence[tuple[int, int]] = ROWS,
    lanes: Sequence[int] = LANES,
    modes: Sequence[str] = MODES,
    runs: int = 3,
    compiler: str = "inductor",
    partial: Path | None = None,
) -> dict[str, Any]:
    """TTFT per class of prompts, number of lanes and mode, in milliseconds.

    model, layers, experts, compiler, partial: as in ``run_ttft``. rows: (cached, new) tokens of every request of a
    class; cached tokens are shared by all. lanes: how many clients send at once, each its next request a fixed time
    after its first token. runs: of each mode, in turn.

    Per class, lanes and mode there are the median and the 99th percentile of all requests' TTFT, from arrival to the
    token on the host, and the range of the runs' medians. Raises ValueError for what does not fit.
    """
    unknown = [m for m in modes if m not in MODES]
    if unknown or not modes:
        raise ValueError(f"serve: modes must be some of {MODES}, got {tuple(modes)}")
    if runs < 1 or not lanes or min(lanes) < 1:
        raise ValueError(f"serve: runs and lanes must be at least 1, got {runs} and {tuple(lanes)}")
    longest = max(prefix + new for prefix, new in rows)
    config = rank_config(model, layers, experts, longest)
    world = World.build(config, buckets(rows, lanes), pages_needed(rows, lanes), compiler)
    result: dict[str, Any] = {
        "bench": "serve",
        **provenance(),
        "model": {"name": model, "layers": config.num_layers, "experts": experts, "compiler": compiler},
        **capture_all(world),
    }
    return serve_classes(world, result, rows, lanes, modes, runs, partial)


def buckets(rows: Sequence[tuple[int, int]], lanes: Sequence[int]) -> tuple[int, ...]:
    """Those that the batches of these classes can need."""
    largest = max(min(CHUNK, max(lanes) * new) for _, new in rows)
    if largest < BUCKETS[0]:
        return default_schedule(-(-max(largest, 4) // 16) * 16)
    return tuple(b for b, before in zip(BUCKETS, (0, *BUCKETS), strict=False) if before < largest)


def pages_needed(rows: Sequence[tuple[int, int]], lanes: Sequence[int]) -> int:
    """Pages that the longest class takes: its prefix once, the new tokens of every lane, the dummy page."""
    return max(-(-prefix // PAGE) + max(lanes) * (-(-new // PAGE) + 1) for prefix, new in rows) + 2


def serve_classes(
    world: World,
    result: dict[str, Any],
    rows: Sequence[tuple[int, int]],
    lanes: Sequence[int],
    modes: Sequence[str],
    runs: int,
    partial: Path | None = None,
) -> dict[str, Any]:
    """Fill ``result["classes"]``."""
    result |= {"chunk": CHUNK, "offset_ms": OFFSET * 1000, "runs": runs, "classes": []}
    for prefix, new in rows:
        with world.kv.request() as cached:
            cached.extend(prefix)  # what is in the caches will do for a prefix
            for count in lanes:
                began = time.perf_counter()
                taken: dict[str, list[list[float]]] = {mode: [] for mode in modes}
                for turn in range(runs + 1):
                    for mode in modes:
                        waits = _loop(world, mode, cached, new, count, 2 if turn == 0 else None)
                        if turn:  # the first turn warms up
                            taken[mode].append(waits)
                measured = {mode: _summary(of_runs) for mode, of_runs in taken.items()}
                result["classes"].append({"prefix": prefix, "new": new, "lanes": count, "modes": measured})
                seconds = time.perf_counter() - began
                logger.info("served %d + %d, %d at once: %.1f s", prefix, new, count, seconds)
                if partial is not None:
                    write_json(partial, result)
    return result


def _summary(runs: list[list[float]]) -> dict[str, Any]:
    together = sorted(wait for waits in runs for wait in waits)
    medians = [median_ms(waits) for waits in runs]
    return {
        "median_ms": median_ms(together),
        "p99_ms": together[min(len(together) - 1, int(0.99 * len(together)))] * 1000,
        "median_range_ms": [min(medians), max(medians)],
        "requests": len(together),
    }


def _loop(world: World, mode: str, cached: RequestPages, new: int, lanes: int, each: int | None = None) -> list[float]:
    """Serve until every lane has had its requests; seconds to the first token of each."""
    share = 2 if 2 * new >= CHUNK else 1
    each = each or max(LEAST, (ALONE if lanes == 1 else TOGETHER // lanes) // share)
    left = [each] * lanes
    prefix = cached.num_tokens // PAGE * PAGE
    seeds = torch.empty(lanes, world.config.index_topk, dtype=torch.int32, device=world.runner.device)

    def request(lane: int, arrival: float) -> _Request:
        left[lane] -= 1
        generator = torch.Generator().manual_seed(1000 * lane + left[lane])
        ids = torch.randint(world.config.vocab_size, (new,), generator=generator)
        return _Request(lane, arrival, ids, prefix)

    queue = [request(lane, OFFSET * lane / lanes) for lane in range(lanes)]
    waits: list[float] = []
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    while queue:
        queue.sort(key=lambda r: (r.arrival, r.lane))  # one that was begun arrived before those that were not
        now = time.perf_counter() - start
        if queue[0].arrival > now:
            time.sleep(max(0.0, queue[0].arrival - now - 2e-4))
            continue
        parts = _chunk([r for r in queue if r.arrival <= now], cached)
        batch, tails = _batch(parts)
        out = world.forward(mode, batch)
        tokens = out.logits.argmax(1)
        sampled = tokens.tolist()
        now = time.perf_counter() - start
        for i, (part, count) in enumerate(parts):
            part.done += count
            if part.done < new:
                continue
            tails[i] = sampled[i]
            waits.append(now - part.arrival)
            queue.remove(part)
            if left[part.lane]:
                queue.append(request(part.lane, now + OFFSET))
        world.extend(mode, batch, out, seeds[: len(parts)], tails)
        for part, _ in parts:
            if part.done == new and part.pages is not None:
                part.pages.close()
    return waits


def _chunk(waiting: list[_Request], cached: RequestPages) -> list[tuple[_Request, int]]:
    """First come, first served: how much of which request goes into the next batch."""
    room, parts = CHUNK, []
    for request in waiting:
        count = min(room, len(request.ids) - request.done)
        if count:
            if request.pages is None:
                request.pages = RequestPages.with_prefix(cached, request.prefix)
            request.pages.extend(count)
            parts.append((request, count))
            room -= count
    return parts


def _batch(parts: list[tuple[_Request, int]]) -> tuple[Batch, torch.Tensor]:
    """The batch, and of each request the token after its chunk where the prompt has one."""
    ids = torch.cat([r.ids[r.done : r.done + count] for r, count in parts])
    after = [int(r.ids[r.done + count]) if r.done + count < len(r.ids) else 0 for r, count in parts]
    table = page_table([r.pages for r, _ in parts if r.pages is not None])
    new_lens, prefix_lens = [count for _, count in parts], [r.prefix + r.done for r, _ in parts]
    return Batch(ids, new_lens, prefix_lens, table), torch.tensor(after)
