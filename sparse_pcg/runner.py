"""Serve prefill batches of a model: buckets, padding, static buffers, and the modes that prove a replay right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from custom_ops._register import debug_checks

from .batch import Batch
from .gates import Deployment
from .graph_runner import MODES, GraphRunner
from .options import Options
from .plan import Plan
from .served import KV, Captured, Served, no_grad


@dataclass(frozen=True)
class PrefillOutput:
    """logits: [B, vocab], of each request's last token. hidden: [T, hidden], after the final norm.

    bucket, variant: of the graph that was replayed, or None where none was.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    bucket: int | None = None
    variant: str | None = None


class PrefillRunner(GraphRunner):
    """Runs ``model`` over batches, replaying captured graphs wherever a bucket fits.

    model: a module with ``forward(**rows) -> hidden`` whose required parameters are named like the row buffers of
        ``BatchMetadata`` (``input_ids``, ``positions``, ``kv_lens``, ...), with ``head(hidden) -> logits`` and a
        ``config.index_topk``.
    kv: the KV pools (``sparse_pcg.kv.PagedKV``).
    deployment: how the model is served; what capture does not hold for is off (see ``gates``).
    selection_group: a ``torch.distributed`` process group, of which all ranks attend what the first one's indexer
        selects; None: each what its own does. A broadcast at every cut: for providers of which equal inputs do not
        always give an equal selection. Ours do.

    Raises ValueError naming a required parameter of ``forward`` that no buffer has.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kv: KV,
        options: Options | None = None,
        deployment: Deployment | None = None,
        selection_group: Any = None,
    ) -> None:
        super().__init__(model, kv, options, deployment, selection_group)

    def forward(self, batch: Batch, mode: str = "replay") -> PrefillOutput:
        """Prefill ``batch`` and write its KV.

        mode: "replay"; "uncaptured", the same compiled pieces and bucket without graphs (bitwise the same); "breaks",
        as uncaptured, with every op that mixes rows in its reduction on the valid rows alone (bitwise the same);
        "eager", the model itself on the unpadded rows.
        Raises ValueError naming the field of a batch that does not hold together; nothing is written then.
        """
        host = self._host(batch, mode)
        with self._lock, no_grad(), debug_checks(self.options.debug_checks):
            if host.rows == 0:
                return empty_output(self)
            return output_of(self, self._serve(batch, host, mode), host.rows, len(host.new_lens))

    def serve_checked(self, batch: Batch, mode: str) -> PrefillOutput:
        """``forward``."""
        return self.forward(batch, mode)

    def plan_of(self, output: PrefillOutput) -> Plan | None:
        """The plan that gave ``output``; None if it was not a replay, or the plan is gone."""
        bucket = self._buckets.get(output.bucket) if output.bucket is not None else None
        return bucket.plans.get(output.variant or "") if bucket is not None else None


def output_of(runner: GraphRunner, served: Served, rows: int, requests: int) -> PrefillOutput:
    """The output of a batch of ``rows`` rows that ``runner`` has just served."""
    hidden = served.results[0][:rows]
    if served.variant is not None and not runner.options.static_outputs:
        hidden = hidden.clone()
    last = served.last_rows[:requests]
    logits = runner.model.head(hidden.index_select(0, last))  # type: ignore[operator]
    return PrefillOutput(logits, hidden, served.bucket, served.variant)


def empty_output(runner: GraphRunner) -> PrefillOutput:
    """Of a batch without rows."""
    weight = next(iter(runner.model.parameters()))
    hidden = torch.empty(0, runner.model.config.hidden_size, dtype=weight.dtype, device=runner.device)  # type: ignore[union-attr,arg-type]
    return PrefillOutput(runner.model.head(hidden), hidden)  # type: ignore[operator]


__all__ = ["MODES", "Captured", "PrefillOutput", "PrefillRunner"]
