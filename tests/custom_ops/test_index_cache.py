from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")
PAGES = 4
POISON = 0xA5


def poisoned_cache(pages: int = PAGES) -> torch.Tensor:
    return torch.full((pages, 8448), POISON, dtype=torch.uint8, device=s.DEVICE)


def store_arguments(
    rows: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    layout: str = "contiguous",
    round_scale: bool = False,
) -> dict:
    return {
        "key": s.randn((rows, 128), dtype, seed, layout, std=2),
        "cache": poisoned_cache(),
        "slots": s.distinct(PAGES * 64, rows, seed),
        "round_scale": round_scale,
    }


def gather_arguments(kv_lens: tuple[int, ...] = (70, 0, 9), seed: int = 0) -> dict:
    random = torch.randint(256, (8, 8448), dtype=torch.uint8, generator=s.generator(seed))
    random = (random & 0x77).to(s.DEVICE)  # neither an e4m3 nor a float32 NaN
    pages = torch.randperm(8, generator=s.generator(seed + 1))
    table = torch.stack([pages.roll(i)[:3] for i in range(len(kv_lens))]) if kv_lens else torch.zeros(0, 3)
    return {
        "cache": random,
        "page_table": table.to(torch.int32).to(s.DEVICE),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32, device=s.DEVICE),
        "total": sum(kv_lens),
    }


@pytest.mark.parametrize("provider", PROVIDERS)
def test_page_bytes_by_hand(provider: str) -> None:
    key = torch.zeros(3, 128, device=s.DEVICE)
    key[0, :4] = torch.tensor([448.0, 1.0, -2.0, 2.0**-9])  # amax 448: scale 1
    key[1, 126:] = torch.tensor([1.0, -224.0])  # amax 224: scale 1/2
    key[2, 0] = 300.0  # amax 300: scale 300/448, or 1 when rounded up
    cache, slots = poisoned_cache(), torch.tensor([65, 63, 128], device=s.DEVICE)
    args = {"key": key, "cache": cache, "slots": slots, "round_scale": True}
    s.call("index_k_store", provider, args)

    def page(number: int, begin: int, size: int) -> list[int]:
        return cache[number, begin : begin + size].tolist()

    # slot 65: page 1, token 1: keys at 128, scale at 8192 + 4
    assert page(1, 128, 4) == [0x7E, 0x38, 0xC0, 0x01] and page(1, 132, 124) == [0] * 124
    assert page(1, 8196, 4) == [0x00, 0x00, 0x80, 0x3F]  # 1.0, little endian
    # slot 63: page 0, token 63: keys at 8064, scale at 8192 + 252; the values doubled: 2 and -448
    assert page(0, 8064 + 126, 2) == [0x40, 0xFE]
    assert page(0, 8444, 4) == [0x00, 0x00, 0x00, 0x3F]  # 0.5
    # slot 128: page 2, token 0; 300 is stored as 288
    assert page(2, 0, 2) == [0x79, 0x00] and page(2, 8192, 4) == [0x00, 0x00, 0x80, 0x3F]
    assert int((cache != POISON).sum()) == 3 * 132
    s.call("index_k_store", provider, args | {"round_scale": False})
    assert page(2, 0, 2) == [0x7E, 0x00]
    scale = torch.tensor(300.0).div(448).item()
    assert bytes(page(2, 8192, 4)) == struct.pack("<f", scale)


@given(rows=s.tokens, dtype=s.floats, layout=s.layouts, round_scale=st.booleans(), seed=s.seeds)
def test_store_triton_equals_reference(
    rows: int, dtype: torch.dtype, layout: str, round_scale: bool, seed: int
) -> None:
    args = store_arguments(rows, dtype, seed, layout, round_scale)
    caches = [poisoned_cache(), poisoned_cache()]
    for provider, cache in zip(PROVIDERS, caches, strict=True):
        assert s.call("index_k_store", provider, args | {"cache": cache}) is None
    s.assert_bitwise(caches[1], caches[0])
    # What was stored is the quantised key, at the slots and nowhere else.
    q, scale = custom_ops.quant_fp8(args["key"], 128, round_scale)
    by_token = caches[0][:, :8192].reshape(-1, 128), caches[0][:, 8192:].reshape(-1, 4)
    s.assert_bitwise(by_token[0][args["slots"]], q.view(torch.uint8))
    s.assert_bitwise(by_token[1][args["slots"]], scale.view(torch.uint8))
    untouched = torch.ones(PAGES * 64, dtype=torch.bool, device=s.DEVICE)
    untouched[args["slots"]] = False
    assert (by_token[0][untouched] == POISON).all() and (by_token[1][untouched] == POISON).all()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_pad_rows_touch_the_dummy_slot_only(provider: str, poison: float) -> None:
    args = store_arguments(11)
    s.call("index_k_store", provider, args)
    padded = {
        "key": torch.cat((args["key"], torch.full((5, 128), poison, dtype=torch.bfloat16, device=s.DEVICE))),
        "cache": poisoned_cache(),
        "slots": torch.cat((args["slots"], torch.zeros(5, dtype=torch.int64, device=s.DEVICE))),
        "round_scale": False,
    }
    s.call("index_k_store", provider, padded)
    for cache in (args["cache"], padded["cache"]):
        cache[0, :128] = cache[0, 8192:8196] = 0
    s.assert_bitwise(padded["cache"], args["cache"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_gather_by_hand(provider: str) -> None:
    cache = torch.zeros(4, 8448, dtype=torch.uint8, device=s.DEVICE)
    for page in range(4):  # token t of page p: bytes 64 p + t, scale 100 p + t
        token = torch.arange(64, device=s.DEVICE)
        cache[page, :8192] = (64 * page + token).to(torch.uint8).repeat_interleave(128)
        cache[page, 8192:] = (100.0 * page + token).view(torch.uint8)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=s.DEVICE)
    lens = torch.tensor([66, 2], dtype=torch.int32, device=s.DEVICE)
    args = {"cache": cache, "page_table": table, "kv_lens": lens, "total": 68}
    k, scale = s.call("index_k_gather", provider, args)
    want = [*range(300, 364), 100, 101, 200, 201]  # 64 tokens of page 3, two of page 1, two of page 2
    assert scale.tolist() == want
    assert k.view(torch.uint8)[:, 0].tolist() == [*range(192, 256), 64, 65, 128, 129]
    assert (k.view(torch.uint8) == k.view(torch.uint8)[:, :1]).all()


@given(
    kv_lens=st.lists(st.sampled_from((0, 1, 2, 63, 64, 65, 128, 192)), max_size=5),
    beyond=st.integers(0, 3),
    wide_table=st.booleans(),
    seed=s.seeds,
)
def test_gather_triton_equals_reference(
    kv_lens: list[int], beyond: int, wide_table: bool, seed: int
) -> None:
    args = gather_arguments(tuple(kv_lens), seed)
    args["total"] += beyond
    if wide_table:  # the table as a slice of a wider one
        wide = torch.full((len(kv_lens), 7), 2**30, dtype=torch.int32, device=s.DEVICE)
        wide[:, 2:5] = args["page_table"]
        args["page_table"] = wide[:, 2:5]
    results = [s.call("index_k_gather", provider, args) for provider in PROVIDERS]
    for got, want in zip(*reversed(results), strict=True):
        s.assert_bitwise(got, want)
    for result in results:
        s.assert_fake_is_exact("index_k_gather", tuple(args.values()), result)
        assert result[1][sum(kv_lens) :].eq(0).all()


@given(kv_lens=st.lists(st.integers(1, 150), min_size=1, max_size=4), seed=s.seeds)
def test_gather_returns_what_was_stored(kv_lens: list[int], seed: int) -> None:
    pages = [-(-n // 64) for n in kv_lens]
    order = (torch.randperm(sum(pages), generator=s.generator(seed)) + 1).to(torch.int32).to(s.DEVICE)
    # Entries beyond a request's pages may hold anything.
    table = torch.full((len(kv_lens), 3), 2**30, dtype=torch.int32, device=s.DEVICE)
    slots, taken = [], 0
    for request, (n, count) in enumerate(zip(kv_lens, pages, strict=True)):
        table[request, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(n, device=s.DEVICE)
        slots.append(table[request, position // 64].long() * 64 + position % 64)
    key = s.randn((sum(kv_lens), 128), torch.bfloat16, seed)
    cache = poisoned_cache(sum(pages) + 1)
    custom_ops.index_k_store(key, cache, torch.cat(slots))
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=s.DEVICE)
    with debug_checks():
        k, scale = custom_ops.index_k_gather(cache, table, lens, sum(kv_lens))
    q, q_scale = custom_ops.quant_fp8(key)
    s.assert_bitwise(k, q)
    s.assert_bitwise(scale, q_scale[:, 0])


def test_wrong_store_arguments() -> None:
    args = store_arguments()
    refused = lambda change, *said: s.assert_refused("index_k_store", args | change, *said)  # noqa: E731
    refused({"key": args["key"].double()}, "key", "got torch.float64")
    refused({"key": args["key"][:, :64]}, "key", "[*, 128], got [5, 64]")
    refused({"key": args["key"][None]}, "key", "got [1, 5, 128]")
    refused({"cache": args["cache"].view(torch.int8)}, "cache", "got torch.int8")
    refused({"cache": args["cache"].view(-1, 4224)}, "cache", "[*, 8448], got [8, 4224]")
    refused({"cache": args["cache"].view(4, 64, 132)}, "cache", "got [4, 64, 132]")
    refused({"cache": args["cache"][::2]}, "cache", "contiguous")
    shifted = torch.empty(2 * 8448 + 4, dtype=torch.uint8, device=s.DEVICE)[4:].view(2, 8448)
    refused({"cache": shifted}, "cache", "16-byte aligned, got an address")
    refused({"slots": args["slots"].int()}, "slots", "got torch.int32")
    refused({"slots": args["slots"][:4]}, "slots", "[5], got [4]")
    refused({"slots": args["slots"].repeat(2)[::2]}, "slots", "contiguous")
    s.assert_refused_on_another_device("index_k_store", args, "cache", "slots")
    with debug_checks():
        refused({"slots": args["slots"] + 256}, "slots", "in [0, 256)")
        refused({"slots": args["slots"] - 256}, "slots", "in [0, 256)")
        refused({"slots": torch.full_like(args["slots"], 256)}, "slots", "in [0, 256)")
        custom_ops.index_k_store(**args | {"slots": torch.full_like(args["slots"], 255)})


def test_wrong_gather_arguments() -> None:
    args = gather_arguments()
    refused = lambda change, *said: s.assert_refused("index_k_gather", args | change, *said)  # noqa: E731
    refused({"cache": args["cache"].view(-1, 4224)}, "cache", "[*, 8448], got [16, 4224]")
    refused({"page_table": args["page_table"].long()}, "page_table", "got torch.int64")
    refused({"page_table": args["page_table"][0]}, "page_table", "got [3]")
    refused({"kv_lens": args["kv_lens"].long()}, "kv_lens", "got torch.int64")
    refused({"kv_lens": args["kv_lens"][:2]}, "kv_lens", "[3], got [2]")
    refused({"total": -1}, "total", "got -1")
    s.assert_refused_on_another_device("index_k_gather", args, "page_table", "kv_lens")
    with debug_checks():
        refused({"total": 78}, "total", "the sum of kv_lens, 79, got 78")
        refused({"kv_lens": args["kv_lens"] + 190}, "kv_lens", "in [0, 193)")
        refused({"page_table": args["page_table"] + 8}, "page_table", "in [0, 8)")
        custom_ops.index_k_gather(**args)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(torch.ops.sparse_pcg.index_k_store.default, tuple(store_arguments(rows).values()))
    gather = gather_arguments((rows, 3) if rows else ())
    torch.library.opcheck(torch.ops.sparse_pcg.index_k_gather.default, tuple(gather.values()))


@pytest.mark.gpu
def test_bench() -> None:
    args = store_arguments() | {"key": s.randn((2048, 128), torch.bfloat16), "cache": poisoned_cache(600)}
    args["slots"] = s.distinct(600 * 64, 2048)
    s.bench("index_k_store 2048", lambda: custom_ops.index_k_store(**args), 2048 * (256 + 132))
    table = torch.arange(512, dtype=torch.int32, device=s.DEVICE)[None]
    lens = torch.tensor([32768], dtype=torch.int32, device=s.DEVICE)
    gather = lambda: custom_ops.index_k_gather(args["cache"], table, lens, 32768)  # noqa: E731
    s.bench("index_k_gather 32768", gather, 2 * 32768 * 132)
