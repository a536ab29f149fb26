"""Buckets: the numbers of token rows that graphs are captured for.

A batch of r rows runs in the smallest bucket b >= r, padded to b rows, if the padding is at most twofold
(b <= 2 r). So bucket b serves exactly the row counts from ``smallest_batch(b)`` to b; every other row count
runs uncaptured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

MAX_PADDING = 2

# (first size, last size, step); from the last band's step on, sizes go up to the caller's maximum.
_BANDS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
_LAST_STEP = 512


def default_schedule(max_rows: int = 2048) -> tuple[int, ...]:
    """The sizes captured by default, ascending: SGLang's schedule, up to ``max_rows``.

    4..32 by 4, 48..256 by 16, 288..512 by 32, 576..1024 by 64, 1280..4096 by 256, then by 512. Sizes above
    ``max_rows`` are left out; ``max_rows`` itself is not put in where it is none of them.

    Raises ValueError if ``max_rows`` is below 4, the smallest size.
    """
    if max_rows < _BANDS[0][0]:
        raise ValueError(f"default_schedule: max_rows must be at least {_BANDS[0][0]}, got {max_rows}")
    sizes = [size for first, last, step in _BANDS for size in range(first, last + 1, step)]
    sizes += range(sizes[-1] + _LAST_STEP, max_rows + 1, _LAST_STEP)
    return tuple(size for size in sizes if size <= max_rows)


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The bucket that serves ``rows`` rows: the smallest of the ascending ``sizes`` that is >= rows.

    None where there is none: no rows, more rows than the largest bucket, or a bucket of more than twice the
    rows (a single row in a schedule that starts at 4, say). Such a batch runs uncaptured.
    """
    at = bisect_left(sizes, rows)
    if rows < 1 or at == len(sizes) or sizes[at] > MAX_PADDING * rows:
        return None
    return sizes[at]


def smallest_batch(bucket: int, sizes: Sequence[int]) -> int:
    """The fewest rows that ``bucket`` serves: max(previous bucket + 1, ceil(bucket / 2)).

    Raises ValueError if ``bucket`` is not one of the ascending ``sizes``.
    """
    at = bisect_left(sizes, bucket)
    if at == len(sizes) or sizes[at] != bucket:
        raise ValueError(f"smallest_batch: bucket must be one of {tuple(sizes)}, got {bucket}")
    previous = sizes[at - 1] if at else 0
    return max(previous + 1, -(-bucket // MAX_PADDING))


def bucket_floor(sizes: Sequence[int], row_regimes: Iterable[int]) -> int | None:
    """The smallest bucket all of whose batches have more rows than every number in ``row_regimes``.

    A row regime is the number of rows up to which some op's reduction order depends on the number of rows:
    from the floor on, padding leaves every valid row's bits alone. Without regimes it is the smallest
    bucket; None if no bucket of the ascending ``sizes`` is high enough.
    """
    regime = max(row_regimes, default=0)
    return next((bucket for bucket in sizes if smallest_batch(bucket, sizes) > regime), None)
