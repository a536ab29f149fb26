"""What the prefill benches measure: one rank of a published model, its draft, and every way of running them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from custom_ops.batch_metadata import current_context

from ..backend import sparse_pcg
from ..batch import Batch, check_batch, fill
from ..drafting import DraftRunner
from ..graph_runner import GraphRunner, no_grad, use_context
from ..kv import PagedKV, RequestPages, page_table
from ..models import DSAModel, ModelConfig, NextN, preset
from ..models.sharding import Rank
from ..options import Options
from ..runner import PrefillOutput, PrefillRunner
from .ranks import Turns
from .timing import device

RANKS = 8  # tensor-parallel ranks that a model is shared between
MODES = ("eager", "uncaptured", "engine-cuts", "sparse_pcg", "sparse_pcg-short")
PAGE = 64


def rank_config(model: str, layers: int | None, experts: int, positions: int) -> ModelConfig:
    """One of eight ranks of ``model`` with ``experts`` routed experts on it; "tiny" is left whole.

    layers: None for all. positions: tokens that a request may have. Raises ValueError for what does not fit.
    """
    if model == "tiny":
        return preset("tiny", num_layers=layers or 6, max_positions=positions)
    depth = {} if layers is None else {"num_layers": layers}
    part = Rank(0, RANKS, expert_parallel=True).part_of(preset(model, max_positions=positions, **depth))
    return replace(part, local_experts=(0, experts))


def shared_config(model: str, layers: int | None, experts: int, positions: int, ranks: int) -> ModelConfig:
    """The whole of ``model``, to be shared by ``ranks``, with ``experts`` routed experts on each; "tiny" has all of
    its.

    Raises ValueError for what does not fit.
    """
    if model == "tiny":
        return rank_config(model, layers, experts, positions)
    depth = {} if layers is None else {"num_layers": layers}
    return preset(model, max_positions=positions, local_experts=(0, experts * ranks), **depth)


@dataclass
class World:
    """A model with a draft, its pools, and the runners: ours, and one with the cuts that engines make today."""

    config: ModelConfig
    runner: PrefillRunner
    engine: PrefillRunner
    draft: DraftRunner
    kv: PagedKV
    turns: Turns
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def build(
        cls, config: ModelConfig, sizes: tuple[int, ...], pages: int, compiler: str, rank: Rank | None = None
    ) -> World:
        """Random weights and caches on the device, drawn there. rank: of those that share the model in ``config``."""
        where, rank = device(), rank or Rank()
        dtype = torch.bfloat16 if where == "cuda" else torch.float32
        model = DSAModel(config, dtype=dtype, device=where, seed=0, rank=rank)
        layers = config.num_layers
        kv = PagedKV(layers + 1, pages, index_layers=(*config.index_layers, layers), dtype=dtype, device=where)
        _draw_caches(kv)
        options = Options(capture_sizes=sizes, compiler=compiler, workspace_bytes=1 << 30)
        runner = PrefillRunner(model, kv, options)
        with _environment(SPARSE_PCG_ATTN_IN_GRAPH="0"):
            engine = PrefillRunner(model, kv, options)
        _trace_once(runner, engine)
        return cls(model.config, runner, engine, DraftRunner(NextN(model), kv, runner), kv, Turns(rank))

    def forward(self, mode: str, batch: Batch) -> PrefillOutput:
        """One prefill in one of ``MODES``."""
        if mode == "engine-cuts":
            return self.engine.forward(batch)
        if mode == "sparse_pcg":
            with without_short(self.runner):
                return self.runner.forward(batch)
        return self.runner.forward(batch, "replay" if mode == "sparse_pcg-short" else mode)

    def extend(
        self, mode: str, batch: Batch, out: PrefillOutput, seed: torch.Tensor, tails: torch.Tensor | None = None
    ) -> PrefillOutput:
        """The draft's part: captured in our modes, eager in an engine's. tails: by default the sampled tokens."""
        kind = {"uncaptured": "uncaptured", "sparse_pcg": "replay", "sparse_pcg-short": "replay"}.get(mode, "eager")
        with without_short(self.draft) if mode == "sparse_pcg" else nullcontext():
            return self.draft.forward(batch, out.hidden, out.logits.argmax(1) if tails is None else tails, seed, kind)

    def request(self, prefix: int, new: int, seed: int) -> tuple[RequestPages, Batch]:
        """A request with ``prefix`` tokens in the caches already, and the batch that extends it alone."""
        pages = self.kv.request()
        pages.extend(prefix + new)
        ids = torch.randint(self.config.vocab_size, (new,), generator=torch.Generator().manual_seed(seed))
        return pages, Batch(ids, [new], [prefix], page_table([pages]))


def _trace_once(*runners: PrefillRunner) -> None:
    """Have Dynamo trace the model that these runners share once, and each split what it traced its own way."""

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        graphs: dict[frozenset[str], Callable[..., Any]] = {}
        for runner in runners:
            with use_context(runner._context(runner.metadata)):
                graphs[runner.gates.whole] = sparse_pcg(gm, examples, **settings)

        def run(*args: Any) -> Any:
            context = current_context()
            assert context is not None
            return graphs[context.whole](*args)

        return run

    options = runners[0].options.to_dict()
    compiled = torch.compile(runners[0].model, backend=backend, fullgraph=True, options=options)
    for runner in runners:
        runner._compiled = compiled


@torch.no_grad()
def _draw_caches(kv: PagedKV) -> None:
    """What a cached prefix holds: latents of unit size, index keys in float8 with scales around 1."""
    generator = torch.Generator(kv.latent_pool.device).manual_seed(1)
    for layer in kv.latent_pool:
        layer.normal_(generator=generator)
    for layer in kv.index_pool:
        pages = layer.shape[0]
        keys = torch.randn(pages, PAGE * 128, device=layer.device, generator=generator).to(torch.float8_e4m3fn)
        layer[:, : PAGE * 128] = keys.view(torch.uint8)
        layer[:, PAGE * 128 :] = torch.full((pages, PAGE), 0.05, device=layer.device).view(torch.uint8)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def without_short(runner: GraphRunner) -> Iterator[None]:
    """Inside the block batches of ``runner`` take the graphs with cuts."""
    held = {size: bucket.plans.pop("short") for size, bucket in runner._buckets.items() if "short" in bucket.plans}
    try:
        yield
    finally:
        for size, plan in held.items():
            runner._buckets[size].plans["short"] = plan


@contextmanager
def full_graph(runner: PrefillRunner, batch: Batch, bucket: int) -> Iterator[Callable[[], PrefillOutput]]:
    """A prefill of this very batch as one graph, cuts and all: lengths are frozen, so it is a floor and no product.

    The same kernels as a replay with cuts. Raises CaptureError, on all ranks that share the model, where one of them
    cannot capture it.
    """
    host = check_batch(batch, runner.kv.num_pages, False)
    kept = runner._buckets[bucket]
    with runner._lock, no_grad():
        fill(runner.metadata, batch, host, runner._staging)
        with use_context(runner._context(runner.metadata)):
            plan = kept.graph.plan(kept.inputs, variant="whole", label=", the floor")
    assert plan is not None

    def forward() -> PrefillOutput:
        with without_short(runner):
            before, kept.plans["cut"] = kept.plans["cut"], plan
            try:
                return runner.forward(batch)
            finally:
                kept.plans["cut"] = before

    yield forward
    plan.clear()


def profiled(run: Callable[[], Any], kernels: int = 12) -> tuple[float | None, list[tuple[str, int, float]]]:
    """Milliseconds that the GPU works in one call of ``run``, the sum over its kernels, and which take the most.

    These are (name, how many, milliseconds), at most ``kernels`` of them. (None, []) without a GPU.
    """
    if not torch.cuda.is_available():
        return None, []
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [(e.key[:120], e.count, e.self_device_time_total / 1000) for e in profiler.key_averages()]
    found.sort(key=lambda kernel: -kernel[2])
    return sum(ms for *_, ms in found), found[:kernels]


def median_ms(seconds: list[float]) -> float:
    """The median in milliseconds."""
    return statistics.median(seconds) * 1000
