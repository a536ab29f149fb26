"""Generated tokens against a loop that prefills everything anew; decode graphs against the same pieces uncaptured."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

import sparse_pcg
from sparse_pcg.generation import decoder_of
from sparse_pcg.kv import OutOfPages, PagedKV, PrefixCache, page_table
from tests.sparse_pcg.sequences import Subject
from tests.sparse_pcg.test_batch_sequences import CONFIG, build
from tests.sparse_pcg.test_runner import batch_of
from tests.sparse_pcg.toys import same


@pytest.fixture(scope="module")
def served(fresh_module: None) -> tuple[sparse_pcg.PrefillRunner, PagedKV]:
    return build(pages=16)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(CONFIG.vocab_size) for _ in range(length)]


def naive(runner: sparse_pcg.PrefillRunner, kv: PagedKV, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens of the model itself, every one from a prefill of all before it."""
    new: list[int] = []
    for _ in range(count):
        with kv.request() as request:
            request.extend(len(tokens) + len(new))
            batch = sparse_pcg.Batch(torch.tensor([*tokens, *new]), [request.num_tokens], [0], page_table([request]))
            new.append(int(runner.forward(batch, "eager").logits.argmax()))
    return new


def test_tokens_are_those_of_prefilling_everything_anew(served: Any) -> None:
    """Lengths on both sides of index_topk (16) and of a page (64), crossed while decoding."""
    runner, kv = served
    prompts = [prompt(n, n) for n in (3, 12, 40, 61, 1)]
    got = sparse_pcg.generate(runner, prompts, max_new_tokens=8)
    assert got == [naive(runner, kv, p, 8) for p in prompts]
    kv.close()
    assert sparse_pcg.generate(runner, [torch.tensor(prompts[2])], max_new_tokens=1) == [got[2][:1]]
    assert sparse_pcg.generate(runner, [], max_new_tokens=5) == []


@pytest.mark.parametrize("requests", [1, 2, 3, 5])
def test_a_decode_graph_equals_its_pieces_uncaptured(served: Any, requests: int) -> None:
    runner, kv = served
    subject, decoder = Subject.of(runner, kv), decoder_of(runner)
    held = [kv.request() for _ in range(requests)]
    for i, (request, length) in enumerate(zip(held, (15, 63, 2, 30, 100), strict=False)):
        for start in range(0, length, 32):
            runner.forward(batch_of([(request, min(32, length - start))], seed=i))
    for step in range(4):
        batch = batch_of([(r, 1) for r in held], seed=step)
        before = [p.clone() for p in subject.pools]
        subject.poison()
        want = decoder.step(batch, 128, "uncaptured")
        written = [p.clone() for p in subject.pools]
        for pool, content in zip(subject.pools, before, strict=True):
            pool.copy_(content)
        subject.poison()
        with sparse_pcg.stats().expect(replays=1, fallbacks={}):
            got = decoder.step(batch, 128)
        assert same(got, want) and got.shape == (requests, CONFIG.vocab_size)
        assert same([p[:, 1:] for p in subject.pools], [p[:, 1:] for p in written])
        alone = runner.forward(batch, "eager").logits  # as a prefill of one token each
        torch.testing.assert_close(got, alone, rtol=1e-3, atol=1e-4)
    for request in held:
        request.close()
    kv.close()


def test_one_graph_per_batch_size_captured_once() -> None:
    torch._dynamo.reset()
    sparse_pcg.reset()
    runner, kv = build(pages=16)
    with sparse_pcg.stats().expect(captures=2, graphs=0, unique_pieces=0, fallbacks={}):  # of 4 rows, then 2
        sparse_pcg.generate(runner, [prompt(20, i) for i in range(3)], 6, eos=None)
        sparse_pcg.generate(runner, [prompt(20, 3)], 6)
    with sparse_pcg.stats().expect(captures=0, replays=2 + 5):
        first = sparse_pcg.generate(runner, [prompt(30, 7)[:28]], 6, eos={-1})
        runner.forward(batch_of([(kv.request(), 8)]))
    sparse_pcg.freeze()
    longer = [prompt(100, 9)]
    with sparse_pcg.stats().expect(captures=0, graphs=0, fallbacks={"size": 3}):
        frozen = sparse_pcg.generate(runner, longer, 4)  # a context that no captured graph reaches
    sparse_pcg.reset()
    assert sparse_pcg.generate(runner, [prompt(30, 7)[:28]], 6) == first
    runner.capture(progress=False)
    assert sparse_pcg.generate(runner, longer, 4) == frozen
    alive = weakref.ref(runner)
    del runner
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_eos_ends_a_request_and_is_returned(served: Any) -> None:
    runner, kv = served
    prompts = [prompt(20, 1), prompt(33, 2)]
    free = sparse_pcg.generate(runner, prompts, 8)
    stop = free[0][3]
    got = sparse_pcg.generate(runner, prompts, 8, eos=stop)
    for tokens, all_tokens in zip(got, free, strict=True):
        end = all_tokens.index(stop) + 1 if stop in all_tokens else 8
        assert tokens == all_tokens[:end]
    assert len(got[0]) <= 4 and got == sparse_pcg.generate(runner, prompts, 8, eos={stop})
    kv.close()


def test_a_common_prefix_is_computed_once(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, kv = served
    start = prompt(128, 5)
    prompts = [start + prompt(9, i) for i in range(3)] + [start]
    rows: list[int] = []
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda b: rows.append(len(b.input_ids)) or forward(b))
    got = sparse_pcg.generate(runner, prompts, 3)
    assert sum(rows) == 128 + 3 * 9 + 64  # the last prompt computes its last page anew: it needs its last token
    monkeypatch.undo()
    assert got == [sparse_pcg.generate(runner, [p], 3)[0] for p in prompts]
    kv.close()


def test_more_prompts_than_the_pool_has_room_for_take_turns(served: Any) -> None:
    runner, kv = served
    prompts = [prompt(n, n) for n in (200, 150, 260, 300, 64, 130)]  # 4, 3, 5, 5, 2, 3 pages of 15
    got = sparse_pcg.generate(runner, prompts, 5)
    assert got == [sparse_pcg.generate(runner, [p], 5)[0] for p in prompts]
    kv.close()
    with kv.request() as other:
        other.extend(13 * 64)
        assert sparse_pcg.generate(runner, [prompts[4], prompts[0][:90]], 5)[0] == got[4]
        with pytest.raises(OutOfPages):
            sparse_pcg.generate(runner, prompts[:1], 5)
    kv.close()


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[1], []], 4, r"prompts\[1\] must have at least one token, got none"),
        ([[1, 256]], 4, r"prompts\[0\] must be ids from 0 to 255, got 256"),
        ([[1, -1]], 4, r"prompts\[0\] must be ids from 0 to 255, got -1"),
        ([[1.5]], 4, r"prompts\[0\] must be token ids, got \[1.5\]"),
        ([5], 4, r"prompts\[0\] must be token ids, got 5"),
        ([[1], [1] * 958], 4, r"prompts\[1\] must with its new tokens be at most 960 tokens .* got 958 \+ 4"),
        ([[1]], 0, "max_new_tokens must be an int of at least 1, got 0"),
        ([[1]], True, "max_new_tokens must be an int of at least 1, got True"),
    ],
)
def test_what_cannot_be_generated_is_named(served: Any, prompts: Any, count: Any, message: str) -> None:
    runner, kv = served
    pools = kv.latent_pool.clone(), kv.index_pool.clone()
    with pytest.raises(ValueError, match=f"generate: {message}"):
        sparse_pcg.generate(runner, prompts, count)
    assert same([kv.latent_pool, kv.index_pool], list(pools))
    kv.close()


@pytest.mark.parametrize("eos", ["x", 1.5, [None]])
def test_an_eos_that_is_no_token_is_named(served: Any, eos: Any) -> None:
    with pytest.raises(ValueError, match="generate: eos must be a token id"):
        sparse_pcg.generate(served[0], [[1]], 1, eos=eos)


def test_pages_come_back_when_a_forward_fails(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, kv = served

    def broken(*args: Any) -> None:
        raise ArithmeticError("broken")

    for owner, name in ((runner, "forward"), (decoder_of(runner), "step")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(ArithmeticError):
                sparse_pcg.generate(runner, [prompt(100), prompt(20, 3)], 4)
        kv.close()


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_cached_pages_are_found_by_all_tokens_up_to_them() -> None:
    kv = PagedKV(1, 12)
    cache = PrefixCache(kv)
    tokens = prompt(200)
    with kv.request() as request:
        request.extend(200)
        cache.insert(tokens, request)
        pages = list(request.pages)
    assert len(cache) == 3 and kv.allocator.num_free == 11 - 3
    for given, found in (
        (tokens, 3),
        (tokens[:193], 3),
        (tokens[:192], 2),  # the last token is always computed
        (tokens[:64], 0),
        (tokens[:100] + [0] * 100, 1),
        ([0, *tokens[1:]], 0),
        (tokens[64:], 0),
        ([], 0),
    ):
        with cache.request(given) as again:
            assert (again.pages, again.num_tokens) == (pages[:found], 64 * found)
    cache.close()
    kv.close()


def test_room_is_made_from_the_ends_of_what_was_used_least_recently() -> None:
    kv = PagedKV(1, 8)
    cache = PrefixCache(kv)
    old, new = prompt(130, 1), prompt(130, 2)
    for tokens in (old, new):
        with kv.request() as request:
            request.extend(130)
            cache.insert(tokens, request)
    assert kv.allocator.num_free == 3
    assert cache.make_room(4) and len(cache) == 3
    with cache.request(old) as request:
        assert len(request.pages) == 1  # its second page went
    assert cache.make_room(5)
    with cache.request(old) as a, cache.request(new) as b:
        assert (len(a.pages), len(b.pages)) == (1, 1)  # old was used after new
        assert not cache.make_room(7) and len(cache) == 0  # a and b still hold theirs
    assert kv.allocator.num_free == 7
    cache.close()
    kv.close()
