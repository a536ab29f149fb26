from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import debug_checks
from tests.custom_ops import strategies as s

PROVIDERS = ("reference", "triton")
LAYOUTS = {
    "bf16": (torch.bfloat16, 576),
    "fp8_packed": (torch.uint8, 656),
    "fp8": (torch.float8_e4m3fn, 576),
}
SLOTS = 64
POISON = 0xA5


def poisoned_cache(layout: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    own, width = LAYOUTS[layout]
    size = torch.empty((), dtype=dtype or own).element_size()
    raw = torch.full((SLOTS, width * size), POISON, dtype=torch.uint8, device=s.DEVICE)
    return raw.view(dtype or own)


def arguments(rows: int = 5, layout: str = "bf16", dtype: torch.dtype = torch.bfloat16, seed: int = 0,
              memory: str = "contiguous", std: float = 2.0) -> dict:  # fmt: skip
    return {
        "k_nope": s.randn((rows, 512), dtype, seed, memory, std),
        "k_rope": s.randn((rows, 64), dtype, seed + 1, memory, std),
        "cache": poisoned_cache(layout),
        "slots": s.distinct(SLOTS, rows, seed),
        "layout": layout,
    }


def rope_arguments(rows: int = 5, layout: str = "bf16", interleaved: bool = True, **rest: object) -> dict:
    args = arguments(rows, layout, **rest)  # type: ignore[arg-type]
    rotation = {
        "positions": s.integers(97, rows, 3),
        "cos_sin_cache": s.rope_table(),
        "interleaved": interleaved,
    }
    head = {name: args[name] for name in ("k_nope", "k_rope")}
    return head | rotation | {name: args[name] for name in ("cache", "slots", "layout")}


def by_hand(layout: str) -> dict:
    nope = torch.zeros(1, 512, device=s.DEVICE)
    nope[0, 0], nope[0, 127] = 448.0, 1.0  # block 0: scale 1
    nope[0, 128] = -224.0  # block 1: scale 1/2; block 2 is zero: scale 1e-4 / 448
    nope[0, 384], nope[0, 511] = 1.0, 896.0  # block 3: scale 2
    rope = torch.zeros(1, 64, device=s.DEVICE)
    rope[0, 0], rope[0, 63] = 1.0, -2.0
    slots = torch.tensor([2], device=s.DEVICE)
    cache = poisoned_cache(layout)
    return {"k_nope": nope, "k_rope": rope, "cache": cache, "slots": slots, "layout": layout}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_packed_bytes_by_hand(provider: str) -> None:
    args = by_hand("fp8_packed")
    s.call("mla_kv_store", provider, args)
    row = args["cache"][2].tolist()
    assert (row[0], row[1], row[127], row[128]) == (0x7E, 0, 0x38, 0xFE)  # 448, 0, 1, -224 / (1/2) = -448
    assert (row[384], row[511]) == (0x30, 0x7E)  # 1 / 2 = 0.5 and 896 / 2 = 448
    assert set(row[129:384]) == {0}
    assert row[512:516] == [0x00, 0x00, 0x80, 0x3F] and row[516:520] == [0x00, 0x00, 0x00, 0x3F]  # 1 and 1/2
    assert row[520:524] == list(torch.tensor([1e-4]).div(448).view(torch.uint8))
    assert row[524:528] == [0x00, 0x00, 0x00, 0x40]  # 2
    assert row[528:530] == [0x80, 0x3F] and row[654:656] == [0x00, 0xC0]  # bfloat16 1 and -2
    assert set(row[530:654]) == {0}
    args["cache"][2] = POISON
    assert (args["cache"] == POISON).all()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_plain_bytes_by_hand(provider: str) -> None:
    args = by_hand("fp8")
    s.call("mla_kv_store", provider, args)
    row = args["cache"].view(torch.uint8)[2].tolist()
    assert (row[0], row[127], row[128], row[384], row[511]) == (0x7E, 0x38, 0xF6, 0x38, 0x7E)  # 896 saturates
    assert (row[512], row[513], row[575]) == (0x38, 0, 0xC0)
    args = by_hand("bf16")
    s.call("mla_kv_store", provider, args)
    row = args["cache"].view(torch.uint8)[2].tolist()
    assert row[0:2] == [0xE0, 0x43] and row[1022:1024] == [0x60, 0x44]  # bfloat16 448 and 896
    assert row[1024:1026] == [0x80, 0x3F] and row[1150:1152] == [0x00, 0xC0]
    untouched = torch.arange(SLOTS, device=s.DEVICE) != 2
    assert (args["cache"].view(torch.uint8)[untouched] == POISON).all()


cases = {
    "rows": s.tokens,
    "layout": st.sampled_from(tuple(LAYOUTS)),
    "dtype": s.floats,
    "memory": s.layouts,
    "std": st.sampled_from((1e-5, 1.0, 300.0)),
    "seed": s.seeds,
}


@given(**cases)
def test_triton_equals_reference(
    rows: int, layout: str, dtype: torch.dtype, memory: str, std: float, seed: int
) -> None:
    args = arguments(rows, layout, dtype, seed, memory, std)
    caches = [poisoned_cache(layout), poisoned_cache(layout)]
    for provider, cache in zip(PROVIDERS, caches, strict=True):
        assert s.call("mla_kv_store", provider, args | {"cache": cache}) is None
    s.assert_bitwise(caches[1], caches[0])
    untouched = torch.ones(SLOTS, dtype=torch.bool, device=s.DEVICE)
    untouched[args["slots"]] = False
    assert (caches[0].view(torch.uint8)[untouched] == POISON).all()


@given(**cases, interleaved=st.booleans())
def test_rope_and_store_is_rope_then_store(
    rows: int, layout: str, dtype: torch.dtype, memory: str, std: float, seed: int, interleaved: bool
) -> None:
    args = rope_arguments(rows, layout, interleaved, dtype=dtype, seed=seed, memory=memory, std=std)
    rotated = custom_ops.apply_rope(args["k_rope"], args["positions"], args["cos_sin_cache"], 64, interleaved)
    single = poisoned_cache(layout)
    custom_ops.mla_kv_store(args["k_nope"], rotated, single, args["slots"], layout)
    for provider in PROVIDERS:
        fused = poisoned_cache(layout)
        assert s.call("mla_rope_kv_store", provider, args | {"cache": fused}) is None
        s.assert_bitwise(fused, single)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_caches_of_other_float_types_hold_the_cast_values(dtype: torch.dtype) -> None:
    args = arguments(7, "bf16", torch.float32)
    for provider in PROVIDERS:
        cache = poisoned_cache("bf16", dtype)
        s.call("mla_kv_store", provider, args | {"cache": cache})
        s.assert_bitwise(cache[args["slots"]], torch.cat((args["k_nope"], args["k_rope"]), 1).to(dtype))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pad_rows_touch_the_dummy_slot_only(provider: str, layout: str) -> None:
    args = rope_arguments(16, layout)
    args["slots"][11:] = 0
    s.call("mla_rope_kv_store", provider, args)
    poisoned = args | {"k_nope": args["k_nope"].clone(), "k_rope": args["k_rope"].clone()}
    poisoned["cache"] = poisoned_cache(layout)
    poisoned["k_nope"][11:] = torch.nan
    poisoned["k_rope"][11:] = torch.inf
    s.call("mla_rope_kv_store", provider, poisoned)
    s.assert_bitwise(poisoned["cache"][1:], args["cache"][1:])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_is_not_lost(provider: str, layout: str) -> None:
    args = arguments(3, layout)
    args["k_nope"][1, 130] = args["k_rope"][1, 7] = torch.nan
    s.call("mla_kv_store", provider, args)
    row = args["cache"][args["slots"][1]]
    if layout == "fp8_packed":
        assert row[528:].view(torch.bfloat16).isnan().nonzero().flatten().tolist() == [7]
        nans = row[:512].view(torch.float8_e4m3fn).float().isnan().nonzero().flatten()
        assert nans.tolist() == list(range(128, 256))  # the block's scale is NaN
    else:
        assert row.float().isnan().nonzero().flatten().tolist() == [130, 519]


def test_wrong_arguments() -> None:
    args = arguments()
    refused = lambda change, *said: s.assert_refused("mla_kv_store", args | change, *said)  # noqa: E731
    refused({"k_nope": args["k_nope"][:, :448]}, "k_nope", "[*, 512], got [5, 448]")
    refused({"k_nope": args["k_nope"].double()}, "k_nope", "got torch.float64")
    refused({"k_rope": args["k_rope"][:4]}, "k_rope", "[5, 64], got [4, 64]")
    refused({"k_rope": args["k_rope"].float()}, "k_rope", "of dtype torch.bfloat16, got torch.float32")
    refused({"layout": "fp4"}, "layout", "one of bf16, fp8_packed, fp8, got fp4")
    refused({"layout": "fp8"}, "cache", "torch.float8_e4m3fn, got torch.bfloat16")
    refused({"layout": "fp8_packed"}, "cache", "torch.uint8, got torch.bfloat16")
    refused({"cache": args["cache"][:, :512]}, "cache", "[*, 576], got [64, 512]")
    refused({"cache": args["cache"][:, None]}, "cache", "got [64, 1, 576]")
    refused({"cache": args["cache"][::2]}, "cache", "contiguous")
    packed = torch.zeros(64, 592, dtype=torch.uint8, device=s.DEVICE)  # a row of another width
    refused({"cache": packed, "layout": "fp8_packed"}, "cache", "[*, 656], got [64, 592]")
    shifted = torch.zeros(2 * 656 + 8, dtype=torch.uint8, device=s.DEVICE)[8:].view(2, 656)
    refused({"cache": shifted, "layout": "fp8_packed"}, "cache", "16-byte aligned")
    refused({"slots": args["slots"].int()}, "slots", "got torch.int32")
    refused({"slots": args["slots"][:4]}, "slots", "[5], got [4]")
    s.assert_refused_on_another_device("mla_kv_store", args, "k_rope", "cache", "slots")
    with debug_checks():
        refused({"slots": args["slots"] + SLOTS}, "slots", "in [0, 64)")
        refused({"slots": args["slots"] - SLOTS}, "slots", "in [0, 64)")
        custom_ops.mla_kv_store(**args)


def test_wrong_rope_arguments() -> None:
    args = rope_arguments()
    refused = lambda change, *said: s.assert_refused("mla_rope_kv_store", args | change, *said)  # noqa: E731
    refused({"positions": args["positions"][:4]}, "positions", "[5], got [4]")
    refused({"cos_sin_cache": s.rope_table(97, 32)}, "cos_sin_cache", "[*, 64], got [97, 32]")
    refused({"cache": args["cache"][:, :512]}, "cache", "[*, 576]")
    refused({"layout": "fp4"}, "layout", "got fp4")
    s.assert_refused_on_another_device("mla_rope_kv_store", args, "positions", "cos_sin_cache", "slots")
    with debug_checks():
        refused({"positions": args["positions"] + 97}, "positions", "in [0, 97)")
        refused({"slots": args["slots"] + SLOTS}, "slots", "in [0, 64)")


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(rows: int, layout: str) -> None:
    store, rope = arguments(rows, layout), rope_arguments(rows, layout)
    # The schema test cannot compare float8 tensors on a CPU; the schema is the same for every layout.
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests += [] if layout == "fp8" else ["test_schema"]
    ops = torch.ops.sparse_pcg
    torch.library.opcheck(ops.mla_kv_store.default, tuple(store.values()), test_utils=tests)
    torch.library.opcheck(ops.mla_rope_kv_store.default, tuple(rope.values()), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bench(layout: str) -> None:
    dtype, width = LAYOUTS[layout]
    args = rope_arguments(2048, layout)
    args["cache"] = torch.zeros(8192, width, dtype=dtype, device=s.DEVICE)
    args["slots"] = s.distinct(8192, 2048)
    traffic = 2048 * (2 * 576 + width * args["cache"].element_size())
    s.bench(f"mla_rope_kv_store 2048, {layout}", lambda: custom_ops.mla_rope_kv_store(**args), traffic)
