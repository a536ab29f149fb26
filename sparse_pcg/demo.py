"""The demo: capture a tiny GLM-5.2-shaped model, serve a text to it in every way a prefill comes, compare all modes."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import counters
from .batch import Batch
from .kv import PagedKV, RequestPages, page_table
from .models import DSAModel, ModelConfig, Rank, preset
from .options import Options
from .runner import PrefillOutput, PrefillRunner
from .served import KV
from .verification import judge, pages_of, same_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BUCKETS = (16, 32, 64, 128, 256)
REPEATS = 3


@dataclass(frozen=True)
class Row:
    """One request of the demo. Times in milliseconds, medians.

    launches_saved: kernels of the captured pieces, launched one by one, less the graph launches. max_diff: largest
    difference of a hidden state from the eager model's; close: see ``verification.judge``. undecided: None where
    that holds as it is; else the share of rows that move by more than the tolerance in the eager model too, when its
    weights change in their last bits: such rows were allowed twice that move. A choice of tokens or experts that is
    nearly undecided can reach many of the rows after it, whatever the text. rank_diff, alike: where several ranks share
    the model, the same comparison with the model run by one alone; else None.
    """

    request: str
    rows: int
    bucket: int | None
    variant: str | None
    cuts: int
    launches_saved: int
    eager_ms: float
    uncaptured_ms: float
    replay_ms: float
    bitwise: bool
    max_diff: float
    close: bool
    undecided: float | None = None
    rank_diff: float | None = None
    alike: bool | None = None


@dataclass(frozen=True)
class Result:
    """All rows, and what they were measured on. ranks: how many processes shared the model; times are the first's."""

    rows: list[Row]
    machine: dict[str, str]
    compiler: str
    capture_seconds: float
    pieces: int
    distinct_pieces: int
    fallbacks: dict[str, int]
    ranks: int = 1

    @property
    def ok(self) -> bool:
        """Whether every request was replayed, bitwise equal to uncaptured on all ranks, and close to eager."""
        return all(row.bitwise and row.close and row.variant and row.alike is not False for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True)
class _Part:
    """Some new tokens of one request: text[start:stop], after what its pages hold already."""

    pages: RequestPages
    start: int
    stop: int


def read_prompt(path: Path | None) -> bytes:
    """The text to serve, as bytes (the tokens). Raises ValueError for a text that is too short for the demo."""
    text = (
        path.read_bytes()
        if path is not None
        else resources.files("sparse_pcg").joinpath("data/prompt.txt").read_bytes()
    )
    if len(text) < _LEAST_TEXT:
        raise ValueError(f"prompt: the demo needs at least {_LEAST_TEXT} bytes of text, got {len(text)}")
    return text


_LEAST_TEXT = 512


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises ValueError for a device that is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: must be 'auto', 'cpu' or 'cuda', got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' was asked for, but torch finds no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def demo_config(ranks: int = 1) -> ModelConfig:
    """The model of the demo. Raises ValueError for a number of ranks that cannot share it."""
    # Three layers hold every kind (dense and MoE, an indexer of its own and a shared one) and compile quickly.
    config = replace(preset("tiny"), num_layers=3, indexer_types=("full", "shared", "full"))
    Rank(0, ranks).part_of(config)
    return config


def run_demo(
    text: bytes, compiler: str, device: torch.device, progress: bool = True, mesh: DeviceMesh | None = None
) -> Result:
    """Serve ``text`` and compare the modes; see ``Row``. mesh: processes that share the model; each calls this."""
    with _one_thread():
        return _run(text, compiler, device, progress, mesh)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from threads, and threads that wait for one another cost a busy machine much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _runner(config: ModelConfig, device: torch.device, rank: Rank, **options: Any) -> PrefillRunner:
    dtype = torch.float32  # in bfloat16 a last bit tips a choice of experts now and then, and hides what is compared
    model = DSAModel(config, dtype=dtype, device=device, seed=0, rank=rank)
    kv = PagedKV(config.num_layers, 64, index_layers=config.index_layers, dtype=dtype, device=device)
    return PrefillRunner(model, kv, Options(capture_sizes=BUCKETS, **options))


def _run(text: bytes, compiler: str, device: torch.device, progress: bool, mesh: DeviceMesh | None) -> Result:
    config, rank = demo_config(), Rank() if mesh is None else Rank.of(mesh)
    runner = _runner(config, device, rank, compiler=compiler)
    alone = _runner(config, device, Rank()) if rank.size > 1 and rank.index == 0 else None
    start = time.perf_counter()
    runner.capture(progress=progress)
    seconds = time.perf_counter() - start
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    rows = [_serve(name, parts, tokens, runner, alone) for name, parts in _requests(runner.kv)]
    if mesh is not None:
        rows = _of_all_ranks(rows, mesh)
    graph = runner.graphs()[0]
    return Result(
        rows,
        _machine(device),
        compiler,
        seconds,
        graph.piece_count,
        graph.distinct_count,
        counters.stats().fallbacks,
        rank.size,
    )


def _of_all_ranks(rows: list[Row], mesh: DeviceMesh) -> list[Row]:
    """The first rank's rows, with what must hold on all of them."""
    found: list[list[Row]] = [[] for _ in range(mesh.size())]
    torch.distributed.all_gather_object(found, rows, group=mesh.get_group())
    return [
        replace(same[0], bitwise=all(row.bitwise for row in same), close=all(row.close for row in same))
        for same in zip(*found, strict=True)
    ]


def _requests(kv: KV) -> list[tuple[str, list[_Part]]]:
    """Fresh, short, chunked, with a cached prefix, and several of these in one batch."""
    a, b, c = kv.request(), kv.request(), kv.request()
    served: list[tuple[str, list[_Part]]] = [
        ("fresh", [_Part(a, 0, 200)]),
        ("fresh, short", [_Part(b, 200, 240)]),
        ("chunk 1 of 3", [_Part(c, 0, 128)]),
        ("chunk 2 of 3", [_Part(c, 128, 256)]),
        ("chunk 3 of 3", [_Part(c, 256, 300)]),
    ]
    # A prefix is shared by whole pages: what follows is decided once the request that wrote them has been served.
    served.append(("cached prefix 128", [_Part(_Shared(a, 128), 128, 190)]))
    served.append(
        ("mixed batch of 3", [_Part(kv.request(), 300, 350), _Part(b, 240, 241), _Part(_Shared(c, 64), 64, 104)])
    )
    return served


class _Shared(RequestPages):
    """A request that starts with the first tokens of another, once that one has been served."""

    def __init__(self, source: RequestPages, num_tokens: int) -> None:
        super().__init__(source.allocator)
        self.source, self.prefix = source, num_tokens

    def extend(self, new_tokens: int) -> None:
        if not self.pages:
            shared = RequestPages.with_prefix(self.source, self.prefix)
            self.pages, self.num_tokens = shared.pages, shared.num_tokens
        super().extend(new_tokens)


def _serve(
    name: str, parts: list[_Part], tokens: torch.Tensor, runner: PrefillRunner, alone: PrefillRunner | None
) -> Row:
    new = [p.stop - p.start for p in parts]
    for part, count in zip(parts, new, strict=True):
        part.pages.extend(count)
    prefix = [p.pages.num_tokens - n for p, n in zip(parts, new, strict=True)]
    ids = torch.cat([tokens[p.start : p.stop] for p in parts])
    batch = Batch(ids, new, prefix, page_table([p.pages for p in parts], runner.device))
    eager, eager_ms = _timed(lambda: runner.forward(batch, "eager"), runner.device)
    plain, plain_ms = _timed(lambda: runner.forward(batch, "uncaptured"), runner.device)
    pages = sorted({page for part in parts for page in part.pages.pages})
    written = pages_of(runner, pages)
    replay, replay_ms = _timed(lambda: runner.forward(batch), runner.device)
    want, got = [plain.hidden, plain.logits, *written], [replay.hidden, replay.logits, *pages_of(runner, pages)]
    bitwise = all(map(same_bytes, want, got))
    diff = float((replay.hidden.float() - eager.hidden.float()).abs().max())
    close, undecided = _judge(runner, batch, replay.hidden, eager.hidden)
    rank_diff, alike = None, None
    if alone is not None:
        whole = alone.forward(batch, "eager").hidden
        rank_diff = float((replay.hidden.float() - whole.float()).abs().max())
        alike = _judge(alone, batch, replay.hidden, whole, "eager")[0]
    saved, cuts = _launches(runner, replay)
    return Row(
        name,
        len(ids),
        replay.bucket,
        replay.variant,
        cuts,
        saved,
        eager_ms,
        plain_ms,
        replay_ms,
        bitwise,
        diff,
        close,
        undecided,
        rank_diff,
        alike,
    )


def _judge(
    runner: PrefillRunner, batch: Batch, got: torch.Tensor, eager: torch.Tensor, mode: str = "replay"
) -> tuple[bool, float | None]:
    """``close`` and ``undecided`` of a row. mode: in which ``runner`` serves the batch again, for its KV."""
    _, close, undecided = judge(runner, batch, got, eager)
    if undecided is not None:
        runner.forward(batch, mode)  # its KV again
    return close, undecided


def _launches(runner: PrefillRunner, output: PrefillOutput) -> tuple[int, int]:
    """Launches saved (kernels of the captured pieces, launched one by one, less the graph launches), and cuts."""
    plan = runner.plan_of(output)
    if plan is None:
        return 0, 0
    return runner.graphs()[0].kernel_count - plan.captures, plan.cuts


def _timed(call: Callable[[], PrefillOutput], device: torch.device) -> tuple[PrefillOutput, float]:
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        output = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return output, statistics.median(times)


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}
