"""The reference model, against a plain float64 transformer and against itself served in other ways."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from custom_ops.batch_metadata import PAGE, BatchMetadata, use_context
from sparse_pcg.kv import PagedKV, RequestPages
from sparse_pcg.models import DSAModel, ModelConfig, Yarn, preset
from sparse_pcg.models.dsa import Attention
from sparse_pcg.models.moe import experts_dense, experts_grouped, route
from sparse_pcg.models.rope import cos_sin_cache
from sparse_pcg.verification import closeness

TINY = preset("tiny")
TOPK = TINY.index_topk


@pytest.fixture(scope="module")
def model():
    return DSAModel(TINY, dtype=torch.float32, seed=1)


def new_kv(config=TINY, num_pages=20, layout="bf16", dtype=torch.float32, device="cpu"):
    return PagedKV(config.num_layers, num_pages, layout, config.index_layers, dtype, device, poison=True)


def tokens(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(model, kv, chunks, pad_to=None, pad_id=0):
    """Run one batch of (request, new tokens) and return each request's hidden states, [new tokens, hidden].

    The rows are laid out here in plain Python, and the tail past them padded to ``pad_to`` rows.
    """
    rows, device = sum(len(new) for _, new in chunks), model.embed_tokens.device
    size = pad_to or rows
    metadata = BatchMetadata.allocate(
        size, max(len(chunks), 1), kv.num_pages, model.config.index_topk, device
    )
    metadata.input_ids.fill_(pad_id)
    at = 0
    for number, (request, new) in enumerate(chunks):
        start = request.num_tokens
        request.extend(len(new))
        metadata.page_table[number, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        for position, token in enumerate(new, start):
            metadata.input_ids[at] = token
            metadata.positions[at] = position
            metadata.slots[at] = request.pages[position // PAGE] * PAGE + position % PAGE
            metadata.kv_lens[at] = position + 1
            metadata.select_lens[at] = min(position + 1, model.config.index_topk)
            metadata.request_of_row[at] = number
            at += 1
        metadata.max_kv_len = max(metadata.max_kv_len, request.num_tokens)
    metadata.num_rows, metadata.num_requests = rows, len(chunks)
    metadata.num_rows_device.fill_(rows)
    with use_context(kv.context(metadata)), torch.no_grad():
        hidden = model(metadata.input_ids, metadata.positions, metadata.kv_lens)
    return hidden[:rows].split([len(new) for _, new in chunks])


def serve(model, prompt, chunk_sizes=None, **kv_arguments):
    """Hidden states of ``prompt`` served alone in a pool of its own, in the given chunks."""
    kv = new_kv(model.config, **kv_arguments)
    at, parts = 0, []
    with kv.request() as request:
        for size in chunk_sizes or [len(prompt)]:
            parts += prefill(model, kv, [(request, prompt[at : at + size])])
            at += size
    assert at == len(prompt)
    return torch.cat(parts)


def distance(got, expected):
    """Relative L2 distance."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


# --- the model in plain torch, float64, no caches, no absorbed weights ------------------------------------


def _norm(x, gain, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def _rotate(x, positions, config):
    """RoPE of x [T, ..., 64] by rotating neighbouring pairs as complex numbers."""
    angles = positions.double()[:, None] * config.rope_theta ** (-torch.arange(32, dtype=torch.float64) / 32)
    turn = torch.polar(torch.ones_like(angles), angles).view(len(x), *[1] * (x.dim() - 2), 32)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (32, 2))) * turn).flatten(-2)


def _swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ down.T


def _mlp(x, weights, prefix, config):
    if f"{prefix}.router" not in weights:
        return _swiglu(x, weights[f"{prefix}.gate_up_proj"], weights[f"{prefix}.down_proj"])
    out = _swiglu(x, weights[f"{prefix}.shared.gate_up_proj"], weights[f"{prefix}.shared.down_proj"])
    for row in range(len(x)):
        scores = (weights[f"{prefix}.router"] @ x[row]).sigmoid()
        corrected = scores + weights[f"{prefix}.correction_bias"]
        best = sorted(range(config.n_routed_experts), key=lambda e: -corrected[e])[
            : config.num_experts_per_tok
        ]
        for expert in best:
            gate_up, down = weights[f"{prefix}.gate_up_proj"][expert], weights[f"{prefix}.down_proj"][expert]
            share = scores[expert] / scores[best].sum() * config.routed_scaling_factor
            out[row] += share * _swiglu(x[row], gate_up, down)
    return out


def _index_scores(x, q_lora, weights, prefix, positions, config):
    """Indexer logits [T, T] without quantisation."""
    q = (q_lora @ weights[f"{prefix}.wq_b"].T).unflatten(1, (config.index_n_heads, 128))
    q = torch.cat((_rotate(q[..., :64], positions, config), q[..., 64:]), -1)
    k = x @ weights[f"{prefix}.wk"].T
    k = (k - k.mean(-1, keepdim=True)) / (
        k.var(-1, keepdim=True, correction=0) + config.index_norm_eps
    ).sqrt()
    k = k * weights[f"{prefix}.k_norm"] + weights[f"{prefix}.k_norm_bias"]
    k = torch.cat((_rotate(k[:, :64], positions, config), k[:, 64:]), -1)
    gate = x @ weights[f"{prefix}.weights_proj"].T * config.index_n_heads**-0.5 * 128**-0.5
    return torch.einsum("thd,sd->hts", q, k).relu().mul(gate.T[:, :, None]).sum(0)


def reference(model, prompt, visible=None):
    """Hidden states [T, hidden] and, per layer with an indexer, its logits [T, T].

    visible: layer -> bool [T, T], which tokens a row attends; all before it and itself where it is not
    given.
    """
    config = model.config
    weights = {name: parameter.cpu().double() for name, parameter in model.named_parameters()}
    positions = torch.arange(len(prompt))
    causal = positions[:, None] >= positions[None, :]
    x, index_scores = weights["embed_tokens"][torch.tensor(prompt)], {}
    for layer in range(config.num_layers):
        attention = f"layers.{layer}.attention"
        eps = config.rms_norm_eps
        normed = _norm(x, weights[f"layers.{layer}.input_norm"], eps)
        q_lora, latent, k_rope = (normed @ weights[f"{attention}.qkv_a_proj"].T).split(
            (config.q_lora_rank, 512, 64), -1
        )
        q_lora = _norm(q_lora, weights[f"{attention}.q_a_norm"], eps)
        latent = _norm(latent, weights[f"{attention}.kv_a_norm"], eps)
        if config.has_indexer(layer):
            index_scores[layer] = _index_scores(
                normed, q_lora, weights, f"{attention}.indexer", positions, config
            )
        q = (q_lora @ weights[f"{attention}.q_b_proj"].T).unflatten(1, (config.num_heads, config.qk_head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, 64), -1)
        k_nope = torch.einsum("sl,hnl->shn", latent, weights[f"{attention}.w_kc"])
        values = torch.einsum("sl,hlv->shv", latent, weights[f"{attention}.w_vc"])
        scores = torch.einsum("thn,shn->hts", q_nope, k_nope) + torch.einsum(
            "thr,sr->hts", _rotate(q_rope, positions, config), _rotate(k_rope, positions, config)
        )
        mask = causal if visible is None else visible[layer]
        scores = (scores * config.qk_head_dim**-0.5).masked_fill(~mask, -math.inf)
        attended = torch.einsum("hts,shv->thv", scores.softmax(-1), values).flatten(1)
        x = x + attended @ weights[f"{attention}.o_proj"].T
        normed = _norm(x, weights[f"layers.{layer}.post_attention_norm"], eps)
        x = x + _mlp(normed, weights, f"layers.{layer}.mlp", config)
    return _norm(x, weights["norm"], config.rms_norm_eps), index_scores


class Selections:
    """Collects the selection that each layer attended, as lists of positions of a request served alone."""

    def __init__(self, model):
        self.by_layer = {}
        self.hooks = [
            module.register_forward_hook(self._keep)
            for module in model.modules()
            if isinstance(module, Attention)
        ]

    def _keep(self, module, args, output):
        self.by_layer[module.layer_id] = output[1].clone()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def visible(self, layer, pages):
        """bool [T, T]: which positions each row selected."""
        slots = self.by_layer[layer]
        mask = torch.zeros(len(slots), len(slots), dtype=torch.bool)
        for row, chosen in enumerate(slots.tolist()):
            kept = [pages.index(slot // PAGE) * PAGE + slot % PAGE for slot in chosen if slot >= 0]
            assert len(set(kept)) == len(kept) == min(row + 1, TOPK)
            mask[row, kept] = True
        return mask


# --- the model against the reference ----------------------------------------------------------------------


def test_short_rows_equal_dense_attention(model):
    prompt = tokens(TOPK + 20)
    expected, _ = reference(model, prompt)
    got = serve(model, prompt)
    assert distance(got[:TOPK], expected[:TOPK]) < 1e-5
    assert distance(got[TOPK:], expected[TOPK:]) > 1e-3  # from here on tokens are left out


def test_long_rows_equal_attention_over_the_selected_tokens(model):
    prompt = tokens(200)
    kv = new_kv()
    with Selections(model) as selections, kv.request() as request:
        (got,) = prefill(model, kv, [(request, prompt)])
        visible = {layer: selections.visible(layer, request.pages) for layer in range(TINY.num_layers)}
    expected, index_scores = reference(model, prompt, visible)
    assert distance(got, expected) < 1e-5
    assert list(index_scores) == [0, 1, 3, 5]
    for layer in range(TINY.num_layers):
        if not TINY.has_indexer(layer):
            assert torch.equal(visible[layer], visible[layer - 1])
            continue
        future = ~torch.ones(200, 200).tril().bool()
        best = index_scores[layer].masked_fill(future, -math.inf).topk(TOPK).indices[TOPK:]
        agreeing = visible[layer][TOPK:].gather(1, best).double().mean()
        assert agreeing > 0.95  # what is left is float8
    assert not torch.equal(visible[0], visible[1])


def test_layer_ids_reach_the_right_caches(model):
    kv = new_kv()
    with kv.request() as request:
        prefill(model, kv, [(request, tokens(3))])
        first = request.pages[0] * PAGE
        for layer in range(TINY.num_layers):
            assert kv.read(layer).key()[first : first + 3].abs().sum(1).gt(0).all()
        keys = [kv.read(layer).key()[first] for layer in range(TINY.num_layers)]
        assert all(not torch.equal(keys[i], keys[j]) for i in range(6) for j in range(i))
        for layer in TINY.index_layers:
            assert kv.read(layer).index_key()[first : first + 3].abs().sum(1).gt(0).all()
            assert not kv.read(layer).index_key()[first + 3 : first + 64].any()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bf16", "fp8_packed", "fp8"])
def test_on_the_gpu_short_rows_equal_dense_attention(layout):
    model = DSAModel(TINY, device="cuda", seed=1)
    prompt = tokens(TOPK)
    got = serve(model, prompt, layout=layout, dtype=torch.bfloat16, device="cuda")
    expected, _ = reference(model, prompt)
    middle, close = closeness(got.cpu(), expected.bfloat16())  # a last bit may tip the choice of an expert
    assert close and middle < 3e-2


# --- the same prompt served in other ways -----------------------------------------------------------------

# A GEMM of another number of rows rounds differently, and a float8 index key that falls the other way can
# exchange one of 64 selected tokens: short rows must agree closely, all rows up to such exchanges.
CLOSE, EXCHANGED = 1e-5, 1e-2


def assert_same(got, expected, positions):
    short = positions < TOPK
    if short.any():
        assert distance(got[short], expected[short]) < CLOSE
    assert distance(got, expected) < EXCHANGED


@pytest.mark.parametrize("sizes", [(100, 100), (63, 1, 1, 135), (1, 199)])
def test_chunked_prefill_equals_one_shot(model, sizes):
    prompt = tokens(200)
    assert_same(serve(model, prompt, sizes), serve(model, prompt), torch.arange(200))


@pytest.mark.parametrize("layout", ["bf16", "fp8_packed", "fp8"])
def test_cached_prefix_equals_fresh(model, layout):
    prompt, other = tokens(200), tokens(50, seed=1)
    kv = new_kv(layout=layout)
    with kv.request() as first:
        prefill(model, kv, [(first, prompt[:128] + other)])
        second = RequestPages.with_prefix(first, 128)
    (got,) = prefill(model, kv, [(second, prompt[128:])])  # the first holder is gone, its own page poisoned
    assert_same(got, serve(model, prompt, layout=layout)[128:], torch.arange(128, 200))
    second.close()
    kv.close()


def test_requests_in_a_batch_equal_each_alone(model):
    prompts = [tokens(90, seed=3), tokens(1, seed=4), tokens(150, seed=5)]
    kv = new_kv()
    requests = [kv.request() for _ in prompts]
    prefill(model, kv, [(requests[2], prompts[2][:40])])
    news = [prompts[0], prompts[1], prompts[2][40:]]
    outputs = prefill(model, kv, list(zip(requests, news, strict=True)))
    for prompt, start, got in zip(prompts, (0, 0, 40), outputs, strict=True):
        assert_same(got, serve(model, prompt)[start:], torch.arange(start, len(prompt)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pad_rows_do_not_reach_valid_rows(dtype):
    model = DSAModel(TINY, dtype=dtype, seed=1)
    prompts = [tokens(70, seed=6), tokens(20, seed=7)]
    poison = 255
    prompts = [[token % poison for token in prompt] for prompt in prompts]

    def padded(pad_id):
        kv = new_kv(dtype=dtype)
        with kv.request() as first, kv.request() as second:
            return torch.cat(prefill(model, kv, [(first, prompts[0]), (second, prompts[1])], 128, pad_id))

    clean = padded(pad_id=3)
    with torch.no_grad():
        model.embed_tokens[poison] = math.nan
    assert clean.isfinite().all()
    assert torch.equal(padded(pad_id=poison), clean)
    with torch.no_grad():
        model.embed_tokens[poison] = 1e30
    assert torch.equal(padded(pad_id=poison), clean)


def test_given_embeddings_replace_the_tokens(model):
    prompt = torch.tensor(tokens(5))
    kv = new_kv()
    with torch.no_grad(), use_context(kv.context(None)):
        positions, lens = torch.arange(5), torch.arange(1, 6, dtype=torch.int32)
        expected = model(prompt, positions, lens)
        got = model(torch.zeros_like(prompt), positions, lens, input_embeds=model.embed_tokens[prompt])
    assert torch.equal(got, expected)


# --- one graph, the same for layers of a kind -------------------------------------------------------------


def _node(node):
    """A node without names, and without the layer id of a composite."""
    args = [a if not isinstance(a, torch.fx.Node) else "%" for a in node.args]
    if "sparse_pcg" in str(node.target):
        args = ["layer", *args[1:]]
    return str(node.target), str(args)


def test_traces_to_one_dynamic_graph_whose_layers_of_a_kind_are_alike(model):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    kv = new_kv()
    with torch.no_grad(), use_context(kv.context(None)):
        for rows in (6, 9):
            inputs = (torch.arange(rows), torch.arange(rows), torch.ones(rows, dtype=torch.int32))
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 0)
            assert torch.equal(compiled(*inputs), model(*inputs))
    assert len(graphs) == 1
    nodes = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    cuts = [at for at, node in enumerate(nodes) if "indexer_prefill" in str(node.target)]
    assert [nodes[at].args[0] for at in cuts] == [0, 1, 3, 5]
    between = [[_node(node) for node in nodes[start:end]] for start, end in itertools.pairwise(cuts)]
    assert between[1] == between[2]
    assert between[0] != between[1]
    attentions = [node.args[0] for node in nodes if "mla_attention" in str(node.target)]
    assert attentions == list(range(6))


# --- experts ----------------------------------------------------------------------------------------------


def _router_config(**overrides):
    return preset("tiny", **{"n_routed_experts": 4, "num_experts_per_tok": 2, **overrides})


def test_routing_worked_by_hand():
    logit = {0.8: math.log(4.0), 0.5: 0.0, 0.2: -math.log(4.0)}
    logits = torch.tensor([[logit[0.8], logit[0.5], logit[0.2], logit[0.5]]])
    bias = torch.tensor([-0.7, 0.0, 0.4, 0.05])  # corrected: 0.1, 0.5, 0.6, 0.55
    weights, ids = route(logits, bias, _router_config())
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[2.5 * 0.2 / 0.7, 2.5 * 0.5 / 0.7]]))
    weights, ids = route(logits, bias, _router_config(norm_topk_prob=False))
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.25]]))


def test_routing_within_groups_worked_by_hand():
    # corrected scores per group: {0.9, 0.1}, {0.6, 0.5}, {0.55, 0.54}, {0.2, 0.3}; the best two of a group
    # sum to 1.0, 1.1, 1.09, 0.5: groups 1 and 2 are kept, though the best expert is in group 0
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.55, 0.54, 0.2, 0.3]])
    config = _router_config(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2)
    weights, ids = route(scores.logit(), torch.zeros(8), config)
    assert ids.tolist() == [[2, 4, 5]]
    torch.testing.assert_close(weights.sum(), torch.tensor(2.5))


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_grouped_experts_equal_dense_ones(rows, monkeypatch):
    real, reached = torch.nn.functional.grouped_mm, []

    def grouped_mm(a, b, offs):
        """The rows past the last group are left as they are in memory: NaN at worst."""
        out = real(a, b, offs=offs)
        reached.append(int(offs[-1]))
        out[reached[-1] :] = math.nan
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 32, generator=generator).bfloat16()
    gate_up = (torch.randn(8, 48, 32, generator=generator) / 32**0.5).bfloat16()
    down = (torch.randn(8, 32, 24, generator=generator) / 24**0.5).bfloat16()
    weights, ids = torch.rand(rows, 8, generator=generator).topk(2)
    valid = torch.rand(rows, generator=generator) < 0.7
    x[~valid] = math.nan
    dense = experts_dense(x, gate_up, down, weights, ids, valid)
    grouped = experts_grouped(x, gate_up, down, weights, ids, valid)
    torch.testing.assert_close(grouped, dense, atol=2e-2, rtol=2e-2)
    assert not dense[~valid].any() and not grouped[~valid].any()
    assert reached == [2 * valid.sum()] * 2
    assert rows < 7 or (dense[valid].abs().sum(1) > 0).all()


@pytest.mark.gpu
def test_grouped_experts_replay_from_a_graph():
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    gate_up, down = (normal(32, 256, 512) / 512**0.5).bfloat16(), (normal(32, 512, 128) / 128**0.5).bfloat16()
    x, scores = normal(96, 512).bfloat16(), normal(96, 32).sigmoid()
    weights, ids = scores.topk(4)
    valid = torch.arange(96, device="cuda") < 90

    def experts():
        return experts_grouped(x, gate_up, down, weights, ids, valid)

    experts()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts()
    for rows in (96, 1, 50):
        x.copy_(normal(96, 512))
        new_weights, new_ids = normal(96, 32).sigmoid().topk(4)
        weights.copy_(new_weights)
        ids.copy_(new_ids)
        valid.copy_(torch.arange(96, device="cuda") < rows)
        x[rows:] = math.nan
        graph.replay()
        assert torch.equal(captured, experts())
        dense = experts_dense(x, gate_up, down, weights, ids, valid)
        torch.testing.assert_close(captured, dense, atol=3e-2, rtol=3e-2)
        assert not captured[rows:].any()


def test_an_expert_that_overflows_on_a_row_it_does_not_serve_is_harmless():
    x = torch.ones(1, 4)
    gate_up, down = torch.ones(2, 4, 4), torch.ones(2, 4, 2)
    gate_up[1] = 1e30
    weights, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    assert experts_dense(x, gate_up, down, weights, ids, torch.ones(1, dtype=torch.bool)).isfinite().all()


# --- configuration ----------------------------------------------------------------------------------------


def test_published_sharing_patterns():
    assert preset("glm5_2").index_layers == (0, 1, *range(2, 78, 4))
    assert len(preset("glm5_2").index_layers) == 21
    assert preset("deepseek_v32").index_layers == tuple(range(61))
    assert preset("glm5").index_layers == tuple(range(78))


def test_sharing_given_in_each_way():
    def layers(**overrides):
        return preset("tiny", num_layers=9, **overrides).index_layers

    assert layers(index_topk_freq=4) == (0, 1, 5)  # first layer, then every fourth from the second
    assert layers(index_topk_freq=4, index_topk_offset=3) == (0, 1, 2, 6)
    assert layers(index_topk_pattern="FSSFSSFSS", index_topk_freq=4) == (0, 3, 6)
    types = ("full", "shared", "full", *["shared"] * 6)
    assert layers(indexer_types=types, index_topk_pattern="FSSFSSFSS") == (0, 2)


# Weights of the published models without their NextN layer: 671.0e9 and the indexers' 0.85e9; 744e9.
@pytest.mark.parametrize(("name", "billions"), [("deepseek_v32", 671.88), ("glm5", 743.9), ("glm5_2", 743.4)])
def test_published_parameter_counts(name, billions):
    model = DSAModel(preset(name, max_positions=16), device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.06)
    assert not any(p.requires_grad for p in model.parameters())


def test_parameter_shapes(model):
    shapes = {re.sub(r"^layers\.1\.", "", name): tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["embed_tokens"] == shapes["lm_head"] == (256, 128)
    assert shapes["attention.qkv_a_proj"] == (64 + 512 + 64, 128)
    assert shapes["attention.q_b_proj"] == (4 * (32 + 64), 64)
    assert shapes["attention.w_kc"] == (4, 32, 512)
    assert shapes["attention.w_vc"] == (4, 512, 32)
    assert shapes["attention.o_proj"] == (128, 4 * 32)
    assert shapes["attention.indexer.wq_b"] == (4 * 128, 64)
    assert shapes["attention.indexer.wk"] == (128, 128)
    assert shapes["attention.indexer.weights_proj"] == (4, 128)
    assert shapes["mlp.router"] == (8, 128)
    assert shapes["mlp.gate_up_proj"] == (8, 128, 128)
    assert shapes["mlp.down_proj"] == (8, 128, 64)
    assert shapes["mlp.shared.gate_up_proj"] == (128, 128)
    assert shapes["layers.0.mlp.gate_up_proj"] == (512, 128)
    assert [layer.attention.indexer is not None for layer in model.layers] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


def test_weights_follow_the_seed():
    first, again, other = (
        DSAModel(preset("tiny", num_layers=2), seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_activations_keep_their_size_over_depth():
    sizes = []
    for num_layers in (2, 24):
        model = DSAModel(preset("tiny", num_layers=num_layers), dtype=torch.float32)
        hook = model.layers[-1].register_forward_hook(lambda m, a, out: sizes.append(out[0].std().item()))
        serve(model, tokens(60))
        hook.remove()
    assert all(0.8 < size < 3 for size in sizes)


def test_head():
    model = DSAModel(TINY, dtype=torch.float32)
    hidden = torch.randn(2, 128)
    assert torch.equal(model.head(hidden), hidden @ model.lm_head.T)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank must be 512"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most"),
        ({"n_group": 3, "topk_group": 3}, "n_group must be a divisor"),
        ({"n_group": 4, "topk_group": 5}, "topk_group must be at most n_group"),
        ({"indexer_types": ("full",) * 5}, "indexer_types must be 6 of"),
        ({"index_topk_pattern": "FFFFFX"}, "index_topk_pattern must be 6 of"),
        ({"index_topk_pattern": "SFFFFF"}, "indexer_types must be 'full' for layer 0"),
        ({"layers": 3}, r"overrides must be fields of ModelConfig .* got \['layers'\]"),
    ],
)
def test_bad_configurations(overrides, message):
    with pytest.raises(ValueError, match=message):
        preset("tiny", **overrides)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"name must be one of .*'tiny'.*, got 'large'"):
        preset("large")


# --- RoPE table -------------------------------------------------------------------------------------------


def test_cos_sin_table_worked_by_hand():
    table = cos_sin_cache(preset("tiny", max_positions=3, rope_theta=1e4), "cpu")
    assert table.shape == (3, 64) and table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    torch.testing.assert_close(table[2, 0], torch.tensor(math.cos(2.0)))
    torch.testing.assert_close(table[2, 32 + 16], torch.tensor(math.sin(2.0 / 100)))


def test_yarn_worked_by_hand():
    config = preset("deepseek_v32", max_positions=2)
    assert isinstance(config, ModelConfig) and config.yarn == Yarn(40.0, 4096)
    sharpening = 0.1 * math.log(40.0) + 1.0  # 1.3689
    assert config.softmax_scale == pytest.approx(192**-0.5 * sharpening**2)
    assert config.yarn.cos_sin_scale == 1.0
    assert Yarn(40.0, 4096, mscale=0.0).cos_sin_scale == pytest.approx(1 / sharpening)
    # Pair i turns 4096 / (2 pi 10000^(i/32)) times over 4096 positions: 32 turns at i = 10.47, 1 turn at i
    # = 22.51. So pairs up to 10 keep their frequency, pairs from 23 on turn 40 times slower, in between it
    # is a ramp.
    frequencies = cos_sin_cache(config, "cpu")[1, 32:].double().asin()
    plain = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    plain[0] = math.pi - 1.0 if frequencies[0] > 1.0 else 1.0
    torch.testing.assert_close(frequencies[:11], plain[:11], rtol=1e-5, atol=0)
    torch.testing.assert_close(frequencies[23:], plain[23:] / 40, rtol=1e-4, atol=0)
    share = (16 - 10) / (23 - 10)
    torch.testing.assert_close(frequencies[16], plain[16] * (1 - share + share / 40), rtol=1e-4, atol=0)
