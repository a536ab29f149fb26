"""Byte spans, overlap, stable outputs, the emulated pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_pcg.memory import Pool, StableOutputs, byte_span, overlaps

SLICES = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 4), st.integers(1, 3), st.booleans()), min_size=1, max_size=6
)


@given(SLICES)
def test_overlap_is_what_marking_bytes_shows(slices: list[tuple[int, int, int, bool]]) -> None:
    """Against a count of who touches which byte; a storage of its own for some of the views."""
    base = torch.zeros(64, dtype=torch.int16)
    views, marks = [], []
    for at, length, step, own in slices:
        storage = torch.zeros(64, dtype=torch.int16) if own else base
        view = storage[at : at + length * step : step]
        start, stop = byte_span(view)
        views.append(view)
        marks.append(set() if view.numel() == 0 else {(id(storage), b) for b in range(start, stop)})
    groups = list(range(len(views)))
    for i in range(len(views)):
        for j in range(i):
            if marks[i] & marks[j]:
                old, new = max(groups[i], groups[j]), min(groups[i], groups[j])
                groups = [new if g == old else g for g in groups]
    found = overlaps(views)
    assert [groups.index(g) for g in groups] == [first for first, _ in found]
    for view, (first, shift) in zip(views, found, strict=True):
        assert shift == byte_span(view)[0] - byte_span(views[first])[0]


def test_span_by_hand() -> None:
    base = torch.zeros(6, 4, dtype=torch.float32)
    assert byte_span(base) == (0, 96)
    assert byte_span(base[1:3, 1:]) == (20, 48)  # rows 1 and 2, columns 1 to 3: from element 5 to element 11
    assert byte_span(base[:, 2]) == (8, 92)
    assert byte_span(base[2:2]) == (32, 32)


def test_stable_outputs_keep_aliases_and_addresses() -> None:
    pool = Pool(torch.device("cpu"))
    x = torch.arange(6.0)

    def run() -> list[torch.Tensor]:
        y = x * 2
        return [y, y.view(2, 3).t(), x[1:], x + 1, y[2:]]

    stable = StableOutputs(run(), [x], pool)
    first = [t.data_ptr() for t in stable.tensors]
    assert first[0] == first[1] and first[4] == first[0] + 8 and stable.tensors[2].data_ptr() == x[1:].data_ptr()
    x += 10
    pool.poison()
    stable.copy_from(run())
    assert [t.data_ptr() for t in stable.tensors] == first
    for got, want in zip(stable.tensors, run(), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_outputs_that_alias_otherwise_are_refused() -> None:
    x = torch.zeros(4)
    stable = StableOutputs([x + 1, x + 2], [x], Pool(torch.device("cpu")))
    y = x + 1
    for outputs in ([y, y], [x, y], [y, torch.zeros(5)]):
        with pytest.raises(RuntimeError, match=r"alias otherwise|changed"):
            stable.copy_from(outputs)


def test_buckets_lie_over_one_another() -> None:
    pool = Pool(torch.device("cpu"))
    addresses = []
    for nbytes in (5000, 100, 3000):
        pool.begin_bucket()
        addresses.append([pool.allocate(nbytes, torch.device("cpu")).data_ptr() for _ in range(3)])
    assert addresses[0][0] == addresses[1][0] == addresses[2][0]
    assert len(set(addresses[0])) == 3 and pool.nbytes == 1 << 20


def test_poison_is_nan_in_floats_and_no_index() -> None:
    pool = Pool(torch.device("cpu"))
    held = pool.allocate(64, torch.device("cpu"))
    pool.poison()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert held.view(dtype).isnan().all()
    assert (held.view(torch.int32) < -(1 << 19)).all() and (held.view(torch.int64) < -(1 << 20)).all()
