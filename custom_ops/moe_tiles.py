"""One tile of what a routed expert computes: BM rows by BN columns, for any order of the rows."""

from __future__ import annotations

import triton
import triton.language as tl


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
        b_mask = (n < INTER)[None, :]
        if HIDDEN % BK != 0:
            a_mask = a_mask & (k < HIDDEN)[None, :]
            b_mask = b_mask & (k < HIDDEN)[:, None]
        a = tl.load(source + k[None, :], mask=a_mask, other=0.0)
        gate = tl.dot(a, tl.load(gate_weight + k[:, None], mask=b_mask, other=0.0), gate)
        up = tl.dot(a, tl.load(up_weight + k[:, None], mask=b_mask, other=0.0), up)
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
        b_mask = (n < HIDDEN)[None, :]
        if INTER % BK != 0:
            a_mask = a_mask & (k < INTER)[None, :]
            b_mask = b_mask & (k < INTER)[:, None]
        a = tl.load(source + k[None, :], mask=a_mask, other=0.0)
        total = tl.dot(a, tl.load(down + k[:, None], mask=b_mask, other=0.0), total)
    return total
