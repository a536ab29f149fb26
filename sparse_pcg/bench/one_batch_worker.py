"""One SGLang process of ``one_batch``: the model runner of SGLang's own benchmark prefills what it is asked to.

``python -m sparse_pcg.bench.one_batch_worker FD FLAGS``: orders come and answers go through the connection FD; FLAGS
are those of ``sglang.benchmark.one_batch``. Between two orders the process sleeps.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from .one_batch_weights import draw_weights


def _keep_registered_configs() -> None:
    """Newer transformers know models that SGLang registers as well: the first registration stays."""
    from transformers.models.auto import auto_factory, configuration_auto

    mappings: tuple[Any, ...] = (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping)
    for cls in mappings:

        def register(self: Any, key: Any, value: Any, exist_ok: bool = False, _given: Any = cls.register) -> Any:
            return _given(self, key, value, exist_ok=True)

        cls.register = register


def tokens(count: int, seed: int) -> list[int]:
    """``count`` token ids, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 9000, (count,), generator=generator).tolist()


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over that of ``wanted``."""
    return float((found - wanted).norm() / wanted.norm())


def ascending(slots: torch.Tensor) -> torch.Tensor:
    """Each row's slots in ascending order, then -1: int32 [rows, index_topk], as given but for the order."""
    last = torch.iinfo(slots.dtype).max
    ordered = slots.masked_fill(slots < 0, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, -1)


@contextmanager
def slots_in_order() -> Iterator[None]:
    """Inside the block SGLang's top-k gives its slots in ascending order.

    The kernel numbers what it finds by an atomic counter, so that the order, and with it the rounding of attention's
    sums, is another in each run.
    """
    kernels = sys.modules.get("sgl_kernel")
    kernel = getattr(kernels, "fast_topk_transform_fused", None)
    if kernel is None:
        yield
        return
    kernels.fast_topk_transform_fused = lambda *args, **kwargs: ascending(kernel(*args, **kwargs))  # type: ignore[union-attr]
    try:
        yield
    finally:
        kernels.fast_topk_transform_fused = kernel  # type: ignore[union-attr]


class Worker:
    """SGLang's runner with prefill graphs, loaded by SGLang's own benchmark module.

    Where SGLang invents the weights of a model that is not quantised, they are ours (``draw_weights``).
    """

    def __init__(self, flags: list[str]) -> None:
        _keep_registered_configs()
        from sglang.srt.plugins import load_plugins

        load_plugins()  # a server's processes do it; the benchmark does not
        import sglang.benchmark.one_batch as one_batch
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_loader import loader

        parser = argparse.ArgumentParser()
        one_batch.ServerArgs.add_cli_args(parser)
        one_batch.BenchArgs.add_cli_args(parser)
        server_args = one_batch.ServerArgs.from_cli_args(parser.parse_args(flags))
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        one_batch._set_envs_and_config(server_args)
        one_batch.initialize_moe_config(server_args)
        one_batch.initialize_fp8_gemm_config(server_args)
        one_batch.initialize_fp4_gemm_config(server_args)
        one_batch.configure_logger(server_args, prefix="")
        self.start: dict[str, Any] = {}
        init_graphs = ModelRunner.init_cuda_graphs

        def measured(runner: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = init_graphs(runner, *args, **kwargs)
            torch.cuda.synchronize()
            self.start["graphs_s"] = time.perf_counter() - began
            return result

        ModelRunner.init_cuda_graphs = measured
        loader.initialize_dummy_weights = draw_weights
        began = time.perf_counter()
        ports = one_batch.PortArgs.init_new(server_args)
        self.bench, _ = one_batch.load_model(server_args, ports, 0, 0)
        self.start["load_s"] = time.perf_counter() - began
        self.one_batch = one_batch
        self.runner = self.bench.torch_runner.prefill_cuda_graph_runner
        self.backend = getattr(self.runner, "backend", None)

    def loaded(self) -> dict[str, Any]:
        """Seconds of the start, the class that serves prefills, and the bytes in pools of graphs."""
        pools: dict[str, int] = {}
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) != (0, 0):
                name = str(tuple(segment["segment_pool_id"]))
                pools[name] = pools.get(name, 0) + segment["total_size"]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return {**self.start, "backend": type(self.backend).__name__, "graph_pool_bytes": sum(pools.values())}

    def memory(self) -> dict[str, int]:
        """The most bytes that PyTorch's allocator has held since the start: weights, caches, graphs and what runs."""
        return {"peak_reserved_bytes": torch.cuda.max_memory_reserved()}

    def prefill_ms(self, size: int, seed: int) -> float:
        """Latency of one prefill of ``size`` tokens, as the benchmark measures it; the one before is not counted."""
        for _ in range(2):
            requests = self.one_batch.prepare_synthetic_inputs_for_latency_test(1, size, [tokens(size, seed)])
            measured = self.one_batch.latency_test_run_once(
                "", self.bench, lambda *a: None, requests, 1, size, 1, 0, False, False, (), "", "all", 0
            )
        return float(measured["prefill_latency"]) * 1e3

    def prompt(self, new: list[int], prefix: int, seed: int) -> dict[str, Any]:
        """Last-token logits of requests with ``new`` tokens behind ``prefix`` cached ones, float32 [requests, vocab].

        With selections in ascending order (``slots_in_order``); how far a run in SGLang's own order lies off (relative
        L2) is said beside it. Also whether a second run gives the same bytes and how far off it is, and how far another
        context before the same last token moves them: a comparison of logits that see no context would show nothing.
        Where our plug-in serves: the same of a run of the same kernels without graphs, and the graph's variant, cuts.
        """
        with slots_in_order():
            answer = self._compare(new, prefix, seed)
        own = self._extend(new, prefix, seed)
        return answer | {"own_order_relative_l2": relative_l2(own, torch.from_numpy(answer["logits"]))}

    def _compare(self, new: list[int], prefix: int, seed: int) -> dict[str, Any]:
        logits = self._extend(new, prefix, seed)
        answer: dict[str, Any] = {"logits": logits.numpy(), "finite": bool(torch.isfinite(logits).all())}
        again = self._extend(new, prefix, seed)
        answer |= {"again_bitwise": torch.equal(logits, again), "again_relative_l2": relative_l2(again, logits)}
        answer["context_moves"] = relative_l2(self._extend(new, prefix, seed, context=1), logits)
        serving, variants = getattr(self.backend, "serving", None), getattr(self.backend, "variants", None)
        if serving is not None and variants is not None:
            chosen = variants.chosen  # of the run above
            bucket = min(b for b in variants.graphs if b >= sum(new))
            answer["variant"], answer["cuts"] = chosen, variants.graphs[bucket][chosen].plan.cuts
            serving.uncaptured = True
            try:
                plain = self._extend(new, prefix, seed)
            finally:
                serving.uncaptured = False
            answer["uncaptured_bitwise"] = torch.equal(logits, plain)
            answer["uncaptured_relative_l2"] = relative_l2(plain, logits)
        return answer

    def _extend(self, new: list[int], prefix: int, seed: int, context: int = 0) -> torch.Tensor:
        self.bench.clear()
        ids = [[*tokens(prefix + count - 1, seed * 100 + i + 50 * context), 9001 + i] for i, count in enumerate(new)]
        requests = self.one_batch.prepare_synthetic_inputs_for_latency_test(
            len(ids), prefix or len(ids[0]), [i[: prefix or None] for i in ids]
        )
        if prefix:
            self.bench.extend(requests)
            requests = self.one_batch.prepare_extend_inputs_for_correctness_test(
                SimpleNamespace(cut_len=prefix), ids, requests, self.bench.torch_runner
            )
        _, logits, _ = self.bench.extend(requests)
        self.bench.synchronize()
        return logits.float().cpu()

    def profile(self, size: int, runs: int = 4) -> str:
        """Two tables of ``runs`` prefills of ``size`` tokens: by time on the host, and by time on the GPU."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for seed in range(runs):
                self.prefill_ms(size, seed)
        rows = profiled.key_averages()
        orders = ("self_cpu_time_total", "self_cuda_time_total")
        return "\n".join(rows.table(sort_by=o, row_limit=40, max_name_column_width=70) for o in orders)


def main() -> None:
    """Load, say so, then answer orders until None comes. An answer is (True, result) or (False, what went wrong)."""
    connection = Connection(int(sys.argv[1]))
    worker: Worker | None = None
    order: Any = ("loaded", {})
    while order is not None:
        what, arguments = order
        try:
            worker = worker or Worker(sys.argv[2:])
            connection.send((True, getattr(worker, what)(**arguments)))
        except Exception as error:
            traceback.print_exc()
            connection.send((False, f"{type(error).__name__}: {error}"))
            if worker is None:
                return
        try:
            order = connection.recv()
        except EOFError:  # the bench is gone
            return


if __name__ == "__main__":
    main()
