from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from tests.custom_ops import strategies as s
from tests.custom_ops.batches import int32

PROVIDERS = ("reference", "triton")
BUFFERS = {
    "positions": torch.int64,
    "slots": torch.int64,
    "kv_lens": torch.int32,
    "select_lens": torch.int32,
    "request_of_row": torch.int32,
}
PADS = {"positions": 0, "slots": 0, "kv_lens": 0, "select_lens": 1, "request_of_row": 0}


def arguments(
    prefix: list[int], new: list[int], table: torch.Tensor, rows: int, index_topk: int = 40
) -> dict:
    """Every buffer holds what the batch before left there."""
    return {
        "prefix_lens": int32(prefix),
        "new_lens": int32(new),
        "page_table": table.int().to(s.DEVICE),
        **{name: torch.full((rows,), -77, dtype=dtype, device=s.DEVICE) for name, dtype in BUFFERS.items()},
        "static_page_table": torch.full((70, 9), -77, dtype=torch.int32, device=s.DEVICE),
        "num_rows": int32([-77]),
        "index_topk": index_topk,
    }


def expected(args: dict) -> dict[str, list[int]]:
    """Request by request, row by row."""
    want: dict[str, list[int]] = {name: [] for name in BUFFERS}
    table = args["page_table"].tolist()
    lengths = zip(args["prefix_lens"].tolist(), args["new_lens"].tolist(), strict=True)
    for request, (prefix, new) in enumerate(lengths):
        for position in range(prefix, prefix + new):
            want["positions"].append(position)
            want["slots"].append(table[request][position // 64] * 64 + position % 64)
            want["kv_lens"].append(position + 1)
            want["select_lens"].append(min(position + 1, args["index_topk"]))
            want["request_of_row"].append(request)
    count = len(want["positions"])
    for name, values in want.items():
        values.extend([PADS[name]] * (len(args["positions"]) - count))
    return want | {"num_rows": [count]}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    table = torch.tensor([[3, 4], [5, 6]])
    args = arguments([63, 0], [3, 2], table, rows=7, index_topk=65)
    assert s.call("fill_batch_metadata", provider, args) is None
    assert args["positions"].tolist() == [63, 64, 65, 0, 1, 0, 0]
    assert args["slots"].tolist() == [3 * 64 + 63, 4 * 64, 4 * 64 + 1, 5 * 64, 5 * 64 + 1, 0, 0]
    assert args["kv_lens"].tolist() == [64, 65, 66, 1, 2, 0, 0]
    assert args["select_lens"].tolist() == [64, 65, 65, 1, 2, 1, 1]
    assert args["request_of_row"].tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert args["num_rows"].tolist() == [5]
    assert args["static_page_table"][:3, :3].tolist() == [[3, 4, -77], [5, 6, -77], [-77, -77, -77]]


lengths = st.sampled_from((0, 0, 1, 2, 39, 40, 41, 63, 64, 65, 129))


@given(
    requests=st.lists(st.tuples(lengths, lengths), max_size=5),
    spare=st.sampled_from((0, 1, 130)),
    seed=s.seeds,
)
def test_is_the_loop_over_requests(requests: list[tuple[int, int]], spare: int, seed: int) -> None:
    prefix, new = [p for p, _ in requests], [n for _, n in requests]
    pages = max([-(-(p + n) // 64) for p, n in requests], default=0)
    table = s.integers(2**24, len(requests) * pages, seed).view(len(requests), pages)
    for provider in PROVIDERS:
        args = arguments(prefix, new, table, sum(new) + spare)
        s.call("fill_batch_metadata", provider, args)
        want = expected(args)
        assert {name: args[name].tolist() for name in want} == want, provider
        static = args["static_page_table"]
        assert static[: len(requests), :pages].equal(args["page_table"])
        static[: len(requests), :pages] = -77
        assert (static == -77).all()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_more_requests_than_one_block(provider: str) -> None:
    new = [i % 3 for i in range(70)]  # the kernel counts 64 requests at a time
    args = arguments([5] * 70, new, s.integers(1000, 70).view(70, 1), rows=80)
    s.call("fill_batch_metadata", provider, args)
    want = expected(args)
    assert {name: args[name].tolist() for name in want} == want


@pytest.mark.parametrize("provider", PROVIDERS)
def test_large_slots_are_64_bit(provider: str) -> None:
    args = arguments([0], [1], torch.tensor([[2**26]]), rows=1)
    s.call("fill_batch_metadata", provider, args)
    assert args["slots"].tolist() == [2**32]


def test_wrong_arguments() -> None:
    args = arguments([3, 0], [3, 2], torch.tensor([[3, 4], [5, 6]]), rows=6)
    refused = lambda change, *said: s.assert_refused("fill_batch_metadata", args | change, *said)  # noqa: E731
    refused({"prefix_lens": args["prefix_lens"].long()}, "prefix_lens", "got torch.int64")
    refused({"new_lens": args["new_lens"][:1]}, "new_lens", "[2], got [1]")
    refused({"page_table": args["page_table"][:1]}, "page_table", "[2, *], got [1, 2]")
    refused({"page_table": args["page_table"].repeat(1, 5)}, "page_table", "at most [70, 9], got [2, 10]")
    refused({"slots": args["slots"].int()}, "slots", "got torch.int32")
    refused({"kv_lens": args["kv_lens"][:3]}, "kv_lens", "[6], got [3]")
    refused({"request_of_row": args["request_of_row"].repeat(2)[::2]}, "request_of_row", "contiguous")
    refused({"num_rows": args["slots"][:1]}, "num_rows", "got torch.int64")
    refused({"index_topk": 0}, "index_topk", "at least 1")
    with debug_checks():
        refused({"new_lens": int32([5, 2])}, "new_lens", "sum at most 6, got 7")
        refused({"prefix_lens": int32([126, 0])}, "prefix_lens [+] new_lens", "[0, 129)")


def test_opcheck() -> None:
    args = arguments([3, 0], [3, 2], torch.tensor([[3, 4], [5, 6]]), rows=6)
    torch.library.opcheck(torch.ops.sparse_pcg.fill_batch_metadata.default, tuple(args.values()))


@pytest.mark.gpu
def test_bench() -> None:
    args = arguments([1000] * 16, [100] * 16, s.integers(1000, 16 * 9).view(16, 9), rows=2048)
    s.bench(
        "fill_batch_metadata 2048 rows, 16 requests",
        lambda: custom_ops.fill_batch_metadata(**args),
        2048 * 28,
    )
