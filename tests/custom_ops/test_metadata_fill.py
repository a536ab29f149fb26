from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

import custom_ops
from custom_ops import BatchMetadata, use_provider
from custom_ops._register import debug_checks
from custom_ops.metadata_header import HEADER_WORDS, Description, fill_described, takes_header_at_once
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


def ids_arguments(
    new: list[int], rows: int, tails: bool, seed: int, dtype: torch.dtype = torch.int64, spare: int = 3
) -> dict:
    """Ids from 1 on; the buffers hold what the batch before left there."""
    ids = s.integers(2**17, sum(new) + spare, seed).to(dtype) + 1
    return {
        "new_ids": ids,
        "tail_ids": s.integers(2**17, len(new), seed + 1).to(dtype) + 1 if tails else None,
        "input_ids": torch.full((rows,), -77, dtype=torch.int64, device=s.DEVICE),
        "last_rows": torch.full((70,), -77, dtype=torch.int64, device=s.DEVICE),
    }


def expected_ids(args: dict) -> dict[str, list[int]]:
    ids, at, want, last = args["new_ids"].tolist(), 0, [], []
    for request, new in enumerate(args["new_lens"].tolist()):
        own = ids[at : at + new]
        if args["tail_ids"] is not None and new:
            own = [*own[1:], args["tail_ids"].tolist()[request]]
        want += own
        at += new
        last.append(max(at - 1, 0))
    pads = len(args["input_ids"]) - len(want)
    return {"input_ids": want + [0] * pads, "last_rows": last + [-77] * (70 - len(last))}


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


@given(
    new=st.lists(lengths, min_size=1, max_size=5),
    tails=st.booleans(),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    spare=st.sampled_from((0, 3)),
    seed=s.seeds,
)
@example(new=[0], tails=False, dtype=torch.int64, spare=0, seed=0)
def test_ids_and_last_rows(new: list[int], tails: bool, dtype: torch.dtype, spare: int, seed: int) -> None:
    table = s.integers(2**24, len(new) * 3, seed).view(len(new), 3)
    for provider in PROVIDERS:
        args = arguments([0] * len(new), new, table, sum(new) + 2)
        args |= ids_arguments(new, sum(new) + 2, tails, seed, dtype, spare)
        s.call("fill_batch_metadata", provider, args)
        want = expected(args) | expected_ids(args)
        assert {name: args[name].tolist() for name in want} == want, provider


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ids_by_hand(provider: str) -> None:
    args = arguments([63, 0], [3, 2], torch.tensor([[3, 4], [5, 6]]), rows=7)
    args |= ids_arguments([3, 2], 7, True, 0)
    args["new_ids"], args["tail_ids"] = torch.arange(11, 16, device=s.DEVICE), int32([98, 99])
    s.call("fill_batch_metadata", provider, args)
    assert args["input_ids"].tolist() == [12, 13, 98, 15, 99, 0, 0]
    assert args["last_rows"][:3].tolist() == [2, 4, -77]
    args["tail_ids"] = None
    s.call("fill_batch_metadata", provider, args)
    assert args["input_ids"].tolist() == [11, 12, 13, 14, 15, 0, 0]


def on_host(values: torch.Tensor) -> torch.Tensor:
    """Where a header and what it points at may lie: host memory, pinned if a GPU is to read it."""
    return values.cpu().pin_memory() if s.ON_GPU else values.cpu()


@given(
    requests=st.lists(st.tuples(lengths, lengths), max_size=5),
    tails=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from((torch.int32, torch.int64))] * 2),
    seed=s.seeds,
)
@example(requests=[(1, 0)], tails=True, dtypes=(torch.int32, torch.int32), seed=0)
def test_a_header_describes_what_the_operator_takes(
    requests: list[tuple[int, int]], tails: bool, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    prefix, new = [p for p, _ in requests], [n for _, n in requests]
    pages = max([-(-(p + n) // 64) for p, n in requests], default=0)
    wider = s.integers(2**24, len(requests) * (pages + 2), seed).view(len(requests), pages + 2).int()
    ids = s.integers(2**17, sum(new), seed + 1).to(dtypes[0]) + 1
    ends = s.integers(2**17, len(new), seed + 2).to(dtypes[1]) + 1
    buffers = [BatchMetadata.allocate(sum(new) + 130, 8, 9, 40, s.DEVICE) for _ in range(3)]
    for m in buffers:
        for tensor in vars(m).values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(-77)
    want = buffers[0]
    custom_ops.fill_batch_metadata(
        int32(prefix), int32(new), wider[:, :pages].contiguous(), want.positions, want.slots, want.kv_lens,
        want.select_lens, want.request_of_row, want.page_table, want.num_rows_device, 40, ids,
        ends if tails else None, want.input_ids, want.last_rows,
    )  # fmt: skip
    lens, table, ids, ends = (on_host(t) for t in (torch.tensor(prefix + new).int(), wider, ids, ends))
    step = {torch.int32: 1, torch.int64: 2}
    header = on_host(
        torch.tensor(
            Description(
                len(new), pages, lens.data_ptr(), table.data_ptr(), pages + 2, ids.data_ptr(), step[dtypes[0]],
                ends.data_ptr() if tails else 0, step[dtypes[1]] if tails else 0,
            )
        )
    )  # fmt: skip
    for provider, got in zip(PROVIDERS, buffers[1:], strict=True):
        with use_provider("fill_batch_metadata", provider):
            fill_described(got, header)
        for name, tensor in vars(want).items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(getattr(got, name), tensor), (provider, name)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_header_of_zeros_is_an_empty_batch(provider: str) -> None:
    got = BatchMetadata.allocate(130, 4, 3, 8, s.DEVICE)
    for name in (*BUFFERS, "input_ids", "num_rows_device"):
        getattr(got, name).fill_(-77)
    with use_provider("fill_batch_metadata", provider):
        fill_described(got, on_host(torch.zeros(HEADER_WORDS, dtype=torch.int64)))
    for name, pad in {**PADS, "input_ids": 0, "num_rows_device": 0}.items():
        assert getattr(got, name).unique().tolist() == [pad], name


def test_a_header_is_read_by_the_provider_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, header = BatchMetadata.allocate(130, 4, 3, 8, s.DEVICE), on_host(torch.zeros(HEADER_WORDS).long())
    for provider, at_once in (("reference", True), ("triton", False)):
        monkeypatch.setenv("SPARSE_PCG_FILL_BATCH_METADATA", provider)
        assert takes_header_at_once(metadata) is at_once
    monkeypatch.setenv("SPARSE_PCG_FILL_BATCH_METADATA", "cutlass")
    with pytest.raises(RuntimeError, match="'cutlass' was asked for but cannot serve"):
        fill_described(metadata, header)


def test_more_of_a_page_table_than_programs_copy_at_once() -> None:
    """64 programs take turns of 1024 entries."""
    requests, pages = 300, 300
    table = on_host(s.integers(2**24, requests * pages, 5).int())
    lens = on_host(torch.tensor([0] * requests + [1] * requests).int())
    header = on_host(
        torch.tensor(Description(requests, pages, lens.data_ptr(), table.data_ptr(), pages, table.data_ptr(), 1, 0, 0))
    )
    got = BatchMetadata.allocate(512, requests + 1, pages + 3, 8, s.DEVICE)
    with use_provider("fill_batch_metadata", "triton"):
        fill_described(got, header)
    assert got.page_table[:requests, :pages].flatten().equal(table.to(s.DEVICE))
    got.page_table[:requests, :pages] = 0
    assert not got.page_table.any()


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
    ids = ids_arguments([3, 2], 6, True, 0)
    refused(ids | {"input_ids": None}, "input_ids", "given with new_ids")
    refused(ids | {"new_ids": None, "input_ids": None}, "tail_ids", "given with new_ids")
    refused(ids | {"tail_ids": ids["tail_ids"][:1]}, "tail_ids", "[2], got [1]")
    refused(ids | {"input_ids": ids["input_ids"].int()}, "input_ids", "got torch.int32")
    refused(ids | {"last_rows": ids["last_rows"][:1]}, "last_rows", "2 or more")
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
