"""Weights from checkpoints: every tensor in its place, a rank's part alone, float8, and what does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from sparse_pcg.integrations.transformers import convert
from sparse_pcg.models import Rank, config_from_hf, load_model, load_nextn
from sparse_pcg.models.checkpoint import Checkpoint
from tests.sparse_pcg.hf_models import hf_model
from tests.sparse_pcg.serving import new_kv, prefill

pytest.importorskip("transformers", minversion="5.20")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, the model in it), by family: sharded, as ``save_pretrained`` writes it."""
    made = {}

    def get(family):
        if family not in made:
            model, path = hf_model(family, "medium"), tmp_path_factory.mktemp(family)
            model.save_pretrained(path, max_shard_size="400KB")
            assert len(list(path.glob("*.safetensors"))) > 3
            made[family] = path, model
        return made[family]

    return get


def tensors_of(path):
    """All tensors of a checkpoint, by name."""
    return {name: t for file in path.glob("*.safetensors") for name, t in safetensors.load_file(file).items()}


def write(path, tensors, config):
    """A checkpoint of one file."""
    path.mkdir()
    safetensors.save_file({name: t.clone() for name, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(path):
    return json.loads((path / "config.json").read_text())


def assert_equal_parameters(model, expected):
    got, want = dict(model.named_parameters()), dict(expected.named_parameters())
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name
        assert not got[name].requires_grad


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sharded_stacked_or_in_one_file(family, saved, tmp_path):
    path, hf = saved(family)
    expected = convert(hf)
    model = load_model(path, dtype=torch.float32, progress=False)
    assert_equal_parameters(model, expected)
    assert torch.equal(model.cos_sin_cache, expected.cos_sin_cache)
    assert model.config == replace(expected.config, lora_norm_eps=model.config.lora_norm_eps)
    stacked = write(tmp_path / "stacked", hf.state_dict(), config_of(path))
    assert_equal_parameters(load_model(stacked, dtype=torch.float32, progress=False), expected)


def test_dtype(saved):
    path, hf = saved("glm_moe_dsa")
    model, exact = load_model(path, progress=False), dict(convert(hf).named_parameters())
    assert model.embed_tokens.dtype == model.layers[0].attention.indexer.weights_proj.dtype == torch.bfloat16
    assert model.layers[1].mlp.router.dtype == torch.float32
    assert all(torch.equal(p, exact[name].to(p.dtype)) for name, p in model.named_parameters())


def test_tied_embeddings(saved, tmp_path):
    path, hf = saved("glm_moe_dsa")
    tensors = tensors_of(path)
    del tensors["lm_head.weight"]
    tied = write(tmp_path / "tied", tensors, {**config_of(path), "tie_word_embeddings": True})
    model = load_model(tied, dtype=torch.float32, progress=False)
    assert torch.equal(model.lm_head, hf.model.embed_tokens.weight)


# --- a rank's part ----------------------------------------------------------------------------------------


def expected_part(whole, rank):
    """Parameters of ``rank``, cut by hand out of those of the whole model."""
    config = whole.config
    parts = {name: p.data for name, p in whole.named_parameters()}

    def mine(tensor, dim, groups=1):
        pieces = [piece.chunk(rank.size, dim)[rank.index] for piece in tensor.chunk(groups, dim)]
        return torch.cat(pieces, dim)

    for name, tensor in parts.items():
        kind, expert = name.rsplit(".", 1)[-1], tensor.dim() == 3
        if kind in ("w_kc", "w_vc", "q_b_proj"):
            parts[name] = mine(tensor, 0)
        elif kind == "o_proj":
            parts[name] = mine(tensor, 1)
        elif kind in ("gate_up_proj", "down_proj") and expert and rank.expert_parallel:
            parts[name] = mine(tensor, 0)
        elif kind == "gate_up_proj":
            parts[name] = mine(tensor, int(expert), groups=2)
        elif kind == "down_proj":
            parts[name] = mine(tensor, 1 + int(expert))
    assert config.local_experts is None
    return parts


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_rank_gets_its_part_and_reads_no_more(expert_parallel, stacked, saved, tmp_path, monkeypatch):
    path, hf = saved("deepseek_v32")
    if stacked:
        path = write(tmp_path / "stacked", hf.state_dict(), config_of(path))
    read = []
    real = Checkpoint.read_shard

    def read_shard(self, file, parts, dtype):
        for tensor in real(self, file, parts, dtype):
            read.append(tensor.numel())
            yield tensor

    monkeypatch.setattr(Checkpoint, "read_shard", read_shard)
    whole = convert(hf)
    for index in (0, 1):
        rank = Rank(index, 2, expert_parallel)
        read.clear()
        model = load_model(path, rank=rank, dtype=torch.float32, progress=False)
        parts = expected_part(whole, rank)
        got = dict(model.named_parameters())
        assert all(torch.equal(got[name], parts[name]) for name in parts)
        assert sum(read) == sum(p.numel() for p in got.values()) < sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_what_the_ranks_give_sums_to_the_whole(expert_parallel, saved):
    path, hf = saved("glm_moe_dsa")
    whole = convert(hf)
    ranks = [load_model(path, rank=Rank(i, 2, expert_parallel), dtype=torch.float32, progress=False) for i in (0, 1)]
    compared = []

    def compare(module, args, output):
        name = names[module]
        each = [rank.get_submodule(name)(*args) for rank in ranks]
        outputs, given = ([e[0] for e in each], output[0]) if isinstance(output, tuple) else (each, output)
        assert (outputs[0] - given).norm() > 0.1 * given.norm()
        torch.testing.assert_close(outputs[0] + outputs[1], given, atol=1e-5, rtol=1e-4)
        compared.append(name)

    names = {whole.get_submodule(f"layers.{i}.{kind}"): f"layers.{i}.{kind}" for i in (0, 1, 2) for kind in
             ("attention", "mlp")}  # fmt: skip
    for module in names:
        module.register_forward_hook(compare)
    kv = new_kv(whole.config)
    with kv.request() as request:
        prefill(whole, kv, [(request, list(range(45)))], pad_to=48)
    assert len(compared) == 6


# --- float8 -----------------------------------------------------------------------------------------------


def in_blocks(weight, block):
    """float8 blocks and their scales, and the numbers they stand for, one block after the other."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block), -(-columns // block))
    values, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[part] = values[part].float() * scales[i, j]
    return values, scales, exact


@pytest.mark.parametrize("rank", [Rank(), Rank(1, 2), Rank(1, 2, True)], ids=["whole", "columns", "experts"])
@pytest.mark.parametrize("block", [128, 48])
def test_block_scaled_float8(block, rank, saved, tmp_path):
    path, _ = saved("deepseek_v32")
    tensors, plain = tensors_of(path), {}
    quantised = re.compile(r".*(_proj|wq_b|wk|kv_a_proj_with_mqa)\.weight")
    for name, tensor in list(tensors.items()):
        plain[name] = tensor
        if quantised.fullmatch(name) and "weights_proj" not in name:
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = in_blocks(tensor, block)
    assert sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) > 60
    config = config_of(path)
    expected = load_model(write(tmp_path / "plain", plain, config), rank=rank, progress=False)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    packed = write(tmp_path / "float8", tensors, config)
    assert_equal_parameters(load_model(packed, rank=rank, progress=False), expected)

    del tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]
    lacking = write(tmp_path / "lacking", tensors, config)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.self_attn\.o_proj\.weight_scale_inv$"):
        load_model(lacking, rank=rank, progress=False)


def test_weights_quantised_in_another_way_are_refused(saved, tmp_path):
    path, _ = saved("deepseek_v32")
    config = {**config_of(path), "quantization_config": {"quant_method": "awq"}}
    other = write(tmp_path / "awq", tensors_of(path), config)
    with pytest.raises(ValueError, match="quant_method must be 'fp8' or absent, got 'awq'"):
        load_model(other)


# --- NextN ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_nextn(saved, tmp_path_factory):
    """A checkpoint with a NextN layer as published ones have it, and that layer's tensors."""
    path, _ = saved("glm_moe_dsa")
    tensors, config = tensors_of(path), config_of(path)
    last, hidden = "model.layers.2.", config["hidden_size"]  # it has an indexer, too
    shapes = {name.removeprefix(last): t.shape for name, t in tensors.items() if name.startswith(last)}
    shapes |= dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (hidden,))
    shapes["eh_proj.weight"] = (hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(7)
    own = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    copies = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }
    layer = {f"model.layers.3.{name}": t for name, t in {**own, **copies}.items()}
    folder = tmp_path_factory.mktemp("nextn") / "model"
    return write(folder, tensors | layer, {**config, "num_nextn_predict_layers": 1}), own


@pytest.mark.parametrize("rank", [Rank(), Rank(1, 2, True)], ids=["whole", "experts"])
def test_nextn_layer(rank, with_nextn):
    path, own = with_nextn
    target = load_model(path, rank=rank, dtype=torch.float32, progress=False)
    draft = load_nextn(path, target, rank=rank, progress=False)
    assert draft.layer_id == 3 and draft.embed_tokens is target.embed_tokens and draft.lm_head is target.lm_head
    layer = draft.layers[0]
    assert torch.equal(draft.enorm, own["enorm.weight"]) and torch.equal(draft.hnorm, own["hnorm.weight"])
    assert torch.equal(draft.norm, own["shared_head.norm.weight"]) and torch.equal(draft.eh_proj, own["eh_proj.weight"])
    assert torch.equal(layer.attention.indexer.wq_b, own["self_attn.indexer.wq_b.weight"])
    assert torch.equal(layer.mlp.router, own["mlp.gate.weight"])
    heads = layer.attention.config.num_heads
    q_b = own["self_attn.q_b_proj.weight"].chunk(4 // heads)[-1]
    assert torch.equal(layer.attention.q_b_proj, q_b)
    first, count = layer.mlp.config.experts_here
    down = torch.stack([own[f"mlp.experts.{e}.down_proj.weight"] for e in range(first, first + count)])
    assert torch.equal(layer.mlp.down_proj, down)
    kept = {name for name, _ in draft.named_parameters()}
    assert all(parameter.isfinite().all() for parameter in draft.parameters()) and len(kept) > 20


def test_nextn_that_does_not_fit(with_nextn, saved, tmp_path):
    path, _ = with_nextn
    target = load_model(path, dtype=torch.float32, progress=False)
    with pytest.raises(ValueError, match="must be the model of this checkpoint, and of this rank"):
        load_nextn(path, target, rank=Rank(0, 2))
    with pytest.raises(ValueError, match=r"must have a NextN layer, .* has none"):
        load_nextn(saved("glm_moe_dsa")[0], target)
    tensors = tensors_of(path)
    tensors["model.layers.3.hnorm.bias"] = tensors.pop("model.layers.3.hnorm.weight")
    wrong = write(tmp_path / "wrong", tensors, config_of(path))
    said = r"missing: model\.layers\.3\.hnorm\.weight; not expected: model\.layers\.3\.hnorm\.bias$"
    with pytest.raises(ValueError, match=said):
        load_nextn(wrong, target)
    load_model(wrong, progress=False)  # the model itself is whole


# --- what does not fit ------------------------------------------------------------------------------------


def test_every_fault_is_named_and_nothing_is_read(saved, tmp_path, monkeypatch):
    path, _ = saved("deepseek_v32")
    tensors = tensors_of(path)
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(3)
    tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(128)  # there are three layers
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(255, 128)
    tensors["lm_head.weight"] = torch.zeros(97, 128, dtype=torch.int8)
    broken = write(tmp_path / "broken", tensors, config_of(path))
    monkeypatch.setattr(Checkpoint, "read_shard", None)
    with pytest.raises(ValueError) as error:
        load_model(broken, rank=Rank(0, 2, expert_parallel=True))  # of an expert on the other rank, too
    message = str(error.value)
    _, missing, extra, wrong = re.split("missing: |not expected: |misshapen: ", message)
    assert missing == "model.norm.weight, model.layers.2.mlp.experts.5.up_proj.weight; "
    assert extra == "model.layers.1.self_attn.q_proj.weight, model.layers.3.input_layernorm.weight; "
    assert "model.layers.0.mlp.up_proj.weight must be [256, 128], got [255, 128]" in wrong
    assert "lm_head.weight must be one of F64, F32, F16, BF16, F8_E4M3, got I8" in wrong
    assert str(broken) in message


def test_files_that_are_not_there(saved, tmp_path):
    path, _ = saved("glm_moe_dsa")
    with pytest.raises(FileNotFoundError, match="path must be a folder"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(config_of(path)))
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in"):
        load_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"shards that are not there: \['model-00001-of-00002"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "config.json must hold JSON"),
        ("config.json", b"[]", "config.json must hold a JSON object, got list"),
        ("model.safetensors.index.json", b"{}", "index.json must have a weight_map"),
        ("model.safetensors.index.json", b"no", "index.json must hold JSON"),
        ("x.safetensors", b"xx", "x.safetensors must be a whole safetensors file"),
    ],
)
def test_damaged_files_are_named(file, content, message, saved, tmp_path):
    (tmp_path / "config.json").write_text((saved("deepseek_v32")[0] / "config.json").read_text())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "128"}, "hidden_size must be an integer, got '128'"),
        ({"num_hidden_layers": 3.0}, "num_hidden_layers must be an integer, got 3.0"),
        ({"index_topk_freq": "2"}, "index_topk_freq must be an integer, got '2'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"quantization_config": {"weight_block_size": [128]}}, "weight_block_size must be two positive ints"),
    ],
)
def test_settings_of_another_type_are_named(changes, message, saved, tmp_path):
    path, _ = saved("deepseek_v32")
    write(tmp_path / "a", {}, json.loads((path / "config.json").read_text()) | changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "a", progress=False)


def test_dtypes_that_no_model_has(saved, tmp_path):
    path, _ = saved("deepseek_v32")
    with pytest.raises(ValueError, match=r"load_model: dtype must be one of .*, got torch.int8"):
        load_model(path, dtype=torch.int8, progress=False)
    tensors = tensors_of(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    write(tmp_path / "a", tensors, json.loads((path / "config.json").read_text()))
    with pytest.raises(ValueError, match=r"model\.norm\.weight must be a matrix to be F8_E4M3"):
        load_model(tmp_path / "a", progress=False)


def test_a_tensor_in_two_shards(saved, tmp_path):
    path, _ = saved("glm_moe_dsa")
    twice = write(tmp_path / "twice", tensors_of(path), config_of(path))
    safetensors.save_file({"model.norm.weight": torch.zeros(128)}, twice / "more.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in model\.safetensors and more\.safetensors"):
        load_model(twice)


def test_part_of_the_layers_and_of_the_indexers(saved):
    path, hf = saved("deepseek_v32")  # an indexer in every layer
    config = replace(config_from_hf(path, num_layers=2), index_topk_pattern="FS")
    model = load_model(path, config, dtype=torch.float32, progress=False)
    whole = dict(convert(hf).named_parameters())
    got = dict(model.named_parameters())
    assert model.layers[1].attention.indexer is None and len(model.layers) == 2
    assert all(torch.equal(got[name], whole[name]) for name in got)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ((0, 0), "size must be at least 1, got 0"),
        ((2, 2), "index must be 0 to 1, got 2"),
        ((0, 3), "num_heads must be a multiple of size 3, got 4"),
    ],
)
def test_ranks_that_cannot_be(rank, message, saved):
    with pytest.raises(ValueError, match=message):
        load_model(saved("glm_moe_dsa")[0], rank=Rank(*rank))
