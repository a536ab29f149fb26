"""Every repair is needed, is enough, costs no copy of a pool, and holds whatever lies in a cache."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_pcg import inductor_fixes
from sparse_pcg.compile_cache import cache_dir, cache_path
from sparse_pcg.inductor_fixes import (
    REPAIRS,
    UnsupportedTorch,
    compile_piece,
    ensure_supported,
    repaired,
    self_test,
)
from tests.sparse_pcg import inductor_cases as cases

Inputs = Callable[[], list[torch.Tensor]]

# Stock PyTorch is wrong up to here. Where an assertion on a version fails, that version has been mended.
KNOWN_WRONG = tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 14)


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.delenv("TRITON_CACHE_DIR", raising=False)
        yield
    torch._dynamo.reset()


def differing(
    model: cases.Model, inputs: Inputs, names: list[str], got: cases.Run, skip: int = 0
) -> set[str]:
    """The names of the parts of a batched model whose written input or output is not eager's."""
    right = cases.eager(model, inputs())
    written = zip(got.inputs[skip:], right.inputs[skip:], strict=True)
    returned = zip(got.outputs, right.outputs, strict=True)
    parts = [zip(names, part, strict=False) for part in (written, returned)]
    return {name for part in parts for name, (a, b) in part if not cases.same(a, b)}


# -- each repair: needed and enough


def _offset_slices() -> tuple[cases.Model, Inputs, list[str], set[str], int]:
    views = {**cases.OFFSET_SLICES, **cases.OTHER_VIEWS}
    model = cases.writes_views(list(views.values()))
    return model, lambda: [cases.pool_at(96) for _ in views], list(views), set(cases.OFFSET_SLICES), 0


def _pending_reads() -> tuple[cases.Model, Inputs, list[str], set[str], int]:
    names = list(cases.PENDING_READS)
    model = cases.reads_late(list(cases.PENDING_READS.values()))
    return model, lambda: cases.late_inputs(5), names, set(names) - {"two_pools"}, 2


def _dropped_clones() -> tuple[cases.Model, Inputs, list[str], set[str], int]:
    copies = {**cases.DROPPED_CLONES, **cases.KEPT_COPIES}
    model = cases.writes_what_it_copied(list(copies.values()))
    names = [*copies, "overlapping halves"]
    wrong = {*cases.DROPPED_CLONES, "overlapping halves"}
    return model, lambda: [torch.arange(64.0).view(8, 8) + 1 for _ in range(len(copies) + 1)], names, wrong, 0


BATCHES = {"offset_slice": _offset_slices, "pending_read": _pending_reads, "dropped_clone": _dropped_clones}


@pytest.mark.parametrize("repair", BATCHES)
def test_repaired_is_right_and_without_the_repair_is_wrong(repair: str) -> None:
    model, inputs, names, wrong, skip = BATCHES[repair]()
    assert differing(model, inputs, names, cases.run(model, inputs()), skip) == set()
    if KNOWN_WRONG:
        with cases.without(repair):
            unrepaired = cases.run(model, inputs())
        assert differing(model, inputs, names, unrepaired, skip) == wrong


def _small_inputs() -> list[torch.Tensor]:
    return [cases.pool_at(96) for _ in cases.ONE_OF_EACH]


def _small_differing(got: cases.Run) -> set[str]:
    return differing(cases.one_of_each, _small_inputs, list(cases.ONE_OF_EACH), got)


def test_whatever_lies_in_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run() -> tuple[set[str], int]:
        counters.clear()
        wrong = _small_differing(cases.run(cases.one_of_each, _small_inputs(), caches=True))
        return wrong, counters["aot_autograd"]["autograd_cache_hit"]

    with monkeypatch.context() as patch:  # neither a key nor a directory of our own
        patch.setattr(inductor_fixes, "_key", lambda: "")
        patch.setattr(inductor_fixes, "cache_dir", lambda _version: nullcontext())
        with patch.context() as unrepaired:
            unrepaired.setattr(inductor_fixes, "_enabled", ())
            filled = run()
        if KNOWN_WRONG:
            assert filled == (set(cases.ONE_OF_EACH), 0)
            assert run() == (set(cases.ONE_OF_EACH), 1), "a repair does not help where a wrong entry is found"
    with monkeypatch.context() as patch:  # the key alone keeps entries apart
        patch.setattr(inductor_fixes, "cache_dir", lambda _version: nullcontext())
        assert run() == (set(), 0)
    with monkeypatch.context() as patch:  # and so does the directory alone
        patch.setattr(inductor_fixes, "_key", lambda: "")
        assert run() == (set(), 0)
    assert run() == (set(), 0)
    assert run() == (set(), 1)


def test_stock_is_wrong() -> None:
    if KNOWN_WRONG:
        stock = cases.run(cases.one_of_each, _small_inputs(), stock=True)
        assert _small_differing(stock) == set(cases.ONE_OF_EACH)


def test_one_artifact_for_every_offset() -> None:
    model = cases.writes_views([*cases.OFFSET_SLICES.values(), *cases.OTHER_VIEWS.values()])
    names = [*cases.OFFSET_SLICES, *cases.OTHER_VIEWS]
    for i, offset in enumerate((96, 0, 5, 96)):
        def inputs(offset: int = offset) -> list[torch.Tensor]:
            return [cases.pool_at(offset) for _ in names]

        counters.clear()
        got = cases.run(model, inputs(), caches=True)
        assert differing(model, inputs, names, got) == set()
        assert counters["aot_autograd"]["autograd_cache_hit"] == (i > 0), "one entry serves all offsets"


def test_any_number_of_rows() -> None:
    model = cases.reads_late([cases.PENDING_READS["index"], cases.PENDING_READS["slice"]])
    batches = {}
    for rows in (5, 3, 8):
        inputs = cases.late_inputs(rows)[:4]
        torch._dynamo.mark_dynamic(inputs[0], 0)
        torch._dynamo.mark_dynamic(inputs[1], 0)
        if not batches:
            compiled = cases.run(model, inputs).compiled
        with torch._dynamo.config.patch(error_on_recompile=bool(batches)):
            outputs = compiled(*inputs) if batches else None
        batches[rows] = outputs
        if outputs is not None:
            right = cases.eager(model, cases.late_inputs(rows)[:4])
            pairs = zip([*inputs, *outputs], [*right.inputs, *right.outputs], strict=True)
            assert all(cases.same(a, b) for a, b in pairs)


# -- no copy of a pool


def _writes_many_ways(
    x: torch.Tensor, slots: torch.Tensor, whole: torch.Tensor, whole_again: torch.Tensor, *pools: torch.Tensor
) -> list[torch.Tensor]:
    p = iter(pools)
    outputs = []
    cases.store(x, slots, next(p))

    two = next(p)
    cases.store(x, slots, two)
    cases.store(x + 1, slots + 1, two)

    between = next(p)
    cases.store(x, slots, between)
    outputs.append(between[slots] + 1)
    cases.store(x + 1, slots, between)

    around = next(p)
    before = around[slots]
    cases.store(x, slots, around)
    outputs.append(before + around[slots])

    views = next(p)
    cases.fill(views[2:9], 1.0)
    cases.fill(views[:, 2:5], 2.0)
    cases.fill(views[1], 3.0)
    cases.fill(views.view(-1)[3:9], 4.0)

    cases.fill(next(p).view(torch.int32), 5.0)
    cases.fill(next(p).view(torch.int32)[2:4], 6.0)

    inside = next(p)
    cases.write(inside[4:8], inside[0:4])  # the model's own aliasing: passed on as it is

    cases.store(x, slots, whole)  # two inputs of one base
    cases.store(x, slots, whole_again)
    return outputs


def test_no_copy_of_a_pool_is_generated() -> None:
    sizes = [1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049]  # rows: each pool is told by its size
    base = 1051

    def inputs() -> list[torch.Tensor]:
        x, slots = cases.late_inputs(5)[:2]
        both = torch.arange(2.0 * base * 8).view(2, base, 8)
        return [x, slots, both[0], both[1], *(torch.arange(8.0 * n).view(n, 8) for n in sizes)]

    got = cases.run(_writes_many_ways, inputs())
    right = cases.eager(_writes_many_ways, inputs())
    pairs = zip([*got.inputs, *got.outputs], [*right.inputs, *right.outputs], strict=True)
    bits = [(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs if a.dtype == torch.float32]
    assert all(torch.equal(a, b) for a, b in bits)
    assert pool_sized(got.code, [*sizes, base]) == []
    if KNOWN_WRONG:
        with cases.without("self_copy"):
            assert pool_sized(cases.run(_writes_many_ways, inputs()).code, [*sizes, base]) != []


def pool_sized(code: str, rows: list[int]) -> list[str]:
    """Allocations and loops in generated code over as many rows or elements as a pool has."""
    counts = "|".join(str(n * k) for n in rows for k in (1, 8, 2, 16))
    return re.findall(rf"empty_strided\w*\(\((?:{counts})\b[^)]*\)|<static_cast<int64_t>\((?:{counts})L\)",
    code)


# -- random sequences


def _sequence(
    steps: list[tuple[str, int]], x: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> torch.Tensor:
    kept = x
    for kind, at in steps:
        if kind == "read":
            x = x + pool[slots]
        elif kind == "keep":
            kept = pool[at : at + 4]
        elif kind == "use":
            x = x + kept * 2
        elif kind == "store":
            cases.store(x % 17, slots, pool)
        elif kind == "slice_store":
            cases.write(pool[at : at + 4], x % 13)
        elif kind == "copy_store":
            cases.write(pool[at : at + 4], pool[at : at + 4].clone())
        elif kind == "add":
            x = x * 2 - at
    return x


KINDS = ("read", "keep", "use", "store", "slice_store", "copy_store", "add")
step = st.tuples(st.sampled_from(KINDS), st.integers(0, 8))
sequences = st.lists(st.lists(step, min_size=2, max_size=7), min_size=2, max_size=2)


def check_sequences(batch: list[list[tuple[str, int]]]) -> None:
    def model(x: torch.Tensor, slots: torch.Tensor, *pools: torch.Tensor) -> list[torch.Tensor]:
        return [_sequence(steps, x, slots, pool) for steps, pool in zip(batch, pools, strict=True)]

    def inputs() -> list[torch.Tensor]:
        return [*cases.late_inputs(4)[:2], *(cases.pool_at(8) for _ in batch)]

    names = [str(steps) for steps in batch]
    assert differing(model, inputs, names, cases.run(model, inputs()), 2) == set()


@settings(max_examples=1, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
@example(
    [
        [("keep", 2), ("copy_store", 2), ("use", 0), ("store", 0), ("read", 0)],
        [("read", 0), ("slice_store", 4), ("read", 0)],
    ]
)
@given(sequences)
def test_random_sequences(batch: list[list[tuple[str, int]]]) -> None:
    check_sequences(batch)


@pytest.mark.heavy
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(sequences)
def test_many_random_sequences(batch: list[list[tuple[str, int]]]) -> None:
    check_sequences(batch)


# -- entering and leaving


def _originals() -> list[object]:
    return [patch.original() for patches in inductor_fixes._patches().values() for patch in patches]


def _installed() -> list[object]:
    patches = [patch for each in inductor_fixes._patches().values() for patch in each]
    return [vars(patch.owner)[patch.name] for patch in patches]


def test_everything_is_put_back() -> None:
    before, tag = _originals(), torch.compiler.config.cache_key_tag
    locality = torch._inductor.config.reorder_for_locality
    with pytest.raises(KeyError), repaired():
        inside = _installed()
        assert all(a is not b for a, b in zip(inside, before, strict=True))
        assert torch.compiler.config.cache_key_tag != tag
        with repaired():
            assert torch._inductor.config.reorder_for_locality is False
        assert _installed() == inside
        raise KeyError
    assert all(a is b for a, b in zip(_originals(), before, strict=True))
    assert torch.compiler.config.cache_key_tag == tag
    assert torch._inductor.config.reorder_for_locality == locality


def test_one_thread_at_a_time() -> None:
    entered = threading.Event()

    def enter() -> None:
        with repaired():
            entered.set()

    thread = threading.Thread(target=enter)
    with repaired():
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _originals()
    with monkeypatch.context() as patch:
        patch.setattr(torch._inductor.fx_passes.post_grad, "remove_noop_ops", lambda module: module)
        for refused in (repaired().__enter__, ensure_supported.__wrapped__):
            with pytest.raises(UnsupportedTorch, match=rf"{re.escape(torch.__version__)}.*remove_noop_ops"):
                refused()
    assert all(a is b for a, b in zip(_originals(), before, strict=True))


def test_an_untried_torch_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = ["pending_read"]
    calls = []
    monkeypatch.setattr(inductor_fixes, "self_test", lambda: calls.append(1) or failures)
    ensure_supported.cache_clear()
    ensure_supported()
    assert not calls or not KNOWN_WRONG
    monkeypatch.setattr(inductor_fixes, "TRUSTED_VERSIONS", ())
    ensure_supported.cache_clear()
    calls.clear()
    with pytest.raises(UnsupportedTorch, match=rf"{re.escape(torch.__version__)}.*pending_read"):
        ensure_supported()
    failures.clear()
    ensure_supported()
    ensure_supported()
    assert len(calls) == 2
    ensure_supported.cache_clear()


def test_self_test_sees_each_missing_repair() -> None:
    assert self_test() == []
    if KNOWN_WRONG:
        inside = [cases.without(repair) for repair in REPAIRS]
        for context in inside:
            context.__enter__()
        try:
            assert self_test() == list(cases.ONE_OF_EACH)
        finally:
            for context in reversed(inside):
                context.__exit__(None, None, None)


# -- the cache directory


def test_one_directory_per_version_and_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert cache_path("1") == str(tmp_path / "sparse_pcg-1-rank0")
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cache_path("2") == str(tmp_path / "sparse_pcg-2-rank3")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert os.path.basename(cache_path("2")) == "sparse_pcg-2-rank3"


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    with pytest.raises(KeyError), cache_dir("1") as outer:
        with cache_dir("1") as inner:
            assert inner == outer == os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert os.environ["TRITON_CACHE_DIR"].startswith(outer)
        raise KeyError
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"


# -- compile_piece


def test_compile_piece_keeps_strides_and_its_argument() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (x.t() * 2)[:, 1:].t()

    piece = torch.fx.symbolic_trace(model)
    code = piece.code
    x = torch.arange(24.0).view(4, 6)
    mode = FakeTensorMode()
    fake = mode.from_tensor(x)
    (out,) = compile_piece(piece, [fake])(x)
    with mode:
        expected = piece(fake)
    assert cases.same(out, model(x)) and out.stride() == expected.stride()
    assert piece.code == code


def test_compile_piece_takes_no_real_tensor() -> None:
    piece = torch.fx.symbolic_trace(lambda x, y: x + y)
    fake = FakeTensorMode().from_tensor(torch.ones(2))
    with pytest.raises(ValueError, match=r"fake_inputs must be fake tensors, got real ones at \[1\]"):
        compile_piece(piece, [fake, torch.ones(2)])
