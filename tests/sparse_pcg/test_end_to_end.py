"""Thirteen fixed prompts: input logprobs and greedy ids of replay equal those with breaks, pages evicted or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

import sparse_pcg
from sparse_pcg.kv import HostKV, PagedKV, RequestPages, page_table
from tests.sparse_pcg.test_batch_sequences import CONFIG, build

LENGTHS = (1, 2, 5, 16, 17, 31, 32, 33, 63, 64, 65, 90, 130)  # around top-k, the largest bucket and the page
NEW = 3  # greedy tokens of each prompt
CHUNK = 32  # rows of a batch at most: the largest bucket
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(CONFIG.vocab_size, (LENGTHS[number],), generator=generator).tolist()


@dataclass
class Answer:
    """logprobs: of each token of the prompt but the first, and of each greedy token. ids: the greedy tokens."""

    logprobs: list[torch.Tensor]
    ids: list[int]


class Server:
    """Serves prompts in chunks together; with ``host`` every request goes there and back between two batches."""

    def __init__(self, runner: sparse_pcg.PrefillRunner, kv: PagedKV, host: HostKV | None, mode: str) -> None:
        self.runner, self.kv, self.host, self.mode = runner, kv, host, mode
        self.moved = 0

    @torch.no_grad()
    def answer(self, prompts: Sequence[list[int]]) -> list[Answer]:
        pages: list[RequestPages] = [self.kv.request() for _ in prompts]
        tokens = [list(p) for p in prompts]
        answers = [Answer([], []) for _ in prompts]
        while any(len(a.ids) < NEW for a in answers):
            room, parts = CHUNK, []
            for i, known in enumerate(tokens):
                new = min(room, len(known) - pages[i].num_tokens)
                if new > 0 and len(answers[i].ids) < NEW:
                    parts.append((i, new))
                    room -= new
            prefix = [pages[i].num_tokens for i, _ in parts]
            self._away_and_back(pages, {i for i, _ in parts})
            for i, new in parts:
                pages[i].extend(new)
            ids = [t for (i, new), p in zip(parts, prefix, strict=True) for t in tokens[i][p : p + new]]
            table = page_table([pages[i] for i, _ in parts])
            batch = sparse_pcg.Batch(torch.tensor(ids), [new for _, new in parts], prefix, table)
            out = self.runner.forward(batch, self.mode)
            head = torch.log_softmax(self.runner.model.head(out.hidden), dim=-1)  # type: ignore[operator]
            sampled = out.logits.argmax(1).tolist()
            at = 0
            for (i, new), begin, token in zip(parts, prefix, sampled, strict=True):
                if begin + new == len(tokens[i]):
                    answers[i].ids.append(token)
                    tokens[i].append(token)
                for row in range(new):
                    answers[i].logprobs.append(head[at + row, tokens[i][begin + row + 1]])
                at += new
        for request in pages:
            request.close()
        return answers

    def _away_and_back(self, pages: list[RequestPages], who: set[int]) -> None:
        if self.host is None:
            return
        away = {i: self.host.evict(pages[i]) for i in sorted(who) if pages[i].num_tokens}
        for i in sorted(away, reverse=True):  # other pages than before
            pages[i] = self.host.load(away[i])
            self.moved += 1


@pytest.fixture(scope="module")
def served(fresh_module: None) -> tuple[sparse_pcg.PrefillRunner, PagedKV]:
    return build(pages=24, device=DEVICE, dtype=DTYPE)


@pytest.fixture(scope="module")
def with_breaks(served: tuple[sparse_pcg.PrefillRunner, PagedKV]) -> list[Answer]:
    """Alone in the pool, nothing evicted."""
    return answers(Server(*served, None, "breaks"))


def answers(server: Server) -> list[Answer]:
    """Three or four prompts at a time."""
    prompts = [prompt(i) for i in range(len(LENGTHS))]
    order = [range(i, len(prompts), 4) for i in range(4)]
    found = {i: a for group in order for i, a in zip(group, server.answer([prompts[i] for i in group]), strict=True)}
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize(("mode", "load_back"), [("replay", False), ("replay", True), ("breaks", True)])
def test_logprobs_and_greedy_ids_are_those_with_breaks(
    served: tuple[sparse_pcg.PrefillRunner, PagedKV], with_breaks: list[Answer], mode: str, load_back: bool
) -> None:
    host = HostKV(served[1], 24) if load_back else None
    server = Server(*served, host, mode)
    before = sparse_pcg.stats()
    got = answers(server)
    after = sparse_pcg.stats()
    assert (after.replays - before.replays >= 15) == (mode == "replay")
    assert (server.moved >= 20) == load_back
    for number, (ours, theirs) in enumerate(zip(got, with_breaks, strict=True)):
        assert ours.ids == theirs.ids and len(ours.ids) == NEW, f"prompt {number}"
        assert len(ours.logprobs) == LENGTHS[number] + NEW - 1
        assert torch.equal(torch.stack(ours.logprobs), torch.stack(theirs.logprobs)), f"prompt {number}"
    assert any(len(set(a.ids)) > 1 for a in got)
    if host is not None:
        host.close()
    served[1].close()
