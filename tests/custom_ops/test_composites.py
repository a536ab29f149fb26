from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

import custom_ops
from custom_ops._register import OPS, debug_checks
from custom_ops.batch_metadata import BatchMetadata, ContextBind, ForwardContext, use_context
from tests.custom_ops import strategies as s
from tests.custom_ops.batches import batch, index_pool
from tests.custom_ops.opcheck import opcheck

ROWS, HEADS, LAYER = 8, 4, 3
COMPOSITES = ("k_cache_and_topk_result", "indexer_prefill", "mla_attention")
LAYOUTS = ("bf16", "fp8_packed", "fp8")


def latent_pool(layout: str) -> torch.Tensor:
    slots = 40 * 64
    if layout == "fp8_packed":
        return torch.zeros(slots, 656, dtype=torch.uint8, device=s.DEVICE)
    dtype = torch.bfloat16 if layout == "bf16" else torch.float8_e4m3fn
    return torch.zeros(slots, 576, device=s.DEVICE).to(dtype)


def context(layout: str = "bf16", metadata: BatchMetadata | None = None) -> ForwardContext:
    return ForwardContext(
        metadata or batch([100, 0], [3, 2], rows=16),
        {LAYER: index_pool()},
        {LAYER: latent_pool(layout)},
        kv_layout=layout,
    )


def arguments(name: str, rows: int = ROWS) -> dict[str, Any]:
    result = torch.full((rows, 16), 2**30, dtype=torch.int32, device=s.DEVICE)
    positions = s.integers(97, rows, 9)
    bf16 = lambda *shape, seed=0: s.randn(shape, torch.bfloat16, seed, std=0.5)  # noqa: E731
    if name == "k_cache_and_topk_result":
        return {
            "layer_id": LAYER,
            "key": bf16(rows, 128),
            "q_fp8": s.randn((rows, HEADS, 128), seed=1).to(torch.float8_e4m3fn),
            "weights": s.randn((rows, HEADS, 1), seed=2),
            "topk_result": result,
        }
    if name == "indexer_prefill":
        return {
            "layer_id": LAYER,
            "x": bf16(rows, 32),
            "q_lora": bf16(rows, 24, seed=1),
            "positions": positions,
            "wq_b": bf16(HEADS * 128, 24, seed=2),
            "wk": bf16(128, 32, seed=3),
            "k_norm_weight": s.randn((128,), seed=4),
            "k_norm_bias": s.randn((128,), seed=5),
            "weights_proj": bf16(HEADS, 32, seed=6),
            "cos_sin_cache": s.rope_table(),
            "eps": 1e-6,
            "interleaved": True,
            "hadamard": False,
            "round_scale": False,
            "topk_result": result,
        }
    return {
        "layer_id": LAYER,
        "q_nope": bf16(rows, HEADS, 24),
        "q_rope": bf16(rows, HEADS, 64, seed=1),
        "k_nope": bf16(rows, 512, seed=2),
        "k_rope": bf16(rows, 64, seed=3),
        "w_kc": bf16(HEADS, 24, 512, seed=4),
        "w_vc": bf16(HEADS, 512, 20, seed=5),
        "positions": positions,
        "cos_sin_cache": s.rope_table(),
        "interleaved": False,
        "topk": torch.zeros(rows, 16, dtype=torch.int32, device=s.DEVICE),
        "sm_scale": 88**-0.5,
        "out": torch.full((rows, HEADS, 20), torch.nan, dtype=torch.bfloat16, device=s.DEVICE),
    }


def select_all(metadata: BatchMetadata, args: dict[str, Any]) -> None:
    """A selection of what each row sees last, by the short body's order."""
    rows = args["topk"].shape[0]
    for row in range(rows):
        lens, request = int(metadata.select_lens[row]), int(metadata.request_of_row[row])
        position = int(metadata.kv_lens[row]) - 1 - torch.arange(lens, device=s.DEVICE).flip(0)
        args["topk"][row, lens:] = -1
        if position[0] < 0:
            args["topk"][row, 0] = -1
            continue
        page = metadata.page_table[request, position // 64]
        args["topk"][row, :lens] = (page * 64 + position % 64).int()


def test_store_is_seen_by_the_selection() -> None:
    """A row's own key, stored by this call, is the best match of its query."""
    ctx = context(metadata=batch([100], [4], rows=4, index_topk=1))
    args = arguments("k_cache_and_topk_result", 4)
    args["key"] = torch.eye(4, 128, dtype=torch.bfloat16, device=s.DEVICE) * 400
    args["q_fp8"] = torch.eye(4, 128, device=s.DEVICE)[:, None].mul(400).to(torch.float8_e4m3fn)
    args["weights"] = torch.ones(4, 1, device=s.DEVICE)
    args["topk_result"] = args["topk_result"][:, :1].contiguous()
    with use_context(ctx):
        custom_ops.k_cache_and_topk_result(**args)
    assert ctx.metadata is not None
    assert args["topk_result"][:, 0].tolist() == ctx.metadata.slots.tolist()


def test_indexer_prefill_is_its_parts() -> None:
    args, ctx, other = arguments("indexer_prefill"), context(), context()
    with use_context(ctx):
        custom_ops.indexer_prefill(**args)
    q = (args["q_lora"] @ args["wq_b"].T).view(ROWS, HEADS, 128)
    k = args["x"] @ args["wk"].T
    with use_context(other):
        q_fp8, q_scale = custom_ops.index_q_prepare(
            q, args["positions"], args["cos_sin_cache"], True, False, False
        )
        assert other.metadata is not None
        custom_ops.index_k_prepare_store(
            k, args["k_norm_weight"], args["k_norm_bias"], 1e-6, args["positions"], args["cos_sin_cache"],
            True, False, other.index_k[LAYER], other.metadata.slots[:ROWS], False,
        )  # fmt: skip
        gate = custom_ops.logits_head_gate(args["x"], args["weights_proj"], 0.5, 128**-0.5, q_scale)
        want = torch.zeros_like(args["topk_result"])
        custom_ops.indexer_topk(LAYER, q_fp8, gate, want)
    s.assert_bitwise(args["topk_result"], want)
    # Without the page of the dummy slot: all pad rows write it, on a GPU in any order.
    s.assert_bitwise(ctx.index_k[LAYER][1:], other.index_k[LAYER][1:])
    assert not torch.equal(ctx.index_k[LAYER][1:], index_pool()[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_is_unabsorbed_attention(layout: str) -> None:
    """Against keys and values expanded per head, in float64: what absorption must not change."""
    ctx = context(layout, batch([0, 0], [5, 2], rows=8))
    args = arguments("mla_attention")
    assert ctx.metadata is not None
    select_all(ctx.metadata, args)
    with use_context(ctx):
        custom_ops.mla_attention(**args)

    def rope(x: torch.Tensor) -> torch.Tensor:
        return custom_ops.apply_rope(x, args["positions"], args["cos_sin_cache"], 64, False).double()

    latent = args["k_nope"].double()
    q = torch.cat((args["q_nope"].double(), rope(args["q_rope"])), 2)
    keys = torch.einsum("tc,hnc->thn", latent, args["w_kc"].double())
    keys = torch.cat((keys, rope(args["k_rope"])[:, None].expand(-1, HEADS, -1)), 2)
    values = torch.einsum("tc,hcv->thv", latent, args["w_vc"].double())
    tolerance = 0.02 if layout == "bf16" else 0.15
    for row, seen in ((0, [0]), (4, [0, 1, 2, 3, 4]), (5, [5]), (6, [5, 6])):
        weights = (torch.einsum("hd,shd->hs", q[row], keys[seen]) * args["sm_scale"]).softmax(-1)
        want = torch.einsum("hs,shv->hv", weights, values[seen])
        error = (args["out"][row].double() - want).abs().max() / want.abs().max()
        assert error < tolerance, (row, float(error))
    assert args["out"][7].isfinite().all()


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("ctx", [None, ForwardContext(None)])
def test_nothing_to_do(name: str, ctx: ForwardContext | None) -> None:
    args = arguments(name)
    if ctx is None:
        OPS[name].overload(*args.values())
    else:
        with use_context(ctx):
            OPS[name].overload(*args.values())
    result = args.get("topk_result", args.get("out"))
    assert (result == (0 if name == "mla_attention" else -1)).all()


class GraphBind:
    """``bind`` on FX proxies: every tensor of the context becomes an input of the graph."""

    def __init__(self, ctx: ForwardContext, graph: fx.Graph, values: dict[str, torch.Tensor]) -> None:
        self._context, self._graph, self._values = ctx, graph, values
        self._tracer = fx.proxy.GraphAppendingTracer(graph)

    def input(self, name: str, value: torch.Tensor) -> fx.Proxy:
        node = self._graph.placeholder(name)
        self._values[node.name] = value
        return fx.Proxy(node, self._tracer)

    def __call__(self, name: str, layer_id: int | None = None, rows_like: fx.Proxy | None = None) -> fx.Proxy:
        rows = None if rows_like is None else self._values[rows_like.node.name]
        return self.input(name, ContextBind(self._context)(name, layer_id, rows))

    def shape(self, argument: fx.Proxy) -> tuple[int, ...]:
        return tuple(self._values[argument.node.name].shape)


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decomposition_on_proxies_equals_the_body(name: str, layout: str) -> None:
    ctx, other = context(layout), context(layout)
    args, traced = arguments(name), arguments(name)
    if name == "mla_attention":
        assert ctx.metadata is not None
        select_all(ctx.metadata, args)
        select_all(ctx.metadata, traced)
    with use_context(ctx):
        OPS[name].overload(*args.values())
    graph, values = fx.Graph(), dict[str, torch.Tensor]()
    bind = GraphBind(other, graph, values)
    inputs = [bind.input(k, v) if isinstance(v, torch.Tensor) else v for k, v in traced.items()]
    decompose = OPS[name].decompose
    assert decompose is not None
    with use_context(other):
        decompose(bind, *inputs)
        graph.output(None)
        fx.Interpreter(fx.GraphModule({}, graph)).run(*values.values())
    cut = [n for n in graph.nodes if "indexer_topk" in str(n.target)]
    assert len(cut) == (0 if name == "mla_attention" else 1)
    assert ctx.metadata is not None
    rows = ctx.metadata.num_rows  # what pad rows leave in the dummy slot, and read there, depends on which was last
    for key, value in args.items():
        if isinstance(value, torch.Tensor) and key in ("topk_result", "out"):
            s.assert_bitwise(value[:rows], traced[key][:rows])
    s.assert_bitwise(ctx.index_k[LAYER][1:], other.index_k[LAYER][1:])
    s.assert_bitwise(ctx.latent_kv[LAYER][1:].view(torch.uint8), other.latent_kv[LAYER][1:].view(torch.uint8))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=s.DEVICE)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=s.DEVICE)


def cut_of(heads: int) -> dict[str, torch.Tensor]:
    q = torch.zeros(ROWS, heads, 128, device=s.DEVICE)
    return {"q_fp8": q.to(torch.float8_e4m3fn), "weights": torch.zeros(ROWS, heads, device=s.DEVICE)}


def indexer_of(heads: int) -> dict[str, torch.Tensor]:
    return {"wq_b": bf16(heads * 128, 24), "weights_proj": bf16(heads, 32)}


def attention_of(heads: int) -> dict[str, torch.Tensor]:
    q = {"q_nope": bf16(ROWS, heads, 24), "q_rope": bf16(ROWS, heads, 64), "out": bf16(ROWS, heads, 20)}
    return {**q, "w_kc": bf16(heads, 24, 512), "w_vc": bf16(heads, 512, 20)}


def assert_refused(name: str, ctx: ForwardContext, args: dict[str, Any], argument: str) -> None:
    """ValueError that names the composite and ``argument``; every cache, buffer and argument keeps its bytes."""
    tensors = [*ctx.index_k.values(), *ctx.latent_kv.values(), *vars(ctx.metadata).values(), *args.values()]
    before = [(t, s.as_bytes(t).clone()) for t in tensors if isinstance(t, torch.Tensor)]
    with use_context(ctx), pytest.raises(ValueError, match=f"^{name}: {re.escape(argument)} must be"):
        OPS[name].overload(*args.values())
    assert all(torch.equal(s.as_bytes(t), old) for t, old in before)


@pytest.mark.parametrize(
    ("name", "change", "argument"),
    [
        ("k_cache_and_topk_result", {"key": torch.zeros(8, 64, device=s.DEVICE)}, "key"),
        ("k_cache_and_topk_result", {"key": torch.zeros(7, 128, device=s.DEVICE)}, "key"),
        ("k_cache_and_topk_result", cut_of(0), "q_fp8"),
        ("k_cache_and_topk_result", cut_of(129), "q_fp8"),
        ("k_cache_and_topk_result", {"topk_result": int32(8, 0)}, "topk_result"),
        ("indexer_prefill", {"q_lora": torch.zeros(8, 24, device=s.DEVICE)}, "q_lora"),
        ("indexer_prefill", {"wk": bf16(64, 32)}, "wk"),
        ("indexer_prefill", {"wq_b": bf16(96, 24)}, "wq_b"),
        ("indexer_prefill", {"weights_proj": torch.zeros(HEADS, 32, device=s.DEVICE)}, "weights_proj"),
        ("indexer_prefill", indexer_of(0), "weights_proj"),
        ("indexer_prefill", indexer_of(129), "weights_proj"),
        ("indexer_prefill", {"k_norm_weight": None}, "k_norm_weight"),
        ("indexer_prefill", {"k_norm_weight": bf16(64)}, "k_norm_weight"),
        ("indexer_prefill", {"k_norm_bias": bf16(64)}, "k_norm_bias"),
        ("indexer_prefill", {"cos_sin_cache": torch.zeros(97, 32, device=s.DEVICE)}, "cos_sin_cache"),
        ("indexer_prefill", {"topk_result": int32(8, 0)}, "topk_result"),
        ("mla_attention", {"q_rope": bf16(8, 4, 32)}, "q_rope"),
        ("mla_attention", {"w_kc": bf16(4, 16, 512)}, "w_kc"),
        ("mla_attention", attention_of(0), "q_nope"),
        ("mla_attention", attention_of(129), "q_nope"),
        ("mla_attention", {"cos_sin_cache": torch.zeros(97, 32, device=s.DEVICE)}, "cos_sin_cache"),
        ("mla_attention", {"topk": int32(8, 16).long()}, "topk"),
        ("mla_attention", {"topk": int32(8, 0)}, "topk"),
    ],
)
def test_wrong_arguments(name: str, change: dict[str, Any], argument: str) -> None:
    assert_refused(name, context(), arguments(name) | change, argument)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("k_cache_and_topk_result", "key"), ("indexer_prefill", "x"), ("mla_attention", "q_nope")],
)
def test_more_rows_than_the_batch_has_buffers_for(name: str, argument: str) -> None:
    assert_refused(name, context(), arguments(name, 17), argument)


@pytest.mark.parametrize("name", ["k_cache_and_topk_result", "indexer_prefill"])
def test_wrong_index_cache(name: str) -> None:
    wrong = replace(context(), index_k={LAYER: index_pool()[:, :8192].contiguous()})
    assert_refused(name, wrong, arguments(name), "index_k[3]")


@pytest.mark.parametrize(("cache", "layout"), [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b])
def test_latent_cache_of_another_layout(cache: str, layout: str) -> None:
    wrong = replace(context(cache), kv_layout=layout)
    assert_refused("mla_attention", wrong, arguments("mla_attention"), "latent_kv[3]")


def test_unknown_layout() -> None:
    assert_refused("mla_attention", replace(context(), kv_layout="fp4"), arguments("mla_attention"), "kv_layout")


def test_values_are_checked_before_the_store() -> None:
    with debug_checks():
        for name in ("k_cache_and_topk_result", "indexer_prefill"):
            for page in (-1, 40):
                ctx = context()
                assert ctx.metadata is not None
                ctx.metadata.page_table[0, 0] = page  # of the prefix: nothing is stored there
                assert_refused(name, ctx, arguments(name), "page_table")
        for slot in (-2, 40 * 64):
            args = arguments("mla_attention")
            args["topk"][3, 2] = slot
            assert_refused("mla_attention", context(), args, "topk")
        for name in COMPOSITES:
            with use_context(context()):
                OPS[name].overload(*arguments(name).values())


@pytest.mark.parametrize("name", COMPOSITES)
def test_opcheck(name: str) -> None:
    with use_context(context()):
        written = "out" if name == "mla_attention" else "topk_result"
        opcheck(name, arguments(name), written=[written])
