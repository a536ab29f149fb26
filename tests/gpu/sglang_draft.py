"""SGLang's NextN draft with the plug-in: its prefill captured, the same kernels without graphs, and as SGLang runs it.

``python -m tests.gpu.sglang_draft OUT`` where SGLang 0.5.17 and this project are installed, on one GPU: writes
h200-sglang-draft.json into OUT, anew after each step. Target: 4 layers of a GLM-5.2 shape, 8 heads, invented weights.
``in_order``: every selection in ascending order, since SGLang's top-k gives another order in each run (``own_order``).
SGLang's dense attention for short prompts is off, in eager runs too, unless the environment sets its threshold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sparse_pcg.bench.one_batch_model import write_model
from sparse_pcg.bench.one_batch_worker import Worker, ascending, relative_l2, slots_in_order, tokens
from sparse_pcg.bench.timing import provenance, write_json

LAYERS, HEADS = 4, 8
BUCKETS = ("128", "512", "1024")
UNTOUCHED = -7
# (new tokens of each request, cached tokens of each); two layouts with the same number of rows among them.
STEPS = (
    ([128], 0), ([512], 0), ([100], 0), ([60, 50], 0), ([500], 2000),
    ([100, 60], 2040), ([60, 100], 2040), ([128], 2000), ([1000], 3000),
)  # fmt: skip
TIMED = (([128], 0), ([512], 0), ([1000], 0), ([100], 2000), ([500], 2000))
TURNS, WARM = 24, 4
_FLAGS = (
    "--batch-size 1 --output-len 1 --disable-decode-cuda-graph --dsa-prefill-backend flashmla_sparse "
    "--dsa-decode-backend flashmla_sparse --mem-fraction-static 0.6 --max-total-tokens 16384 --log-level info "
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --max-running-requests 8 --cuda-graph-backend-prefill breakable "
    "--cuda-graph-max-bs-prefill 1024 --load-format dummy --nccl-port 29641"
)


@dataclass
class Drafted:
    """A target and its draft as SGLang's EAGLE worker builds them."""

    worker: Worker
    target: Any
    draft: Any
    runner: Any
    config: dict[str, Any]

    @classmethod
    def build(cls) -> Drafted:
        folder = write_model(Path(tempfile.mkdtemp()) / "model", LAYERS, HEADS)
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
        flags = ["--model-path", str(folder), *_FLAGS.split()]
        worker = Worker([*flags, "--input-len", *BUCKETS, "--cuda-graph-bs-prefill", *BUCKETS])
        # Not before: the worker lets SGLang register what Transformers knows already.
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
        from sglang.srt.model_executor.model_runner import ModelRunner

        target = worker.bench.torch_runner
        args = target.server_args
        with speculative_moe_backend_context(), speculative_moe_a2a_backend_context():
            draft = ModelRunner(
                model_config=ModelConfig.from_server_args(args, model_path=str(folder), is_draft_model=True),
                mem_fraction_static=args.mem_fraction_static,
                gpu_id=0,
                ps=target.ps,
                nccl_port=target.dist_port,
                server_args=args,
                is_draft_worker=True,
                req_to_token_pool=target.req_to_token_pool,
                token_to_kv_pool_allocator=target.token_to_kv_pool_allocator,
                memory_pool_config=target.memory_pool_config,
            )
            draft.alloc_memory_pool(target.memory_pool_config)
            draft.model.set_embed_and_head(*target.model.get_embed_and_head())
            draft.init_attention_backends()
            draft.init_cuda_graphs(capture_decode_cuda_graph=False)
            draft.init_prefill_cuda_graph(force_for_draft_worker=True)
        return cls(worker, target, draft, draft.prefill_cuda_graph_runner, config)

    def described(self) -> dict[str, Any]:
        """What was captured: graphs and cuts per bucket and variant."""
        graphs = self.runner.backend.variants.graphs.items()
        return {
            "model": type(self.draft.model).__name__,
            "attention": type(self.draft.attn_backend).__name__,
            "backend": type(self.runner.backend).__name__,
            "cuts": {str(b): {v: [g.plan.captures, g.plan.cuts] for v, g in kept.items()} for b, kept in graphs},
        }

    def prepared(self, new: Sequence[int], prefix: int, seed: int, context: int = 0) -> tuple[Any, torch.Tensor]:
        """A scheduled batch and the target's hidden states; ``context`` draws another prefix."""
        one_batch = self.worker.one_batch
        self.target.req_to_token_pool.clear()
        self.target.token_to_kv_pool_allocator.clear()
        ids = [
            [*tokens(prefix, seed * 100 + i + 50 * context), *tokens(count, seed * 100 + 31 + i)]
            for i, count in enumerate(new)
        ]
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(
            len(ids), prefix or len(ids[0]), [x[: prefix or None] for x in ids]
        )
        if prefix:
            first = self._scheduled(requests)
            self.run(first, self._hidden(sum(first.extend_lens), 7 * seed + 1000 * context + 3), "eager")
            cut = SimpleNamespace(cut_len=prefix)
            requests = one_batch.prepare_extend_inputs_for_correctness_test(cut, ids, requests, self.draft)
        return self._scheduled(requests), self._hidden(sum(new), seed)

    def _hidden(self, rows: int, seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        size = self.config["hidden_size"]
        return torch.randn(rows, size, generator=generator, device="cuda", dtype=torch.bfloat16)

    def _scheduled(self, requests: Any) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        draft, page = self.draft, self.target.server_args.page_size
        allocator = draft.token_to_kv_pool_allocator
        tree = self.worker.one_batch.TreeCacheNamespace(
            page_size=page, device="cuda", token_to_kv_pool_allocator=allocator
        )
        batch = ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=draft.req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=tree,
            model_config=draft.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        return batch

    def forward_batch(self, batch: Any, states: torch.Tensor) -> Any:
        """What the EAGLE worker hands to a draft's extend, with a seed buffer one row longer than needed."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

        batch.spec_info = EagleDraftExtendInput(
            hidden_states=states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        made = ForwardBatch.init_new(
            batch, self.draft, capture_hidden_mode=CaptureHiddenMode.LAST, return_hidden_states_before_norm=False
        )
        made.return_logprob = False
        shape = (len(batch.seq_lens) + 1, self.config["index_topk"])
        made.spec_info.dsa_seed_topk_capture = torch.full(shape, UNTOUCHED, dtype=torch.int32, device="cuda")
        made.spec_info.dsa_seed_topk_select = (torch.cumsum(made.extend_seq_lens, 0) - 1).long()
        return made

    @torch.no_grad()
    def run(self, batch: Any, states: torch.Tensor, mode: str) -> dict[str, Any]:
        """mode: "replay", "uncaptured" (the same kernels, no graphs) or "eager" (SGLang without prefill graphs)."""
        made, serving = self.forward_batch(batch, states), self.runner.backend.serving
        self.draft.prefill_cuda_graph_runner = None if mode == "eager" else self.runner
        serving.uncaptured = mode == "uncaptured"
        try:
            output = self.draft.forward(made)
            torch.cuda.synchronize()
        finally:
            self.draft.prefill_cuda_graph_runner, serving.uncaptured = self.runner, False
        return {
            "logits": output.logits_output.next_token_logits.float().clone(),
            "hidden": output.logits_output.hidden_states.float().clone(),
            "seed": made.spec_info.dsa_seed_topk_capture.clone(),
            "graph": bool(output.can_run_graph),
        }

    def milliseconds(self, new: Sequence[int], prefix: int) -> dict[str, Any]:
        """Median and range of a replay and of SGLang's eager extend, turn by turn."""
        batch, states = self.prepared(new, prefix, 77)
        times: dict[str, list[float]] = {"replay": [], "eager": []}
        for _ in range(TURNS):
            for mode, taken in times.items():
                made = self.forward_batch(batch, states)
                self.draft.prefill_cuda_graph_runner = None if mode == "eager" else self.runner
                torch.cuda.synchronize()
                at = time.perf_counter()
                with torch.no_grad():
                    self.draft.forward(made)
                torch.cuda.synchronize()
                taken.append((time.perf_counter() - at) * 1e3)
                self.draft.prefill_cuda_graph_runner = self.runner
        kept = {mode: taken[WARM:] for mode, taken in times.items()}
        return {m: {"median": round(statistics.median(t), 3), "range": [round(min(t), 3), round(max(t), 3)]}
                for m, t in kept.items()}  # fmt: skip


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Bytes, distances and seeds of two runs."""
    return {
        "bitwise": {k: torch.equal(a[k], b[k]) for k in ("logits", "hidden", "seed")},
        "l2": {k: relative_l2(a[k], b[k]) for k in ("logits", "hidden")},
        "seed_same_sets": torch.equal(ascending(a["seed"][:-1]), ascending(b["seed"][:-1])),
        "seed_rest_untouched": bool((a["seed"][-1] == UNTOUCHED).all()),
    }


def compared(drafted: Drafted, new: Sequence[int], prefix: int, seed: int) -> dict[str, Any]:
    """One batch in every way.

    graph: whether a replay, and an eager run, was served by a graph. Where no graph served the replay, all runs are
    eager ones, their equality shows nothing, and variant is left from the batch before.
    """
    batch, states = drafted.prepared(new, prefix, seed)
    replays, eagers = ([drafted.run(batch, states, mode) for _ in range(2)] for mode in ("replay", "eager"))
    step: dict[str, Any] = {"new": list(new), "prefix": prefix, "variant": drafted.runner.backend.variants.chosen}
    step["own_order"] = {"replay_again": compare(*replays), "eager_again": compare(*eagers)}
    with slots_in_order():
        modes = ("replay", "replay", "uncaptured", "eager", "eager")
        replay, again, plain, eager, eager_again = (drafted.run(batch, states, mode) for mode in modes)
        step["graph"] = [replay["graph"], eager["graph"]]
        step["in_order"] = {
            "replay_again": compare(replay, again),
            "replay_uncaptured": compare(replay, plain),
            "replay_eager": compare(replay, eager),
            "eager_again": compare(eager, eager_again),
        }
        if prefix:
            other = drafted.prepared(new, prefix, seed, context=1)[0]
            moved = drafted.run(other, states, "replay")["logits"]
            step["context_moves"] = relative_l2(moved, replay["logits"])
    return step | {"finite": bool(replay["logits"].isfinite().all())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "h200-sglang-draft.json"
    os.environ.setdefault("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")  # graphs hold no dense attention
    drafted = Drafted.build()
    head = {"bench": "sglang-draft", **provenance(), "command": "python -m tests.gpu.sglang_draft OUT"}
    head |= {"sglang": version("sglang"), "layers": LAYERS, "heads": HEADS, "draft": drafted.described()}
    result: dict[str, Any] = {**head, "steps": [], "ms": []}
    for seed, (new, prefix) in enumerate(STEPS, 1):
        result["steps"].append(compared(drafted, new, prefix, seed))
        write_json(out, result)
    for new, prefix in TIMED:
        result["ms"].append({"new": new, "prefix": prefix, **drafted.milliseconds(new, prefix)})
        write_json(out, result)


if __name__ == "__main__":
    main()
