"""The draft extend: the NextN layer over a prefilled batch, with the treatment that the target's prefill has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from custom_ops._register import debug_checks

from .batch import Batch, HostBatch
from .gates import DRAFT, Deployment
from .graph_runner import GraphRunner
from .options import Options
from .plan import Plan
from .runner import PrefillOutput, PrefillRunner, empty_output, output_of
from .served import KV, Bucket, Captured, no_grad

HIDDEN = "target_hidden"


class DraftRunner(GraphRunner):
    """Runs ``draft`` over the batches that ``target`` has prefilled, from graphs in the target's pool.

    draft: a module like a ``PrefillRunner``'s (``sparse_pcg.models.NextN``) whose forward also takes
        ``target_hidden`` [rows, hidden] and returns (hidden, selection), the selection int32 [rows, index_topk].
    kv: pools with the draft's layer, whose pages the target's page tables name.
    options: by default the target's. The selection is broadcast where the target's is.

    The target's ``drop()`` and ``refresh()`` act on both.
    """

    FURTHER = (HIDDEN,)

    def __init__(
        self,
        draft: torch.nn.Module,
        kv: KV,
        target: PrefillRunner,
        options: Options | None = None,
        deployment: Deployment | None = None,
    ) -> None:
        self.target = target
        super().__init__(
            draft, kv, options or target.options, deployment or target.deployment, target.selection_group
        )
        self._seed: torch.Tensor | None = None
        target._sharers.add(self)

    def _further_rows(self, rows: int) -> dict[str, torch.Tensor]:
        weight = next(iter(self.model.parameters()))
        size = self.model.config.hidden_size  # type: ignore[union-attr]
        return {HIDDEN: torch.zeros(rows, size, dtype=weight.dtype, device=self.device)}  # type: ignore[arg-type]

    def capture(self, progress: bool = True) -> list[Captured]:
        """As the target's ``capture``, which comes first where it has not been: the draft's graphs lie in its pool.

        Captures nothing where the gate ``draft_in_graph`` is off.
        """
        if not self.gates.on(DRAFT):
            return []
        self.target.capture(progress)
        return super().capture(progress)

    def _share_pool(self, graph: Any) -> None:
        graph.share_pool(self.target.graphs()[0])

    def _complete(self, plan: Plan, bucket: Bucket) -> None:
        selection = bucket.results[1]
        plan.add(lambda: self._publish(plan.outputs[selection]), "publication of the selection", "live")

    def _publish(self, selection: torch.Tensor) -> None:
        """The selection at each request's last row, into this step's seed buffer: both change every step."""
        if self._seed is not None:
            last = self.metadata.last_rows[: self._seed.shape[0]]
            torch.index_select(selection, 0, last, out=self._seed)

    def forward(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        tail_ids: torch.Tensor,
        seed_out: torch.Tensor | None = None,
        mode: str = "replay",
    ) -> PrefillOutput:
        """Extend the draft by the batch that the target has prefilled: row t takes the token after its own.

        hidden: [T, hidden], the target's of the same rows. tail_ids: int64 or int32 [B], what follows each request's
        last row: the sampled token, or the prompt's next one where the chunk is not its last. seed_out: int32 [B,
        index_topk] or None, written: the slots that each request's last row selected, -1 where there are fewer. mode:
        as in ``PrefillRunner.forward``. A batch with input_embeds runs uncaptured; its tails are embedded.
        Raises ValueError naming what does not hold together; nothing is written then.
        """
        host = self._host(batch, mode)
        self._check(host, batch, hidden, tail_ids, seed_out)
        with self._lock, no_grad(), debug_checks(self.options.debug_checks):
            if host.rows == 0:
                return empty_output(self)
            if mode == "replay" and not self.gates.on(DRAFT) and self.options.graphs != "off":
                self.gates.record(DRAFT)
                mode = "uncaptured"
            if batch.input_embeds is not None:
                batch = self._shifted_embeds(batch, host, tail_ids)
            requests, self._seed = len(host.new_lens), seed_out
            try:
                served = self._serve(batch, host, mode, {HIDDEN: hidden}, tail_ids)
            finally:
                self._seed = None
            if served.variant is None and seed_out is not None:
                torch.index_select(served.results[1], 0, served.last_rows[:requests], out=seed_out)
            return output_of(self, served, host.rows, requests)

    def serve_checked(self, batch: Batch, mode: str) -> PrefillOutput:
        """``forward`` with hidden states and tails that are a function of the batch, published as a run would be."""
        rows, requests = batch.input_ids.shape[0], batch.page_table.shape[0]
        generator = torch.Generator().manual_seed(rows)
        width = int(self.model.config.hidden_size)  # type: ignore[union-attr,arg-type]
        hidden = torch.randn(rows, width, generator=generator).to(self.further_rows[HIDDEN])
        seed = torch.empty(requests, self.index_topk, dtype=torch.int32, device=self.device)
        return self.forward(batch, hidden, batch.input_ids[:requests], seed, mode)

    def _shifted_embeds(self, batch: Batch, host: HostBatch, tail_ids: torch.Tensor) -> Batch:
        """The same shift as of the ids: each row the embedding after its own, a request's last row its tail's."""
        assert batch.input_embeds is not None
        embeds = batch.input_embeds.roll(-1, 0)
        table: torch.Tensor = self.model.embed_tokens  # type: ignore[assignment]
        tails = F.embedding(tail_ids.to(self.device, torch.int64), table)
        embeds[torch.tensor(host.last_rows, device=embeds.device)] = tails.to(embeds.dtype)
        return replace(batch, input_embeds=embeds)

    def _check(
        self,
        host: HostBatch,
        batch: Batch,
        hidden: torch.Tensor,
        tail_ids: torch.Tensor,
        seed_out: torch.Tensor | None,
    ) -> None:
        requests, width = len(host.new_lens), self.model.config.hidden_size  # type: ignore[union-attr]
        ints, floats = (torch.int64, torch.int32), (torch.bfloat16, torch.float16, torch.float32)
        _require("hidden", hidden, floats, (host.rows, int(width)), self.device)  # type: ignore[arg-type]
        _require("tail_ids", tail_ids, ints, (requests,), None)
        if seed_out is not None:
            _require("seed_out", seed_out, (torch.int32,), (requests, self.index_topk), self.device)
        embeds = batch.input_embeds
        if embeds is not None and embeds.shape[1] != width:
            raise ValueError(f"draft: input_embeds must be [{host.rows}, {width}], got {list(embeds.shape)}")


def _require(
    name: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device | None
) -> None:
    given = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
    fits = isinstance(value, torch.Tensor) and value.dtype in dtypes and tuple(value.shape) == shape
    if not fits or (device is not None and value.device != device):
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"draft: {name} must be {kinds} {list(shape)} on {device or 'any device'}, got {given}")
