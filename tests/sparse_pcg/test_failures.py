"""Known kinds of failure: padding, what cuts read at run time, recompiles. One property per kind.

The oracle is the same function in plain PyTorch, on the rows that are really there: bit for bit.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import sparse_pcg
from custom_ops.batch_metadata import BatchMetadata, ForwardContext, use_context
from tests.sparse_pcg.agreement import OPTIONS, SIZES, Mode, agree, data, fresh, mixed, moded, plain
from tests.sparse_pcg.test_runner import batch_of, build
from tests.sparse_pcg.toys import Toy, context, inputs, same, state

pytestmark = pytest.mark.usefixtures("fresh")


# --- padding ---


class Rowwise(nn.Module):
    """What a forward does between the cuts: row by row, with a store by slots and a scale per row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pool", torch.zeros(64, 128))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        torch.ops.toy.store(x * 2, slots, self.pool)
        for _ in range(2):
            out = torch.empty_like(x)
            torch.ops.toy.mix_into(x, out)  # pad rows: -1, whatever was in them
            quantised, scale = torch.ops.sparse_pcg.quant_fp8(out + x, 128, False)
            x = quantised.float() * scale + self.pool[slots]
        return x


POISON = [float("nan"), float("inf"), -3e38]


@given(st.lists(st.tuples(st.integers(1, 16), st.sampled_from(POISON)), min_size=3, max_size=8))
def test_pad_rows_reach_no_valid_row_and_no_slot(batches: list[tuple[int, float]]) -> None:
    """A caller that pads: poisoned rows, slots that point at the dummy row 0; big and small in any order."""
    fresh()
    model, reference = Rowwise(), Rowwise()
    fn = sparse_pcg.compile(model, **OPTIONS)
    static = {size: (torch.zeros(size, 128), torch.zeros(size, dtype=torch.int64)) for size in SIZES}
    with torch.no_grad():
        for size in SIZES * 2:
            fn(*static[size])
        with sparse_pcg.stats().expect(replays=len(batches), captures=0, fallbacks={}):
            for seed, (rows, poison) in enumerate(batches):
                x, slots = data(seed, rows, 128), 1 + torch.randperm(63)[:rows]
                bucket = next(s for s in SIZES if s >= rows)
                static[bucket][0].fill_(poison)[:rows] = x
                static[bucket][1].zero_()[:rows] = slots
                with context(rows=rows, kv_len=seed + 1):
                    got = fn(*static[bucket])
                with context(kv_len=seed + 1):
                    want = reference(x, slots)
                assert same(got[:rows], want) and same(model.pool[1:], reference.pool[1:])


@pytest.fixture(scope="module")
def runner(fresh_module: None) -> sparse_pcg.PrefillRunner:
    return build(capture_sizes=(4, 16))[0]


CHUNKS = st.tuples(st.sampled_from([1, 3, 4, 5]), st.sampled_from([1, 3, 8, 12, 15]))  # 16 tokens are selected
STALE = {
    "input_ids": 1 << 40,
    "positions": 1 << 40,
    "kv_lens": 1 << 30,
    "select_lens": 1 << 30,
    "request_of_row": 1 << 30,
}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=max(4, settings.default.max_examples // 3)
)
@given(st.lists(CHUNKS, min_size=1, max_size=2))
def test_stale_row_buffers_reach_nothing(runner: sparse_pcg.PrefillRunner, chunks: list[tuple[int, int]]) -> None:
    """Before each batch every row buffer is full of garbage, its slots those of a request that lives on.

    Chunks of several requests in one batch, so that of equal row counts some select all they see and some do not.
    """
    kv: Any = runner.kv
    runner.capture(progress=False)  # once: the fixture above drops what an earlier test captured
    assert [c.bucket for c in runner.captured] == [16, 4]  # a small bucket fits where a big one was
    with kv.request() as victim, ExitStack() as stack:
        runner.forward(batch_of([(victim, 9)]))
        page = int(victim.pages[0])
        rows = slice(page * 64, page * 64 + 9)
        before = [kv.latent_pool[:, rows].clone(), kv.index_pool[:, page].clone()]
        requests = [stack.enter_context(kv.request()) for _ in chunks]
        for turn in range(2):
            batch = batch_of([(r, c[turn]) for r, c in zip(requests, chunks, strict=True)], seed=turn)
            count = batch.input_ids.numel()
            outputs = {}
            for mode in ("eager", "uncaptured", "replay"):
                for name, value in STALE.items():
                    getattr(runner.metadata, name).fill_(value)
                runner.metadata.page_table.fill_(1 << 30)
                runner.metadata.slots.copy_(torch.arange(16) % 9 + rows.start)
                outputs[mode] = runner.forward(batch, mode)
                assert same([kv.latent_pool[:, rows], kv.index_pool[:, page]], before)
                for name, pad in (
                    ("slots", 0),
                    ("kv_lens", 0),
                    ("select_lens", 1),
                    ("request_of_row", 0),
                    ("input_ids", 0),
                ):
                    assert (getattr(runner.metadata, name)[count:] == pad).all(), name
            if count <= 16:
                assert same(outputs["replay"].hidden, outputs["uncaptured"].hidden)
            torch.testing.assert_close(outputs["replay"].hidden, outputs["eager"].hidden, rtol=1e-3, atol=1e-4)


# --- what the cut reads at run time ---


@given(st.lists(st.tuples(st.sampled_from([3, 8, 8, 8, 16, 20]), st.integers(0, 9)), min_size=4, max_size=10))
def test_one_size_with_other_lengths_and_other_ints(calls: list[tuple[int, int]]) -> None:
    """Equal row counts, other lengths, other Python ints: nothing of an earlier call is baked in."""
    fresh()

    def body(x: torch.Tensor, offset: int) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.mix_untagged(torch.relu(x) + offset, out)
        return out * offset

    fn = plain(body, cut_ops=["toy::mix_untagged"])
    with torch.no_grad():
        for seed, (rows, length) in enumerate(calls):
            for offset in (length, length, length % 3):
                with context(rows=min(rows, length), kv_len=length):
                    x = data(seed, rows, 4)
                    assert same(fn(x, offset), body(x, offset))


def test_without_a_context_the_model_says_so() -> None:
    """Compiled under a context, called outside of one."""
    metadata = BatchMetadata.allocate(4, 1, 2, 8, "cpu")
    caches = {0: torch.zeros(2, 8448, dtype=torch.uint8)}
    live, dry = ForwardContext(metadata, caches), ForwardContext(None, caches)

    def body(key: torch.Tensor, q: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.ops.sparse_pcg.k_cache_and_topk_result(0, key * 2, q, w, out)
        return out + 0

    args = (
        data(0, 4, 128).bfloat16(),
        data(1, 4, 2, 128).to(torch.float8_e4m3fn),
        data(2, 4, 2),
        torch.zeros(4, 8, dtype=torch.int32),
    )
    fn = plain(body)
    with torch.no_grad():
        with use_context(live):
            assert (fn(*args) == -1).all()
        for missing in (lambda: use_context(dry), lambda: context()):
            with missing(), pytest.raises(RuntimeError, match=r"index_k.*context|slots.*context"):
                fn(*args)


# --- recompiles ---


CHANGES: dict[str, tuple[Callable[[int], tuple[Any, ...]], Callable[[int], tuple[Any, ...]]]] = {
    "enum": (lambda s: (data(s, 8, 3), None), lambda s: (data(s, 8, 3), None, Mode.MIXED)),
    "dtype": (lambda s: (data(s, 8, 3), None), lambda s: (data(s, 8, 3).double(), None)),
    "None to tensor": (lambda s: (data(s, 8, 3), None), lambda s: (data(s, 8, 3), data(s, 3))),
    "tensor to None": (lambda s: (data(s, 8, 3), data(s, 3)), lambda s: (data(s, 8, 3), None)),
    "tensor to number": (lambda s: (data(s, 8, 3), data(s, 3)), lambda s: (data(s, 8, 3), 2.5)),
    "dims": (lambda s: (data(s, 8, 3), None), lambda s: (data(s, 8, 3, 2), None)),
    "strides": (lambda s: (data(s, 8, 3), None), lambda s: (data(s, 3, 8).t(), None)),
    "requires grad": (lambda s: (data(s, 8, 3), None), lambda s: (data(s, 8, 3).requires_grad_(), None)),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_of_argument(change: str, frozen: bool) -> None:
    """A recompile is right at once; after ``freeze()`` it captures nothing, and the first kind is still replayed."""
    before, after = CHANGES[change]
    fn = plain(moded)
    agree(fn, moded, before, 3)
    if not frozen:
        agree(fn, moded, after, 3)
        agree(fn, moded, before, 3)
        return
    sparse_pcg.freeze()
    with sparse_pcg.stats().expect(captures=0, unique_pieces=0, replays=0, graphs=1, fallbacks={"recompile": 3}):
        agree(fn, moded, after, 3)
    with sparse_pcg.stats().expect(replays=3, graphs=0, fallbacks={}):
        agree(fn, moded, before, 3)


MODES = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("order", list(itertools.permutations(MODES)), ids="-".join)
def test_grad_modes_in_any_order(order: tuple[str, ...]) -> None:
    """One module under every grad mode, with arguments made under another one."""
    model = Toy(layers=1)
    reference = copy.deepcopy(model)
    fn, declared = plain(model), sparse_pcg.compile(model, **OPTIONS)
    for name in (*order, order[0]):
        for call in range(3):
            with MODES[order[1]]():
                args = inputs(8, seed=call)
            for each in (fn, declared):
                with MODES[name]():
                    got = each(*args)
                with torch.no_grad():
                    want = reference(*args)
                assert same(got.detach(), want.detach()) and same(state(model), state(reference))
    assert sparse_pcg.stats().replays > 0


@pytest.mark.parametrize("order", [(0, 1, 2, 8), (1, 8, 0, 2), (2, 0, 8, 1), (8, 2, 1, 0)], ids=str)
def test_few_rows_in_any_order(order: tuple[int, ...]) -> None:
    """Sizes 0, 1 and 2 are special to Dynamo: each is right, and replayed where captured, whichever came first."""
    fn = sparse_pcg.compile(moded, capture_sizes=[1, 2, 8], compiler="eager")
    agree(fn, moded, lambda seed: (data(seed, order[seed % 4], 3), None), 12)
    for rows in (1, 2, 8):
        with sparse_pcg.stats().expect(replays=1, captures=0, graphs=0, fallbacks={}):
            fn(data(0, rows, 3), None)


def test_the_first_dynamic_dim_is_the_token_dim() -> None:
    """Wherever its argument stands in the signature."""

    def body(pool: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total = pool.sum(0)
        return mixed(x) + total

    fn = sparse_pcg.compile(body, dynamic_dims={"x": 0, "pool": 0}, **OPTIONS)
    agree(fn, body, lambda seed: (data(seed, 30, 3), data(seed, 8, 3)), 3)
    with sparse_pcg.stats().expect(replays=1, captures=0, fallbacks={}):
        fn(data(0, 30, 3), data(0, 8, 3))
    with sparse_pcg.stats().expect(captures=0, fallbacks={"size": 3}):  # 8 pool rows are not 8 tokens
        agree(fn, body, lambda seed: (data(seed, 8, 3), data(seed, 30, 3)), 3)


def test_a_piece_without_a_dynamic_size() -> None:
    """Between two cuts a piece that sees no token; and one that sees no argument at all."""

    def body(x: torch.Tensor, w: torch.Tensor) -> Any:
        out = mixed(x * 2)
        table = torch.softmax(w, 0) * 3
        out = mixed(out)
        ones = torch.arange(3.0) + 1
        return mixed(out) + ones, table

    fn = sparse_pcg.compile(body, dynamic_dims={"x": 0}, **OPTIONS)
    rows = [8, 8, 4, 8, 4, 4, 5]
    agree(fn, body, lambda seed: (data(seed, rows[seed], 3), data(seed, 3)), len(rows))
    assert sparse_pcg.stats().replays == 2 and sparse_pcg.stats().graphs == 1


def test_python_arithmetic_on_the_row_count() -> None:
    """The next power of two: a graph for each size, each right, and each visible in the counters."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return mixed(x) * (1 << (x.shape[0] - 1).bit_length())

    fn = sparse_pcg.compile(body, **OPTIONS)
    sizes = [3, 4, 5, 8]
    agree(fn, body, lambda seed: (data(seed, sizes[seed % 4], 3),), 12)
    assert sparse_pcg.stats().graphs == 4 and sparse_pcg.stats().replays >= 2


def test_a_graph_break_and_two_modules_with_one_backend() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = mixed(x + 1)
        torch._dynamo.graph_break()
        return mixed(y * 2)

    options = dict(OPTIONS)
    both = [torch.compile(f, backend="sparse_pcg", options=options) for f in (body, moded)]
    agree(both[0], body, lambda seed: (data(seed, 8, 3),), 4)
    agree(both[1], moded, lambda seed: (data(seed, 8, 3), None), 4)
    agree(both[0], body, lambda seed: (data(seed, 8, 3),), 2)
    assert sparse_pcg.stats().graphs == 3
