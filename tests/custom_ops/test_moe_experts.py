from __future__ import annotations

import importlib
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from custom_ops import debug_checks
from custom_ops.moe_experts import Tiles, launch, tiles_for
from custom_ops.moe_few_rows import ROWS, launch_few
from custom_ops.moe_tiles import Tile
from tests.custom_ops import strategies as s
from tests.custom_ops.opcheck import opcheck

FAMILY = importlib.import_module("custom_ops.moe_experts")
PROVIDERS = ("reference", "triton")
TILES = (Tiles(16, Tile(16, 32, 4, 3), Tile(32, 32, 4, 3)), Tiles(32, Tile(32, 16, 4, 3), Tile(16, 16, 4, 3)))


@pytest.fixture(autouse=True, scope="module")
def few_chunks() -> Iterator[None]:
    """A program of the plan for each of 32 chunks would take the interpreter long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FAMILY, "_CHUNKS", 4)
        yield


def arguments(
    rows: int = 7,
    experts: int = 3,
    top: int = 2,
    hidden: int = 48,
    inter: int = 24,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    absent: int = 2,
    exact: bool = False,
) -> dict:
    """Random choices among ``experts`` here and ``absent`` ones that are not; of each five rows the last is a pad.

    exact: small integers with gates so high that their sigmoid is 1, and weights that are powers of two: all sums
    are exact, in any order.
    """
    generator = s.generator(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    if exact:
        x = torch.randint(-1, 2, (rows, hidden), generator=generator).float()
        gate_up = torch.randint(-1, 2, (experts, 2 * inter, hidden), generator=generator).float()
        down = torch.randint(-1, 2, (experts, hidden, inter), generator=generator).float()
        x[:, 0] = 1
        gate_up[:, :inter] = 0
        gate_up[:, :inter, 0] = 32
        weights = 2.0 ** torch.randint(-2, 1, (rows, top), generator=generator)
    else:
        x, gate_up, down = draw(rows, hidden), draw(experts, 2 * inter, hidden), draw(experts, hidden, inter)
        gate_up, down = gate_up / hidden**0.5, down / inter**0.5
        weights = draw(rows, top).sigmoid()
    ids = draw(rows, experts + absent).topk(top).indices.clamp(max=experts)
    pad = torch.arange(rows) % 5 == 4
    ids[pad], x[pad], weights[pad] = experts, torch.nan, torch.nan
    x, gate_up, down = (t.to(dtype).to(s.DEVICE) for t in (x, gate_up, down))
    tensors = (x, gate_up, down, weights.to(s.DEVICE), ids.to(s.DEVICE))
    names = ("x", "gate_up", "down", "weights", "ids")
    return dict(zip(names, tensors, strict=True)) | {"num_experts": experts + absent}


def row_by_row(args: dict) -> torch.Tensor:
    """The definition, in float64, a choice at a time."""
    out = torch.zeros(args["x"].shape, dtype=torch.float64, device=args["x"].device)
    for row, ids in enumerate(args["ids"].tolist()):
        for place, expert in enumerate(ids):
            if expert < len(args["gate_up"]):
                gate, up = (args["gate_up"][expert].double() @ args["x"][row].double()).chunk(2)
                active = torch.nn.functional.silu(gate) * up
                out[row] += args["weights"][row, place] * (args["down"][expert].double() @ active)
    return out


def tensors(args: dict) -> tuple:
    return tuple(args.values())[:5]


@pytest.mark.parametrize("provider", [*PROVIDERS, "triton for many"])
def test_by_hand(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts of one column; the sigmoid of 64 is 1 and that of -128 is 0."""
    if provider == "triton for many":
        provider = "triton"
        monkeypatch.setattr(FAMILY, "FEW_ROWS", 0)
    tensor = lambda values, dtype=torch.bfloat16: torch.tensor(values, dtype=dtype, device=s.DEVICE)  # noqa: E731
    args = {
        "x": tensor([[1.0, 2.0], [1.0, -1.0], [-2.0, 5.0]]),
        "gate_up": tensor([[[64.0, 0.0], [0.0, 1.0]], [[64.0, 0.0], [1.0, 1.0]]]),
        "down": tensor([[[1.0], [0.0]], [[0.5], [1.0]]]),
        "weights": tensor([[0.5, 0.25], [1.0, 2.0], [1.0, 1.0]], torch.float32),
        "ids": tensor([[1, 0], [0, 2], [0, 1]], torch.int64),
        "num_experts": 3,
    }
    # row 0: expert 1 gives 64 * 3 to (96, 192), halved; expert 0 gives 64 * 2 to (128, 0), a quarter of it.
    # row 1: expert 0 gives -64 to (-64, 0); the other choice is not here. row 2: silu(-128) is 0.
    want = tensor([[80.0, 96.0], [-64.0, 0.0], [0.0, 0.0]])
    s.assert_bitwise(s.call("moe_experts", provider, args) + 0.0, want)


@given(
    rows=s.tokens,
    experts=st.sampled_from((1, 3, 8)),
    top=st.sampled_from((1, 2, 3)),
    sizes=st.sampled_from(((48, 24), (64, 32), (130, 40), (16, 70))),
    absent=st.sampled_from((0, 2, 9)),
    dtype=s.floats,
    layout=s.layouts,
    seed=s.seeds,
)
def test_agrees_with_the_definition(
    rows: int, experts: int, top: int, sizes: tuple, absent: int, dtype: torch.dtype, layout: str, seed: int
) -> None:
    args = arguments(rows, experts, min(top, experts + absent), *sizes, dtype, seed, absent)
    if layout != "contiguous":
        pad = args["x"].isnan()
        args["x"] = s.randn(args["x"].shape, dtype, seed, layout)
        if layout != "expanded":
            args["x"][pad] = torch.nan
    args["weights"], args["ids"] = (t.T.contiguous().T for t in (args["weights"], args["ids"]))
    want = row_by_row(args)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for provider in PROVIDERS[: 1 if dtype == torch.float32 else 2]:
        got = s.call("moe_experts", provider, args)
        assert got.dtype == dtype and not got[(args["ids"] == experts).all(1)].any()
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        s.assert_fake_is_exact("moe_experts", tuple(args.values()), got)


@example(rows=2, experts=1, top=1, tiles=TILES[0], routing="all to one", seed=0)  # the last block that there can be
@example(rows=61, experts=4, top=1, tiles=TILES[0], routing="all to one", seed=0)  # several blocks, lists and tiles
@example(rows=61, experts=4, top=3, tiles=TILES[1], routing="drawn", seed=1)
@given(
    rows=st.sampled_from((*s.TOKENS, 61)),
    experts=st.sampled_from((1, 4, 5)),
    top=st.sampled_from((1, 3)),
    tiles=st.sampled_from(TILES),
    routing=st.sampled_from(("drawn", "all to one", "the last alone", "none")),
    seed=s.seeds,
)
def test_whole_numbers_are_exact(rows: int, experts: int, top: int, tiles: Tiles, routing: str, seed: int) -> None:
    """Blocks that are full, part full and empty, for every way in which rows spread over the experts."""
    args = arguments(rows, experts, top, 48, 24, torch.float16, seed, absent=3, exact=True)
    here = args["ids"] < experts
    if routing != "drawn":
        args["ids"].fill_(experts)
    if routing == "all to one":
        args["ids"][:, 0] = torch.where(here.any(1), seed % experts, experts)
    if routing == "the last alone":
        args["ids"][-1:, -1] = torch.where(here.any(1), 0, experts)[-1:]
    with pytest.MonkeyPatch.context() as patch:
        steps = {"_PLAN_ROWS": 2, "_PROGRAMS": 3, "_FILL_ROWS": 4, "_FILL_BLOCK": 16, "_SUM_BLOCK": 16}
        for name, least in steps.items():
            patch.setattr(FAMILY, name, least)  # several steps of all, as many rows have
        got = launch(*tensors(args), tiles)
    s.assert_bitwise(got + 0.0, row_by_row(args).half() + 0.0)


@pytest.mark.parametrize("tiles", TILES)
def test_rows_are_independent(tiles: Tiles) -> None:
    args = arguments(50, 4, 2, 32, 16, exact=True, absent=1)
    clean = launch(*tensors(args), tiles)
    args["x"][3] = torch.nan
    args["x"][20, 1] = torch.inf
    got = launch(*tensors(args), tiles)
    others = [i for i in range(50) if i not in (3, 20)]
    s.assert_bitwise(got[others], clean[others])
    for end in (1, 2, 17):
        part = {name: value[:end] if name in ("x", "weights", "ids") else value for name, value in args.items()}
        s.assert_bitwise(launch(*tensors(part), tiles)[:3], clean[: min(end, 3)])


@settings(max_examples=25)
@given(
    rows=st.sampled_from((1, 2, 7, ROWS)),
    experts=st.sampled_from((1, 3, 8)),
    top=st.sampled_from((1, 2, 3)),
    sizes=st.sampled_from(((48, 24), (130, 40), (16, 70))),
    absent=st.sampled_from((0, 2, 9)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    seed=s.seeds,
)
def test_few_rows_have_the_bits_of_many(
    rows: int, experts: int, top: int, sizes: tuple, absent: int, dtype: torch.dtype, seed: int
) -> None:
    args = arguments(rows, experts, min(top, experts + absent), *sizes, dtype, seed, absent)
    product = np.matmul

    def exact(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return product(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", exact)  # the interpreter's: in float32 a row's bits depend on its place in the tile
        few = launch_few(*tensors(args))
        s.assert_bitwise(few, launch(*tensors(args), Tiles(ROWS, Tile(32, 256, 4, 3), Tile(32, 256, 4, 3))))
        args["x"][rows // 2] = torch.nan
        others = [i for i in range(rows) if i != rows // 2]
        s.assert_bitwise(launch_few(*tensors(args))[others], few[others])


def test_few_rows_are_those_that_one_tile_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(FAMILY, "launch_few", lambda *args: taken.append(len(args[0])) or args[0])
    for rows in (1, ROWS, ROWS + 1):
        s.call("moe_experts", "triton", arguments(rows))
    s.call("moe_experts", "triton", arguments(1, experts=33))
    assert taken == [1, ROWS]


@pytest.mark.parametrize("rows", [5, 40])
def test_what_was_in_memory_is_not_seen(rows: int) -> None:
    """New tensors hold NaN and the largest integer. Rows with no, one and several experts here."""
    args = arguments(rows, 3, 3, absent=4)
    served = (args["ids"] < 3).sum(1)
    assert {0, 1, 2} <= set(served.tolist())
    want = s.call("moe_experts", "triton", args)
    torch.use_deterministic_algorithms(True)
    try:
        s.assert_bitwise(s.call("moe_experts", "triton", args), want)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not want[served == 0].any() and want.isfinite().all()


@pytest.mark.parametrize("rows", [5, 40])
def test_zero_is_positive(rows: int) -> None:
    """As the sum of parts that begins at zero: a row's only part makes no other bits."""
    args = arguments(rows, 3, 1, absent=0)
    args["x"].zero_()
    got = s.call("moe_experts", "triton", args | {"weights": -torch.ones_like(args["weights"])})
    s.assert_bitwise(got, torch.zeros_like(got))


def test_narrow_experts_take_more_programs_where_blocks_are_few() -> None:
    columns = lambda rows, inter, experts: tiles_for(rows, inter, experts).gate.columns  # noqa: E731
    assert [columns(64, 256, 4), columns(256, 256, 4), columns(20, 64, 1)] == [16, 32, 16]
    assert [columns(64, 256, 32), columns(256, 256, 32), columns(64, 2048, 4)] == [64, 64, 64]


def test_an_expert_that_overflows_on_a_row_it_does_not_serve_is_harmless() -> None:
    args = arguments(6, 2, 1, absent=0)
    args["ids"].zero_()
    args["x"], args["weights"] = torch.ones_like(args["x"]), torch.ones_like(args["weights"])
    args["gate_up"][1] = 1e30
    for provider in PROVIDERS:
        assert s.call("moe_experts", provider, args).isfinite().all()


def test_negative_weights_count() -> None:
    args = arguments(6, 2, 1, absent=0, exact=True)
    for provider in PROVIDERS:
        got = s.call("moe_experts", provider, args)
        s.assert_bitwise(s.call("moe_experts", provider, args | {"weights": -args["weights"]}) + 0.0, -got + 0.0)


def test_tiles_by_rows_of_an_expert() -> None:
    assert [tiles_for(n, 256).rows for n in (0.5, 16, 16.5, 64, 65, 256)] == [16, 16, 64, 64, 128, 128]
    assert (tiles_for(256, 256).down.columns, tiles_for(256, 2048).down.columns) == (128, 256)


def test_wrong_arguments() -> None:
    args = arguments()
    refused = lambda argument, value, said: s.assert_refused(  # noqa: E731
        "moe_experts", args | {argument: value}, argument, said
    )
    refused("x", args["x"].double(), "got torch.float64")
    refused("x", args["x"][0], "got [48]")
    refused("gate_up", args["gate_up"].half(), "got torch.float16")
    refused("gate_up", args["gate_up"][:, :, :40], "of shape [*, *, 48]")
    refused("gate_up", args["gate_up"][:, ::2], "contiguous")
    refused("gate_up", args["gate_up"][:0], "at least one expert")
    refused("gate_up", args["gate_up"][:, :47].contiguous(), "even number of rows")
    refused("down", args["down"][:2], "of shape [3, 48, 24]")
    refused("down", args["down"].mT.contiguous().mT, "contiguous")
    refused("weights", args["weights"].bfloat16(), "got torch.bfloat16")
    refused("weights", args["weights"][:6], "of shape [7, *]")
    refused("weights", args["weights"][:, :0], "at least one choice")
    refused("ids", args["ids"].int(), "got torch.int32")
    refused("ids", args["ids"][:, :1], "of shape [7, 2]")
    refused("num_experts", 2, "at least the 3 experts here")
    s.assert_refused_on_another_device("moe_experts", args, "gate_up", "down", "weights", "ids")


@pytest.mark.parametrize("wrong", [-1, 4])
def test_ids_are_looked_at_under_debug_checks(wrong: int) -> None:
    args = arguments()
    args["ids"][2, 1] = wrong
    with debug_checks():
        s.assert_refused("moe_experts", args, "ids", "in [0, 4)")


def test_opcheck() -> None:
    for rows in (0, 7):
        opcheck("moe_experts", arguments(rows))


def test_float32_is_left_to_the_reference() -> None:
    with pytest.raises(RuntimeError, match=r"moe_experts: provider 'triton' .*bfloat16 or float16"):
        s.call("moe_experts", "triton", arguments(dtype=torch.float32))
