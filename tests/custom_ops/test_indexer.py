from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import custom_ops
from custom_ops._register import OPS, debug_checks, use_provider
from custom_ops.batch_metadata import BatchMetadata, ForwardContext, use_context
from custom_ops.topk import topk_slots_reference
from tests.custom_ops import strategies as s
from tests.custom_ops.batches import batch, index_pool
from tests.custom_ops.opcheck import opcheck

PROVIDERS = ("reference", "triton")
HEADS = 4


def arguments(rows: int, k: int, seed: int = 0) -> dict:
    """What the batch before left in the result is no slot of anyone's."""
    return {
        "layer_id": 3,
        "q_fp8": s.randn((rows, HEADS, 128), seed=seed).to(torch.float8_e4m3fn),
        "weights": s.randn((rows, HEADS, 1), seed=seed + 1),
        "topk_result": torch.full((rows, k), 2**30, dtype=torch.int32, device=s.DEVICE),
    }


def run(provider: str, metadata: BatchMetadata, args: dict, workspace_bytes: int = 1 << 30) -> torch.Tensor:
    args["topk_result"].fill_(2**30)
    context = ForwardContext(metadata, {3: index_pool()}, workspace_bytes=workspace_bytes)
    with use_context(context):
        assert s.call("indexer_topk", provider, args) is None
    return args["topk_result"].clone()


def expected(metadata: BatchMetadata, args: dict) -> torch.Tensor:
    """Logits of all rows at once in the provider's own arithmetic, then the selection's specification."""
    rows, valid = args["topk_result"].shape[0], metadata.num_rows
    lens, requests = metadata.kv_lens[:valid], metadata.request_of_row[:valid]
    logits = custom_ops.paged_mqa_logits(
        args["q_fp8"][:valid], index_pool(), args["weights"][:valid], lens, requests, metadata.page_table,
        metadata.max_kv_len,
    )  # fmt: skip
    want = torch.full((rows, args["topk_result"].shape[1]), -1, dtype=torch.int32, device=s.DEVICE)
    starts = torch.zeros_like(lens)
    want[:valid] = topk_slots_reference(logits, starts, lens, requests, metadata.page_table, want.shape[1])
    return want


@pytest.mark.parametrize("provider", PROVIDERS)
def test_by_hand(provider: str) -> None:
    metadata = batch([65], [2], rows=4)
    metadata.page_table[0, :2] = torch.tensor([5, 2])
    cache = torch.zeros(8, 8448, dtype=torch.uint8, device=s.DEVICE)
    cache[:, 8192:] = torch.tensor([0, 0, 0x80, 0x3F], dtype=torch.uint8).repeat(64)  # every scale 1.0
    for page, token in ((5, 7), (5, 63), (2, 0), (2, 2)):
        cache[page, token * 128] = 0x38  # 1.0: positions 7, 63, 64, 66
    q = torch.zeros(4, 1, 128, device=s.DEVICE)
    q[:, :, 0] = 1.0
    args = {
        "layer_id": 3,
        "q_fp8": q.to(torch.float8_e4m3fn),
        "weights": torch.ones(4, 1, device=s.DEVICE),
        "topk_result": torch.zeros(4, 3, dtype=torch.int32, device=s.DEVICE),
    }
    with use_context(ForwardContext(metadata, {3: cache})):
        s.call("indexer_topk", provider, args)
    # Row 0 sees 66 tokens: 7, 63, 64. Row 1 sees 67: the lowest three of 7, 63, 64, 66. Then pad rows.
    want = [[5 * 64 + 7, 5 * 64 + 63, 2 * 64]] * 2 + [[-1, -1, -1]] * 2
    assert args["topk_result"].tolist() == want


lengths = st.tuples(st.sampled_from((0, 1, 15, 16, 17, 63, 64, 130)), st.sampled_from((0, 1, 2, 3, 7)))


@given(requests=st.lists(lengths, min_size=1, max_size=4), pads=st.sampled_from((0, 1, 5)), seed=s.seeds)
def test_is_logits_then_selection(requests: list[tuple[int, int]], pads: int, seed: int) -> None:
    prefix, new = [p for p, _ in requests], [n for _, n in requests]
    rows = sum(new) + pads
    metadata = batch(prefix, new, max(rows, 1))
    for provider in PROVIDERS:
        args = arguments(rows, 16, seed)
        with use_provider("paged_mqa_logits", provider):
            want = expected(metadata, args)
        s.assert_bitwise(run(provider, metadata, args), want)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 3, 4, 10, 11])
def test_does_not_depend_on_the_chunking(provider: str, rows_at_once: int) -> None:
    metadata = batch([100, 0, 30], [3, 2, 6], rows=16)  # 11 rows of up to 103 tokens: 128 columns in memory
    args = arguments(16, 16)
    whole = run(provider, metadata, args)
    s.assert_bitwise(run(provider, metadata, args, workspace_bytes=rows_at_once * 128 * 4), whole)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_chunks_fit_the_workspace(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = batch([100, 0, 30], [3, 2, 6], rows=16)
    sizes: list[int] = []
    real = custom_ops._indexer._chunks

    def spy(*args: object) -> object:
        for part in real(*args):
            sizes.append(part.stop - part.start)
            yield part

    monkeypatch.setattr(custom_ops._indexer, "_chunks", spy)
    run(provider, metadata, arguments(16, 16), workspace_bytes=4 * 128 * 4 + 100)
    assert sizes == [4, 4, 3]


def test_cuts_of_one_forward_share_their_memory() -> None:
    """Whatever the layer before left there, also where a context goes on to another batch."""
    wide, narrow = batch([100, 0, 30], [3, 2, 6], rows=16), batch([20], [5], rows=8)
    context, places = ForwardContext(None, {3: index_pool()}), []
    for number, metadata in enumerate((wide, wide, narrow, wide)):
        args = arguments(metadata.kv_lens.shape[0], 16, seed=number)
        want = run("triton", metadata, args)
        context.metadata = metadata
        with use_context(context):
            s.call("indexer_topk", "triton", args)
        s.assert_bitwise(args["topk_result"], want)
        places += [logits.data_ptr() for logits in context.scratch.values()]
    assert len(places) == 4 and places[0] == places[1]


@given(lens=st.lists(st.sampled_from((1, 2, 15, 16)), min_size=1, max_size=4), pads=st.sampled_from((0, 3)))
def test_short_body_equals_the_cut(lens: list[int], pads: int) -> None:
    metadata = batch([0] * len(lens), lens, sum(lens) + pads)
    for provider in PROVIDERS:
        args = arguments(sum(lens) + pads, 16)
        want = run(provider, metadata, args)
        args["topk_result"].fill_(2**30)
        context = ForwardContext(metadata, {3: index_pool()})
        with use_context(context), use_provider("indexer_topk", provider):
            short = OPS["indexer_topk"].short_body
            assert short is not None
            short(*args.values())
        s.assert_bitwise(args["topk_result"], want)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_short_body_reads_the_buffers_of_the_moment(provider: str) -> None:
    metadata = batch([0], [5], rows=8)
    args = arguments(8, 16)
    with use_context(ForwardContext(metadata, {3: index_pool()})), use_provider("indexer_topk", provider):
        metadata.num_rows = metadata.max_kv_len = 0  # host ints must not matter to it
        OPS["indexer_topk"].short_body(*args.values())  # type: ignore[misc]
    assert (args["topk_result"] >= 0).sum(1).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", ["indexer_topk", "short"])
def test_nothing_to_do(provider: str, name: str) -> None:
    body = OPS["indexer_topk"].short_body if name == "short" else OPS["indexer_topk"].overload
    assert body is not None
    for context in (None, ForwardContext(None), ForwardContext(batch([], [], 4), {3: index_pool()})):
        for rows in (0, 4):
            args = arguments(rows, 16)
            with use_provider("indexer_topk", provider):
                if context is None:
                    body(*args.values())
                else:
                    with use_context(context):
                        body(*args.values())
            assert (args["topk_result"] == -1).all()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_pad_rows_do_not_matter(provider: str) -> None:
    metadata = batch([100], [5], rows=8)
    args = arguments(8, 16)
    clean = run(provider, metadata, args)
    args["q_fp8"].view(torch.uint8)[5:] = 0x7F
    args["weights"][5:] = torch.nan
    s.assert_bitwise(run(provider, metadata, args), clean)


def test_unknown_layer() -> None:
    with (
        use_context(ForwardContext(batch([0], [1], 1), {7: index_pool()})),
        pytest.raises(KeyError, match="layer 3"),
    ):
        custom_ops.indexer_topk(**arguments(1, 16))


def test_wrong_arguments() -> None:
    args = arguments(5, 16)
    refused = lambda change, *said: s.assert_refused("indexer_topk", args | change, *said)  # noqa: E731
    refused({"q_fp8": args["q_fp8"].float()}, "q_fp8", "got torch.float32")
    refused({"q_fp8": args["q_fp8"].view(5, 8, 64)}, "q_fp8", "got [5, 8, 64]")
    refused({"weights": args["weights"][:4]}, "weights", "[5, 4, 1], got [4, 4, 1]")
    refused({"topk_result": args["topk_result"].long()}, "topk_result", "got torch.int64")
    refused({"topk_result": args["topk_result"][:4]}, "topk_result", "[5, *], got [4, 16]")
    refused({"topk_result": args["topk_result"][:, ::2]}, "topk_result", "contiguous")
    refused({"topk_result": args["topk_result"][:, :0]}, "topk_result", "at least 1 column")
    for heads in (0, 129):
        wide = {name: args[name][:, :1].repeat(1, heads, 1) for name in ("q_fp8", "weights")}
        refused(wide, "q_fp8", f"1 to 128 heads, got {heads}")


def test_wrong_context() -> None:
    args, metadata = arguments(5, 16), batch([100], [5], rows=8)
    with use_context(ForwardContext(metadata, {3: index_pool().view(torch.int8)})):
        s.assert_refused("indexer_topk", args, r"index_k\[3\]", "got torch.int8")
    pages = metadata.page_table[0].clone()
    with use_context(ForwardContext(metadata, {3: index_pool()})), debug_checks():
        for page in (-1, 40):
            metadata.page_table[0, 1] = page
            s.assert_refused("indexer_topk", args, "page_table", "in [0, 40)")
        metadata.page_table[0] = pages
        custom_ops.indexer_topk(**args)


def test_is_a_cut() -> None:
    for name in ("indexer_topk", "k_cache_and_topk_result", "indexer_prefill", "mla_attention"):
        assert OPS[name].cut and torch.Tag.cudagraph_unsafe in OPS[name].overload.tags


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_opcheck(rows: int) -> None:
    with use_context(ForwardContext(batch([100], [2], rows=8), {3: index_pool()})):
        opcheck("indexer_topk", arguments(rows, 16), written=["topk_result"])


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [1500, 32768 - 512])
def test_bench(prefix: int) -> None:
    metadata = BatchMetadata.allocate(512, 1, 512, 2048, "cuda")
    table = torch.arange(512, dtype=torch.int32, device="cuda")[None]
    m = metadata
    custom_ops.fill_batch_metadata(
        torch.tensor([prefix], dtype=torch.int32, device="cuda"),
        torch.tensor([512], dtype=torch.int32, device="cuda"),
        table, m.positions, m.slots, m.kv_lens, m.select_lens, m.request_of_row, m.page_table,
        m.num_rows_device, 2048,
    )  # fmt: skip
    m.num_rows, m.num_requests, m.max_kv_len = 512, 1, prefix + 512
    q = torch.randn(512, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights, out = (
        torch.rand(512, 64, device="cuda"),
        torch.empty(512, 2048, dtype=torch.int32, device="cuda"),
    )
    with use_context(ForwardContext(metadata, {3: index_pool(512)})):
        traffic = 2 * 4 * 512 * (prefix + 512)
        s.bench(
            f"indexer_topk 512 rows, prefix {prefix}",
            lambda: custom_ops.indexer_topk(3, q, weights, out),
            traffic,
        )
