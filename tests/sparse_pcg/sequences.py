"""Random batch sequences, as a scheduler makes them, served twice and compared byte by byte.

Requests arrive, share full pages of a prefix, go on in chunks, lose their pages (and are computed anew, or come back
from the host), finish, and leave their pages to others. ``Driver.run`` serves them on a ``Subject``:

- without a twin each batch runs uncaptured, the caches are put back, and it is replayed: all results and all bytes of
  the caches must be the same;
- with a twin each batch runs on both in lockstep. The twin's requests are never evicted, the subject's go to the host
  and back; results and the bytes of every token's KV must be the same.

Before every forward the dummy page, the row buffers and the graphs' memory are poisoned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import sparse_pcg
from custom_ops.batch_metadata import PAGE, ROW_BUFFERS
from sparse_pcg.kv import OutOfPages, PagedKV, RequestPages, page_table
from tests.sparse_pcg.toys import same

MAX_LIVE = 5  # requests at one time, finished ones that stay for their prefix included


@dataclass
class Subject:
    """What serves the batches.

    forward: (batch, mode) -> tensors that must agree. vocab: token ids are below it. largest: rows of a batch at most.
    runners: whose row buffers and graph memory are poisoned. host: where requests are evicted to (only with a twin).
    """

    kv: PagedKV
    forward: Callable[[sparse_pcg.Batch, str], Sequence[torch.Tensor]]
    vocab: int
    largest: int
    runners: Sequence[Any] = ()
    host: Any = None

    @classmethod
    def of(cls, runner: sparse_pcg.PrefillRunner, kv: PagedKV, host: Any = None) -> Subject:
        """A prefill runner alone."""

        def forward(batch: sparse_pcg.Batch, mode: str) -> Sequence[torch.Tensor]:
            out = runner.forward(batch, mode)
            return out.hidden, out.logits

        vocab = int(runner.model.config.vocab_size)  # type: ignore[union-attr,arg-type]
        return cls(kv, forward, vocab, runner.sizes[-1], (runner,), host=host)

    @property
    def pools(self) -> list[torch.Tensor]:
        """All caches as bytes, [layers, pages, bytes of a page]."""
        kv = self.kv
        return [p.view(torch.uint8).view(p.shape[0], kv.num_pages, -1) for p in (kv.latent_pool, kv.index_pool)]

    def poison(self) -> None:
        """NaN in the dummy page, nonsense in the row buffers, NaN in the memory of emulated graphs."""
        for pool in self.pools:
            pool[:, 0] = 0xFF
        for runner in self.runners:
            for name in ROW_BUFFERS:
                getattr(runner.metadata, name).fill_(0x7FFF_0000)
            for graph in runner.graphs():
                graph.poison()

    def token_bytes(self, pages: list[int], tokens: int) -> list[torch.Tensor]:
        """The KV of a request's first ``tokens`` tokens, in every layer."""
        kv = self.kv
        index = kv.index_pool[:, pages]
        return [
            kv.latent_pool.view(torch.uint8).unflatten(1, (-1, PAGE))[:, pages].flatten(1, 2)[:, :tokens],
            index[:, :, : PAGE * 128].reshape(len(kv.index_k), -1, 128)[:, :tokens],
            index[:, :, PAGE * 128 :].reshape(len(kv.index_k), -1, 4)[:, :tokens],
        ]


@dataclass
class _Task:
    tokens: list[int]
    done: int = 0
    pages: RequestPages | None = None  # on the subject
    twin: RequestPages | None = None
    away: Any = None  # evicted to the host


@dataclass
class Driver:
    """Runs sequences of batches, all with the state that the sequences before left. counts: what happened."""

    subject: Subject
    seed: int
    twin: Subject | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._tasks: list[_Task] = []
        self._used: set[int] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the caches, before and after a batch

    def run(self, batches: int | None = None) -> None:
        """One sequence, of 2 or 3 batches unless ``batches`` says otherwise. AssertionError on any difference."""
        for _ in range(batches or self._rng.randint(2, 3)):
            self._arrive()
            self._preempt()
            parts = self._choose()
            if parts:
                self._serve(parts)
            self._finish()
        self.counts["sequences"] += 1

    def close(self) -> None:
        """Give everything back; a page that is still held is an error."""
        for task in list(self._tasks):
            self._remove(task)
        self.subject.kv.close()
        if self.subject.host is not None:
            self.subject.host.close()
        if self.twin is not None:
            self.twin.kv.close()

    # What a scheduler does.

    def _arrive(self) -> None:
        rng = self._rng
        while len(self._tasks) < 2 or (len(self._tasks) < MAX_LIVE and rng.random() < 0.5):
            length = rng.choice((1, 3, 17, rng.randint(2, 2 * self.subject.largest), rng.randint(PAGE, 2 * PAGE)))
            task = _Task([rng.randrange(self.subject.vocab) for _ in range(length)])
            self._share(task)
            self._tasks.append(task)

    def _share(self, task: _Task) -> None:
        """Perhaps begin ``task`` with full pages that another request has computed, here or on the host."""
        rng = self._rng
        donors = [t for t in self._tasks if t is not task and t.done >= PAGE]
        if not donors or rng.random() < 0.3:
            return
        donor = rng.choice(donors)
        shared = PAGE * rng.randint(1, donor.done // PAGE)
        if donor.away is not None:
            task.away = donor.away.fork(shared)
            self.counts["forked on the host"] += 1
        else:
            assert donor.pages is not None
            task.pages = RequestPages.with_prefix(donor.pages, shared)
        if donor.twin is not None:
            task.twin = RequestPages.with_prefix(donor.twin, shared)
        task.tokens[:shared] = donor.tokens[:shared]
        task.tokens += [rng.randrange(self.subject.vocab)] * max(0, shared + 1 - len(task.tokens))
        task.done = shared
        self.counts["prefix cached"] += 1

    def _preempt(self) -> None:
        rng = self._rng
        running = [t for t in self._tasks if t.pages is not None and t.done]
        if running and rng.random() < 0.4:
            self._take_pages(rng.choice(running))

    def _take_pages(self, task: _Task) -> None:
        """To the host where there is one (with room), else gone and computed anew."""
        assert task.pages is not None
        self.counts["preempted"] += 1
        if self.subject.host is not None:
            try:
                task.away, task.pages = self.subject.host.evict(task.pages), None
                self.counts["evicted"] += 1
                return
            except OutOfPages:
                self.counts["host full"] += 1
        task.pages.close()
        task.pages = None
        if task.twin is not None:
            task.twin.close()
            task.twin = None
        task.done = 0

    def _choose(self) -> list[tuple[_Task, int]]:
        """Requests of the next batch, each with its number of new tokens, their pages reserved."""
        rng = self._rng
        parts: list[tuple[_Task, int]] = []
        room = rng.choice((4, self.subject.largest // 2 + 1, self.subject.largest, self.subject.largest))
        wanting = [t for t in self._tasks if t.done < len(t.tokens)]
        for task in rng.sample(wanting, min(len(wanting), rng.randint(1, 3))):
            if task.pages is None and task.away is None:
                self._share(task)
            new = min(rng.choice((1, 5, room, room)), room, len(task.tokens) - task.done)
            if new and self._reserve(task, new, {id(t) for t, _ in parts}):
                parts.append((task, new))
                room -= new
                self.counts["chunks"] += task.done > 0
        return parts

    def _reserve(self, task: _Task, new: int, busy: set[int]) -> bool:
        """Room for ``new`` tokens, at the cost of other requests' pages if need be."""
        while True:
            try:
                if task.away is not None:
                    task.pages, task.away = self.subject.host.load(task.away), None
                    self.counts["loaded"] += 1
                task.pages = task.pages or self.subject.kv.request()
                if self.twin is not None and task.twin is None:
                    task.twin = self.twin.kv.request()
                held = len(task.pages.pages)
                task.pages.extend(task.done + new - task.pages.num_tokens)
            except OutOfPages:
                victims = [t for t in self._tasks if t is not task and t.pages is not None and id(t) not in busy]
                if not victims:
                    return False
                self._take_pages(self._rng.choice(victims))
                continue
            if task.twin is not None:
                task.twin.extend(task.done + new - task.twin.num_tokens)
            fresh = set(task.pages.pages[held:])
            self.counts["pages reused"] += len(fresh & self._used)
            self._used |= fresh
            return True

    def _finish(self) -> None:
        for task in [t for t in self._tasks if t.done == len(t.tokens)]:
            if len(self._tasks) == MAX_LIVE or self._rng.random() < (0.1 if task.done >= PAGE else 0.5):
                self._remove(task)

    def _remove(self, task: _Task) -> None:
        for held in (task.pages, task.twin, task.away):
            if held is not None:
                held.close()
        self._tasks.remove(task)

    # Serving and comparing.

    def _serve(self, parts: list[tuple[_Task, int]]) -> None:
        self.counts["batches"] += 1
        where = f"sequence {self.counts['sequences']}, batch {self.counts['batches']}"
        if self.twin is None:
            self._twice(parts, where)
        else:
            self._in_lockstep(parts, where)
        for task, new in parts:
            task.done += new

    def _batch(self, parts: list[tuple[_Task, int]], device: torch.device, twin: bool = False) -> sparse_pcg.Batch:
        ids = [token for task, new in parts for token in task.tokens[task.done : task.done + new]]
        held = [task.twin if twin else task.pages for task, _ in parts]
        return sparse_pcg.Batch(
            torch.tensor(ids).to(device),
            [new for _, new in parts],
            [task.done for task, _ in parts],
            page_table([h for h in held if h is not None], device),
        )

    def _twice(self, parts: list[tuple[_Task, int]], where: str) -> None:
        subject, pools = self.subject, self.subject.pools
        batch = self._batch(parts, subject.kv.latent_pool.device)
        self._copies = self._copies or [(torch.empty_like(p), torch.empty_like(p)) for p in pools]
        for pool, (before, _) in zip(pools, self._copies, strict=True):
            before.copy_(pool)
        subject.poison()
        want = [t.clone() for t in subject.forward(batch, "uncaptured")]
        for pool, (before, written) in zip(pools, self._copies, strict=True):
            written.copy_(pool)
            pool.copy_(before)
        subject.poison()
        got = subject.forward(batch, "replay")
        assert same(list(got), want), f"results differ: {where}"
        for pool, (_, written) in zip(pools, self._copies, strict=True):
            pool[:, 0] = written[:, 0] = 0  # pad rows race for the dummy slot
            assert torch.equal(pool, written), f"caches differ: {where}"

    def _in_lockstep(self, parts: list[tuple[_Task, int]], where: str) -> None:
        assert self.twin is not None
        self.twin.poison()
        want = [
            t.clone()
            for t in self.twin.forward(self._batch(parts, self.twin.kv.latent_pool.device, True), "uncaptured")
        ]
        mode = self._rng.choice(("replay", "replay", "uncaptured"))
        self.subject.poison()
        got = self.subject.forward(self._batch(parts, self.subject.kv.latent_pool.device), mode)
        assert same(list(got), want), f"results differ from those of pages that stayed ({mode}): {where}"
        for task, new in parts:
            assert task.pages is not None and task.twin is not None
            ours = self.subject.token_bytes(task.pages.pages, task.done + new)
            theirs = self.twin.token_bytes(task.twin.pages, task.done + new)
            assert same(ours, theirs), f"caches differ from pages that stayed: {where}"
