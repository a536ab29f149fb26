"""Generate tokens with a prefill runner: prompts run through its buckets, then one graph per batch size decodes.

A decode graph has no cut: its selection lies in the graph too, over logits for a bounded context, and reads the
lengths on the device. It is right on both sides of ``index_topk``, since a selection of all that a row sees is one.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from custom_ops._register import debug_checks
from custom_ops.batch_metadata import PAGE, BatchMetadata, use_context

from . import session
from .batch import Batch, check_batch, dummy, fill
from .errors import CaptureError
from .gates import ATTENTION, INDEXER
from .kv import PrefixCache, RequestPages, page_table
from .plan import Plan
from .runner import PrefillRunner
from .served import Bucket, no_grad

DECODE_SIZES = (2, 4, 8, 16, 32, 64)


@dataclass
class _Decode:
    """What decodes one batch size, for contexts up to a bound: the graph's parts, and the plan.

    missing: why there is no plan, as it is counted; None where none is wanted.
    """

    bucket: Bucket
    plan: Plan | None = None
    missing: tuple[str, str] | None = None


class Decoder:
    """Decodes a token for each of up to 64 requests.

    The batch is padded to a size of ``DECODE_SIZES``. A graph is captured when a size is first met with a context that
    the captured ones do not reach; contexts are rounded up to powers of two.
    """

    def __init__(self, runner: PrefillRunner) -> None:
        self._runner = weakref.ref(runner)
        self._decodes: dict[tuple[int, int], _Decode] = {}
        self._metadata = runner._allocate(DECODE_SIZES[-1], DECODE_SIZES[-1])
        runner._sharers.add(self)  # type: ignore[arg-type]  # its graphs lie in the runner's pool: they go together

    def step(self, batch: Batch, context: int, mode: str = "replay") -> torch.Tensor:
        """Logits [B, vocab] of ``batch``, one new token per request; its KV is written.

        context: bound on prefix + 1 of each request. mode: "replay" or "uncaptured" (bitwise the same).
        """
        runner = self._require()
        host = check_batch(batch, runner.kv.num_pages, runner.options.debug_checks)
        size = next(s for s in DECODE_SIZES if s >= host.rows)
        bound = min(max(PAGE, 1 << (context - 1).bit_length()), self._metadata.page_table.shape[1] * PAGE)
        with runner._lock, no_grad():
            decode = self._decodes.get((size, bound)) or self._prepare(size, bound)
            fill(self._metadata, batch, host, runner._staging)
            self._bind(size, bound)
            forward_context = runner._context(self._metadata)
            with use_context(forward_context), debug_checks(runner.options.debug_checks):
                if mode == "replay" and runner.options.graphs != "off":
                    runner.gates.record(ATTENTION, INDEXER)
                    if decode.missing is not None:
                        runner._leave(*decode.missing)
                if mode == "replay" and decode.plan is not None:
                    if forward_context.loads is not None:
                        forward_context.loads.wait()
                    decode.plan.replay()
                    outputs = decode.plan.outputs
                else:
                    outputs = decode.bucket.graph.program.run(decode.bucket.inputs)
                hidden = outputs[decode.bucket.results[0]][: host.rows]
                return runner.model.head(hidden)  # type: ignore[operator]

    def drop(self) -> None:
        """Drop the graphs; they are captured anew when they are needed."""
        self._decodes.clear()

    def bucket_sizes(self) -> list[int]:
        """None that its runner would capture anew."""
        return []

    def _require(self) -> PrefillRunner:
        runner = self._runner()
        assert runner is not None
        return runner

    def _bind(self, size: int, bound: int) -> None:
        """What a cut reads on the host: the same for every batch that a graph serves."""
        metadata: BatchMetadata = self._metadata
        metadata.num_rows = metadata.num_requests = size
        metadata.max_kv_len = bound

    def _prepare(self, size: int, bound: int) -> _Decode:
        runner = self._require()
        batch, host = dummy(size, runner.device)
        fill(self._metadata, batch, host, runner._staging)
        self._bind(size, bound)
        with use_context(runner._context(self._metadata)):
            bucket = runner._trace(self._metadata, size)
            decode = _Decode(bucket)
            if session.frozen():
                decode.missing = "size", f"decode of {size} rows and {bound} tokens was not captured before freeze()"
            elif runner.options.graphs != "off" and not runner.gates.whole:
                runner._share_pool(bucket.graph)
                try:
                    decode.plan = bucket.graph.plan(bucket.inputs, variant="whole", label=f", decode of {size}")
                except CaptureError as error:
                    decode.missing = "capture_failed", f"decode of {size} rows: {error}"
        self._decodes[size, bound] = decode
        return decode


_DECODERS: weakref.WeakKeyDictionary[PrefillRunner, Decoder] = weakref.WeakKeyDictionary()


def decoder_of(runner: PrefillRunner) -> Decoder:
    """The runner's decoder; its graphs are kept as long as the runner's."""
    if runner not in _DECODERS:
        _DECODERS[runner] = Decoder(runner)
    return _DECODERS[runner]


@dataclass
class _Sequence:
    prompt: list[int]
    pages: RequestPages
    done: int  # tokens whose KV is stored
    new: list[int] = field(default_factory=list)


def generate(
    runner: PrefillRunner,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    max_new_tokens: int = 64,
    eos: int | Collection[int] | None = None,
) -> list[list[int]]:
    """Continue each prompt greedily; returns the new tokens of each, in order, an ``eos`` at its end included.

    runner: captured or not; what it has not captured runs uncaptured. prompts: token ids, at least one each. Prompts
    are served together, as many as the KV pool has room for, and share the full pages of a common prefix. Every page
    that is taken is given back. Decode graphs are captured when they are first needed, and kept with the runner.

    Raises ValueError naming the prompt for one that is empty, has an id outside the vocabulary, or with its new tokens
    is longer than the model or the pool allows, before anything runs; OutOfPages where others hold the pages.
    """
    ids = _checked(runner, prompts, max_new_tokens)
    try:
        given = () if eos is None else eos if isinstance(eos, Iterable) else (eos,)
        stops = {operator.index(token) for token in given}
    except TypeError:
        raise ValueError(f"generate: eos must be a token id, several, or None, got {eos!r}") from None
    return _Generation(runner, ids, max_new_tokens, stops).run()


def _checked(
    runner: PrefillRunner, prompts: Sequence[Sequence[int] | torch.Tensor], max_new_tokens: int
) -> list[list[int]]:
    config: Any = runner.model.config
    pages = runner.kv.num_pages - 1
    limit = min(pages * PAGE, runner.max_positions or pages * PAGE)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be an int of at least 1, got {max_new_tokens!r}")
    checked = []
    for i, prompt in enumerate(prompts):
        given = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        try:
            ids = [operator.index(token) for token in given]
        except TypeError:
            raise ValueError(f"generate: prompts[{i}] must be token ids, got {prompt!r}") from None
        if not ids:
            raise ValueError(f"generate: prompts[{i}] must have at least one token, got none")
        wrong = [token for token in ids if not 0 <= token < config.vocab_size]
        if wrong:
            raise ValueError(f"generate: prompts[{i}] must be ids from 0 to {config.vocab_size - 1}, got {wrong[0]}")
        if len(ids) + max_new_tokens - 1 > limit:
            raise ValueError(
                f"generate: prompts[{i}] must with its new tokens be at most {limit} tokens (of the model: "
                f"{runner.max_positions}, of the {pages} pages: {pages * PAGE}), got {len(ids)} + {max_new_tokens}"
            )
        checked.append(ids)
    return checked


class _Generation:
    """One call of ``generate``."""

    def __init__(self, runner: PrefillRunner, prompts: list[list[int]], max_new: int, stops: set[int]) -> None:
        self.runner, self.prompts, self.max_new, self.stops = runner, prompts, max_new, stops
        self.decoder = decoder_of(runner)
        self.context = max((len(p) for p in prompts), default=1) + max_new - 1
        self.cache = PrefixCache(runner.kv)  # type: ignore[arg-type]
        self.waiting = deque(range(len(prompts)))
        self.active: dict[int, _Sequence] = {}
        self.results: list[list[int]] = [[] for _ in prompts]
        self._table: tuple[list[int], torch.Tensor] | None = None  # of the requests that decode

    def run(self) -> list[list[int]]:
        try:
            while self.waiting or self.active:
                self._admit()
                self._prefill()
                self._decode()
        finally:
            for sequence in self.active.values():
                sequence.pages.close()
            self.cache.close()
        return self.results

    def _admit(self) -> None:
        """Take prompts in order while there is room for all that they will store."""
        while self.waiting and len(self.active) < DECODE_SIZES[-1]:
            number = self.waiting[0]
            prompt = self.prompts[number]
            # A prompt that begins like one that is being computed waits for those pages.
            if any(_common_page(prompt, s.prompt) for s in self.active.values() if s.done < len(s.prompt)):
                return
            pages = self.cache.request(prompt)
            done = pages.num_tokens
            total = len(prompt) + self.max_new - 1
            needed = -(-total // PAGE) - len(pages.pages)
            if not self.cache.make_room(needed) and self.active:
                pages.close()
                return
            try:
                pages.extend(total - done)
            except Exception:
                pages.close()
                raise
            self.active[number] = _Sequence(prompt, pages, done)
            self.waiting.popleft()

    def _prefill(self) -> None:
        """Run all prompts that are not computed yet, in chunks of at most the largest bucket."""
        while parts := self._chunks():
            table = page_table([s.pages for s, _ in parts])
            batch = self._batch([(s, s.prompt[s.done : s.done + new]) for s, new in parts], table)
            tokens = self.runner.forward(batch).logits.argmax(dim=-1).tolist()
            for (sequence, new), token in zip(parts, tokens, strict=True):
                sequence.done += new
                if sequence.done == len(sequence.prompt):
                    self.cache.insert(sequence.prompt, sequence.pages)
                    sequence.new.append(token)
            self._finish()

    def _chunks(self) -> list[tuple[_Sequence, int]]:
        room = self.runner.sizes[-1]
        parts = []
        for sequence in self.active.values():
            new = min(len(sequence.prompt) - sequence.done, room)
            if new > 0:
                parts.append((sequence, new))
                room -= new
        return parts

    def _decode(self) -> None:
        """One more token for each active request."""
        sequences = list(self.active.values())
        if sequences:
            if self._table is None or self._table[0] != list(self.active):  # their pages are reserved: they stay
                self._table = list(self.active), page_table([s.pages for s in sequences], self.runner.device)
            batch = self._batch([(s, s.new[-1:]) for s in sequences], self._table[1])
            tokens = self.decoder.step(batch, self.context).argmax(dim=-1).tolist()
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.done += 1
                sequence.new.append(token)
            self._finish()

    def _finish(self) -> None:
        for number, sequence in list(self.active.items()):
            if len(sequence.new) == self.max_new or (sequence.new and sequence.new[-1] in self.stops):
                self.results[number] = sequence.new
                sequence.pages.close()
                del self.active[number]

    def _batch(self, parts: list[tuple[_Sequence, list[int]]], table: torch.Tensor) -> Batch:
        return Batch(
            torch.tensor([token for _, tokens in parts for token in tokens]),
            [len(tokens) for _, tokens in parts],
            [sequence.done for sequence, _ in parts],
            table,
        )


def _common_page(a: list[int], b: list[int]) -> bool:
    return len(a) > PAGE and len(b) >= PAGE and a[:PAGE] == b[:PAGE]
