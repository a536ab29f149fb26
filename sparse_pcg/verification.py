"""Proof on the spot: every captured graph of a runner against the same pieces uncaptured and with breaks, and eager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .batch import Batch
from .buckets import smallest_batch

if TYPE_CHECKING:
    from .graph_runner import GraphRunner

# Relative L2 distance of a row from the eager model's: a matrix product over n rows and one over the padded bucket
# differ in the last bits of their dtype. A row in which that tips a choice (which experts, which tokens) differs by
# more, in any two correct runs: CLOSE_ROWS is the share of rows that must be within tolerance.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
CLOSE_ROWS = 0.8
_SWAYS = 8  # an undecided choice falls either way in each: one of these very likely shows it


def row_distance(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative L2 distance of each row of ``got`` from that of ``want``, float32 [T]."""
    return (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp(min=1e-12)


def closeness(got: torch.Tensor, want: torch.Tensor, sway: torch.Tensor | None = None) -> tuple[float, bool]:
    """Median over the rows of ``row_distance``, and whether enough rows are within tolerance of ``want``.

    sway: see ``eager_sway``; a row may be twice as far away as ``want`` sways there, where that is above tolerance.
    """
    distance = row_distance(got, want)
    allowed = torch.full_like(distance, TOLERANCE[want.dtype])
    if sway is not None:
        allowed = torch.maximum(allowed, 2 * sway)
    return float(distance.median()), float((distance <= allowed).float().mean()) >= CLOSE_ROWS


def eager_sway(runner: GraphRunner, batch: Batch, want: torch.Tensor) -> torch.Tensor:
    """How far the eager model's own hidden states move when its weights change in their last bits: float32 [T].

    want: what it gives for ``batch``. The largest ``row_distance`` of a few such runs; a row that an undecided choice
    reaches moves by far more than the last bits. Leaves the weights as they were, the batch's KV as the last run did.
    """
    generator = torch.Generator(runner.device).manual_seed(0)
    weights = [p for p in runner.model.parameters() if p.dtype in TOLERANCE]
    saved = [p.detach().clone() for p in weights]
    sway = torch.zeros(len(want), device=want.device)
    try:
        for _ in range(_SWAYS):
            with torch.no_grad():
                for p, kept in zip(weights, saved, strict=True):
                    noise = torch.randn(p.shape, generator=generator, device=p.device)
                    p.copy_(kept * (1 + torch.finfo(p.dtype).eps * noise))
            sway = torch.maximum(sway, row_distance(runner.serve_checked(batch, "eager").hidden, want))
    finally:
        with torch.no_grad():
            for p, kept in zip(weights, saved, strict=True):
                p.copy_(kept)
    return sway


def judge(
    runner: GraphRunner, batch: Batch, got: torch.Tensor, eager: torch.Tensor
) -> tuple[float, bool, float | None]:
    """``closeness`` of ``got`` to the eager model's hidden states of ``batch``, and the share of undecided rows.

    Where too few rows are within tolerance, ``eager_sway`` counts, and the share is that of rows which it moves beyond
    tolerance; the batch's KV is then what its last run left. Else, or without memory for it, the share is None.
    """
    distance, close = closeness(got, eager)
    if close:
        return distance, True, None
    try:
        sway = eager_sway(runner, batch, eager)
    except torch.OutOfMemoryError:
        return distance, False, None
    return distance, closeness(got, eager, sway)[1], float((sway > TOLERANCE[eager.dtype]).float().mean())


@dataclass(frozen=True)
class Check:
    """One graph at one number of rows.

    bitwise: hidden states, logits and the request's KV pages equal those of the uncaptured run in every byte, hidden
        states and logits also those of a run with breaks.
    distance, close, undecided: see ``judge``.
    """

    bucket: int
    variant: str
    rows: int
    bitwise: bool
    distance: float
    close: bool
    undecided: float | None = None


@dataclass(frozen=True)
class Verification:
    """All checks; ``ok`` when every one holds."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether there was something to check and all of it holds."""
        return bool(self.checks) and all(c.bitwise and c.close for c in self.checks)

    def __str__(self) -> str:
        lines = [f"{'bucket':>7} {'rows':>6} variant  bitwise  distance from eager"]
        for c in self.checks:
            words = "equal" if c.bitwise else "DIFFERS"
            lines.append(
                f"{c.bucket:7} {c.rows:6} {c.variant:7}  {words:7}  {c.distance:.2e}{'' if c.close else ' TOO LARGE'}"
                + ("" if c.undecided is None else f", eager itself is undecided in {c.undecided:.0%} of the rows")
            )
        return "\n".join(lines)


def verify(runner: GraphRunner) -> Verification:
    """Check each captured bucket and variant with its largest and its smallest batch, on free pages of the KV pools."""
    checks = []
    for bucket in sorted(runner.bucket_sizes()):
        for variant in runner.variants(bucket):
            for rows in sorted({bucket, max(smallest_batch(bucket, runner.sizes), 1)}):
                check = _check(runner, bucket, variant, rows)
                if check is not None:
                    checks.append(check)
    return Verification(tuple(checks))


def _check(runner: GraphRunner, bucket: int, variant: str, rows: int) -> Check | None:
    if variant == "short" and rows > runner.index_topk:
        return None  # such a batch never takes the short graph
    generator = torch.Generator().manual_seed(1000 * bucket + rows)
    with runner.kv.request() as request:
        if variant == "cut" and "short" in runner.variants(bucket):
            # Rows that see more than index_topk tokens take the graph with cuts, however few they are.
            for start in range(0, runner.index_topk, runner.sizes[-1]):
                part = min(runner.sizes[-1], runner.index_topk - start)
                runner.serve_checked(_extend(runner, request, part, generator), "uncaptured")
        batch = _extend(runner, request, rows, generator)
        eager = runner.serve_checked(batch, "eager").hidden
        breaks = runner.serve_checked(batch, "breaks")
        plain = runner.serve_checked(batch, "uncaptured")
        before = pages_of(runner, request.pages)
        replay = runner.serve_checked(batch, "replay")
        pairs = [(other.hidden, replay.hidden) for other in (plain, breaks)]
        pairs += [(other.logits, replay.logits) for other in (plain, breaks)]
        pairs += list(zip(before, pages_of(runner, request.pages), strict=True))
        bitwise = all(same_bytes(a, b) for a, b in pairs)
        bitwise = bitwise and replay.bucket == bucket and replay.variant == variant
        return Check(bucket, variant, rows, bitwise, *judge(runner, batch, replay.hidden, eager))


def _extend(runner: GraphRunner, request: Any, rows: int, generator: torch.Generator) -> Batch:
    prefix = request.num_tokens
    request.extend(rows)
    vocab = int(runner.model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    ids = torch.randint(vocab, (rows,), generator=generator)
    table = torch.tensor([request.pages], dtype=torch.int32)
    return Batch(ids.to(runner.device), [rows], [prefix], table.to(runner.device))


def pages_of(runner: GraphRunner, pages: list[int]) -> list[torch.Tensor]:
    """Copies of these pages of every cache."""
    context = runner.kv.context(None)
    caches = [c.view(runner.kv.num_pages, -1) for c in (*context.latent_kv.values(), *context.index_k.values())]
    return [c[pages].clone() for c in caches]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape and in every byte."""
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
