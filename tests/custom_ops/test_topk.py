from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from custom_ops.topk_triton import launch_triton
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")
NAN, INF = float("nan"), float("inf")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=s.DEVICE)


def select(
    provider: str, values: list[float], k: int, start: int = 0, length: int | None = None
) -> list[int]:
    args = {
        "logits": torch.tensor([values], device=s.DEVICE),
        "starts": int32(start),
        "lengths": int32(len(values) - start if length is None else length),
        "k": k,
    }
    return s.call("topk_indices", provider, args)[0].tolist()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("values", "k", "want"),
    [
        ([1.0, 5.0, 2.0, 4.0], 2, [1, 3]),  # the two largest, in order of position
        ([7.0, 3.0, 7.0, 7.0], 2, [0, 2]),  # of three equal ones the first two
        ([3.0, 9.0, 3.0, 3.0], 3, [0, 1, 2]),  # ties fill up behind what is greater
        ([0.0, -0.0, 0.0, -1.0], 2, [0, 1]),  # zeros are equal
        ([-0.0, 0.0, -1.0, 0.0], 2, [0, 1]),
        ([NAN, -INF, NAN, 1.0], 2, [1, 3]),  # NaN ranks below -inf
        ([NAN, -NAN, NAN, 1.0], 2, [0, 3]),  # and equal to NaN, whatever its bits
        ([INF, 3.0, INF, NAN], 2, [0, 2]),
        ([-1.0, -2.0, -3.0, -1e-40], 2, [0, 3]),  # negative, and a subnormal
        ([2.0, 1.0], 4, [0, 1, -1, -1]),  # fewer than k: all, then -1
        ([2.0, 1.0, 3.0], 3, [0, 1, 2]),  # exactly k
        ([NAN, NAN], 3, [0, 1, -1]),
    ],
)
def test_by_hand(provider: str, values: list[float], k: int, want: list[int]) -> None:
    assert select(provider, values, k) == want


@pytest.mark.parametrize("provider", PROVIDERS)
def test_columns_outside_the_range_by_hand(provider: str) -> None:
    values = [INF, NAN, 1.0, 3.0, 2.0, INF, NAN]
    assert select(provider, values, 2, start=2, length=3) == [1, 2]
    assert select(provider, values, 4, start=2, length=3) == [0, 1, 2, -1]
    assert select(provider, values, 2, start=2, length=0) == [-1, -1]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_slots_by_hand(provider: str) -> None:
    logits = torch.zeros(2, 130, device=s.DEVICE)
    logits[0, [0, 63, 64, 128]] = 1.0
    logits[1, [1, 65]] = 1.0
    pages = torch.tensor([[9, 2, 4], [7, 3, 0]], dtype=torch.int32, device=s.DEVICE)
    args = {"logits": logits, "starts": int32(0, 0), "lengths": int32(130, 66), "request_of_row": int32(0, 1)}
    got = s.call("topk_slots", provider, args | {"page_table": pages, "k": 4})
    # Row 0: positions 0, 63 | 64 | 128 in pages 9, 2, 4. Row 1: 1, 65 and the first two zeros, 0 and 2.
    assert got.tolist() == [[576, 639, 128, 256], [448, 449, 450, 193]]


def make(k: int, width: int, values: str, stride_pad: int, seed: int) -> dict:
    """Rows of every interesting length; what lies outside a row's range, or beyond the width, is poison."""
    gen = s.generator(seed)
    lengths = [n for n in (0, 1, k - 1, k, k + 1, width // 2, width) if n <= width]
    rows = len(lengths)
    starts = [int(torch.randint(0, width - n + 1, (1,), generator=gen)) for n in lengths]
    if values == "normal":
        data = torch.randn(rows, width, generator=gen)
    elif values == "ties":
        data = torch.randint(-1, 2, (rows, width), generator=gen).float()
    elif values == "equal":
        data = torch.full((rows, width), -0.25)
    else:
        table = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-40, 1.0, -1.0])
        data = table[torch.randint(0, len(table), (rows, width), generator=gen)]
    column = torch.arange(width)
    first = torch.tensor(starts).unsqueeze(1)
    inside = (column >= first) & (column < first + torch.tensor(lengths).unsqueeze(1))
    poison = torch.tensor([NAN, INF])[torch.randint(0, 2, (rows, width), generator=gen)]
    wide = torch.full((rows, width + stride_pad), INF)
    wide[:, :width] = torch.where(inside, data, poison)
    return {
        "logits": wide.to(s.DEVICE)[:, :width],
        "starts": int32(*starts),
        "lengths": int32(*lengths),
        "k": k,
    }


def by_sorting(args: dict) -> list[list[int]]:
    """The contract, one row at a time, with Python's sort."""
    result = []
    for row, start, length in zip(args["logits"].cpu(), args["starts"], args["lengths"], strict=True):
        values = row[int(start) : int(start) + int(length)].tolist()
        rank = [(v != v, 0.0 if v != v else -v, i) for i, v in enumerate(values)]
        order = [i for _, _, i in sorted(rank)]
        chosen = sorted(order[: args["k"]])
        result.append(chosen + [-1] * (args["k"] - len(chosen)))
    return result


cases = {
    "k": st.sampled_from((1, 2, 16, 33)),
    "width": st.sampled_from((1, 2, 40, 97)),
    "values": st.sampled_from(("normal", "ties", "equal", "special")),
    "stride_pad": st.sampled_from((0, 1, 64)),
    "seed": s.seeds,
}


@given(**cases)
def test_both_providers_follow_the_contract(
    k: int, width: int, values: str, stride_pad: int, seed: int
) -> None:
    args = make(k, width, values, stride_pad, seed)
    want = by_sorting(args)
    for provider in PROVIDERS:
        got = s.call("topk_indices", provider, args)
        assert got.tolist() == want
        s.assert_fake_is_exact("topk_indices", tuple(args.values()), got)


@pytest.mark.parametrize("values", ["normal", "ties", "special"])
def test_rows_of_several_blocks(values: str) -> None:
    args = make(2048, 9001, values, 3, 5)  # a block of the kernel is 4096 columns
    s.assert_bitwise(s.call("topk_indices", "triton", args), s.call("topk_indices", "reference", args))


@pytest.mark.parametrize("values", ["equal", "ties", "special"])
def test_nothing_is_written_beyond_the_rows(values: str) -> None:
    args = make(16, 97, values, 0, 2)
    rows = len(args["lengths"])
    buffer = torch.full((rows + 1, 16), 77, dtype=torch.int32, device=s.DEVICE)
    launch_triton(buffer[:rows], args["logits"], args["starts"], args["lengths"], None, None, rows)
    s.assert_bitwise(buffer[:rows], s.call("topk_indices", "reference", args))
    assert (buffer[rows] == 77).all()


@given(**{name: cases[name] for name in ("k", "values", "seed")})
def test_slots_are_the_mapped_indices(k: int, values: str, seed: int) -> None:
    args = make(k, 150, values, 0, seed)
    rows = len(args["lengths"])
    requests = s.integers(3, rows, seed).int()
    table = s.integers(2**20, 3 * 5, seed).int().view(3, 5)[:, :3]  # pages of a wider table
    indices = s.call("topk_indices", "reference", args)
    paged = {**args, "request_of_row": requests, "page_table": table, "k": args["k"]}
    paged["k"] = paged.pop("k")  # last in the schema
    want = [
        [-1 if p < 0 else int(table[r, p // 64]) * 64 + p % 64 for p in row]
        for row, r in zip(indices.tolist(), requests.tolist(), strict=True)
    ]
    for provider in PROVIDERS:
        got = s.call("topk_slots", provider, paged)
        assert got.tolist() == want
        s.assert_fake_is_exact("topk_slots", tuple(paged.values()), got)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_rows(provider: str) -> None:
    args = {"logits": torch.zeros(0, 8, device=s.DEVICE), "starts": int32(), "lengths": int32(), "k": 4}
    assert s.call("topk_indices", provider, args).shape == (0, 4)


def paged_arguments(rows: int = 3) -> dict:
    return {
        "logits": s.randn((rows, 70)),
        "starts": torch.zeros(rows, dtype=torch.int32, device=s.DEVICE),
        "lengths": torch.full((rows,), 66, dtype=torch.int32, device=s.DEVICE),
        "request_of_row": torch.zeros(rows, dtype=torch.int32, device=s.DEVICE),
        "page_table": torch.ones(1, 2, dtype=torch.int32, device=s.DEVICE),
        "k": 5,
    }


def test_wrong_arguments() -> None:
    args = paged_arguments()
    refused = lambda change, *said: s.assert_refused("topk_slots", args | change, *said)  # noqa: E731
    refused({"logits": args["logits"].bfloat16()}, "logits", "got torch.bfloat16")
    refused({"logits": args["logits"][0]}, "logits", "got [70]")
    refused({"logits": args["logits"][:, ::2]}, "logits", "contiguous along columns")
    refused({"starts": args["starts"].long()}, "starts", "got torch.int64")
    refused({"lengths": args["lengths"][:2]}, "lengths", "[3], got [2]")
    refused({"request_of_row": args["request_of_row"][:2]}, "request_of_row", "[3], got [2]")
    refused({"page_table": args["page_table"].long()}, "page_table", "got torch.int64")
    refused({"page_table": args["page_table"].repeat(1, 2)[:, ::2]}, "page_table", "contiguous along pages")
    refused({"k": 0}, "k", "at least 1, got 0")
    with debug_checks():
        refused({"lengths": args["lengths"] + 5}, "lengths", "71 .. 71")
        refused({"starts": args["starts"] + 5}, "starts [+] lengths", "71 .. 71")
        refused({"request_of_row": args["request_of_row"] + 1}, "request_of_row", "1 .. 1")
        for page in (-1, 2**25):  # a slot is an int32
            refused({"page_table": args["page_table"] * page}, "page_table", "in [0, 33554432)")
        custom_ops.topk_slots(**args | {"page_table": torch.cat((args["page_table"], -args["page_table"]), 1)})
    plain = {name: args[name] for name in ("logits", "starts", "lengths", "k")}
    s.assert_refused("topk_indices", plain | {"starts": args["starts"][:2]}, "starts", "[3], got [2]")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_opcheck(rows: int) -> None:
    args = paged_arguments(rows)
    torch.library.opcheck(torch.ops.sparse_pcg.topk_slots.default, tuple(args.values()))
    plain = tuple(args[name] for name in ("logits", "starts", "lengths", "k"))
    torch.library.opcheck(torch.ops.sparse_pcg.topk_indices.default, plain)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(512, 32768), (2048, 8192), (512, 4096)])
def test_bench(rows: int, width: int) -> None:
    logits = torch.randn(rows, width, device="cuda")
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    label = f"topk_indices {rows} x {width}, k = 2048"
    s.bench(label, lambda: custom_ops.topk_indices(logits, starts, lengths, 2048), 4 * rows * (width + 2048))
