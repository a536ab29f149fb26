"""One tile of what a routed expert computes: BM rows by BN columns, for any order of the rows."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """Columns of a program, depth of a step, warps, steps in flight and being computed."""

    columns: int
    depth: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """The constants and launch options of a kernel that works in such tiles."""
        sizes = {"BN": self.columns, "BK": self.depth, "num_warps": self.warps, "num_stages": self.stages}
        return {**sizes, "enable_fp_fusion": False}


@triton.jit
def _weights(
    place: tl.tensor,
    k: tl.tensor,
    n: tl.tensor,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """[BK, BN] from ``place``, zero beyond DEPTH or COLUMNS."""
    if DEPTH % BK == 0 and COLUMNS % BN == 0:
        values = tl.load(place)
    elif DEPTH % BK == 0:
        values = tl.load(place, mask=(n < COLUMNS)[None, :], other=0.0)
    else:
        values = tl.load(place, mask=(k < DEPTH)[:, None] & (n < COLUMNS)[None, :], other=0.0)
    return values


@triton.jit
def gated_tile(
    source: tl.tensor,
    weight: tl.tensor,
    mask: tl.tensor,
    n: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """float32 [BM, BN]: silu(gate) * up of columns ``n``.

    source [BM, 1]: where the rows begin; ``mask`` [BM] says which there are. weight: the expert's, [2 * INTER, HIDDEN].
    """
    gate_weight = weight + n[None, :] * HIDDEN
    up_weight = gate_weight + INTER * HIDDEN
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, HIDDEN, BK):
        k = start + tl.arange(0, BK)
        a_mask = mask[:, None]
        if HIDDEN % BK != 0:
            a_mask = a_mask & (k < HIDDEN)[None, :]
        a = tl.load(source + k[None, :], mask=a_mask, other=0.0)
        gate = tl.dot(a, _weights(gate_weight + k[:, None], k, n, HIDDEN, INTER, BN, BK), gate)
        up = tl.dot(a, _weights(up_weight + k[:, None], k, n, HIDDEN, INTER, BN, BK), up)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def down_tile(
    source: tl.tensor,
    weight: tl.tensor,
    mask: tl.tensor,
    n: tl.tensor,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """float32 [BM, BN]: columns ``n`` of the product. source, mask: as above; weight: [HIDDEN, INTER]."""
    down = weight + n[None, :] * INTER
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, INTER, BK):
        k = start + tl.arange(0, BK)
        a_mask = mask[:, None]
        if INTER % BK != 0:
            a_mask = a_mask & (k < INTER)[None, :]
        a = tl.load(source + k[None, :], mask=a_mask, other=0.0)
        total = tl.dot(a, _weights(down + k[:, None], k, n, INTER, HIDDEN, BN, BK), total)
    return total
