"""Bucket schedule, choice and floor: worked values, and the properties that tie them together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_pcg.buckets import bucket_floor, bucket_for, default_schedule, smallest_batch

schedules = st.sets(st.integers(1, 400), min_size=1, max_size=12).map(lambda sizes: tuple(sorted(sizes)))


@pytest.mark.parametrize(
    ("max_rows", "count"), [(4, 1), (32, 8), (512, 30), (2048, 42), (4096, 50), (8192, 58)]
)
def test_schedule_counts(max_rows, count):
    sizes = default_schedule(max_rows)
    assert len(sizes) == count
    assert sizes[-1] == max_rows


def test_schedule_values():
    assert default_schedule() == (
        *(4, 8, 12, 16, 20, 24, 28, 32),
        *(48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
        *(288, 320, 352, 384, 416, 448, 480, 512),
        *(576, 640, 704, 768, 832, 896, 960, 1024),
        *(1280, 1536, 1792, 2048),
    )
    assert default_schedule(5200)[-3:] == (4096, 4608, 5120)


@given(st.integers(4, 20000))
def test_schedule_of_a_smaller_maximum_is_a_prefix(max_rows):
    sizes = default_schedule(max_rows)
    assert sizes == tuple(size for size in default_schedule(20480) if size <= max_rows)
    assert list(sizes) == sorted(set(sizes))


def test_schedule_below_its_smallest_size_is_refused():
    with pytest.raises(ValueError, match="max_rows must be at least 4, got 3"):
        default_schedule(3)


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(0, None), (1, None), (2, 4), (4, 4), (5, 8), (33, 48), (256, 256), (257, 288), (2049, None)],
)
def test_bucket_for_worked_values(rows, bucket):
    assert bucket_for(rows, default_schedule()) == bucket


def test_padding_is_at_most_twofold():
    assert bucket_for(31, (4, 64)) is None
    assert bucket_for(32, (4, 64)) == 64
    assert bucket_for(32, (4, 65)) is None
    assert bucket_for(33, (4, 65)) == 65


@pytest.mark.parametrize(("bucket", "rows"), [(4, 2), (8, 5), (48, 33), (80, 65), (96, 81), (1280, 1025)])
def test_smallest_batch_worked_values(bucket, rows):
    assert smallest_batch(bucket, default_schedule()) == rows


def test_smallest_batch_of_a_wide_gap_is_half_the_bucket():
    assert smallest_batch(65, (4, 65)) == 33


def test_smallest_batch_of_no_bucket_is_refused():
    with pytest.raises(ValueError, match=r"bucket must be one of \(4, 8\), got 6"):
        smallest_batch(6, (4, 8))


@pytest.mark.parametrize("sm_count", [132, 148, 152])
def test_bucket_floor_of_half_the_multiprocessors(sm_count):
    assert bucket_floor(default_schedule(), [0, sm_count // 2]) == 96


def test_bucket_floor_edges():
    assert bucket_floor((4, 8, 16), []) == 4
    assert bucket_floor((4, 8, 16), [4]) == 8
    assert bucket_floor((4, 8, 16), [5]) == 16
    assert bucket_floor((4, 8, 16), [9]) is None


@given(schedules, st.integers(0, 900))
def test_a_bucket_serves_exactly_its_range(sizes, rows):
    serving = [bucket for bucket in sizes if smallest_batch(bucket, sizes) <= rows <= bucket]
    assert len(serving) <= 1
    assert bucket_for(rows, sizes) == (serving[0] if serving else None)


@given(schedules, st.lists(st.integers(0, 300), max_size=3))
def test_floor_is_the_first_bucket_with_every_batch_above_the_regimes(sizes, regimes):
    floor = bucket_floor(sizes, regimes)

    def safe(bucket):
        served = [rows for rows in range(1, bucket + 1) if bucket_for(rows, sizes) == bucket]
        return all(rows > regime for rows in served for regime in regimes)

    assert [bucket for bucket in sizes if safe(bucket)][:1] == ([floor] if floor is not None else [])
