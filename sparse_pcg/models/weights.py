"""Weights from a Hugging Face checkpoint into the reference model and its NextN layer.

The headers of all shards are compared with what the configuration asks for before any weight is read. Then the
shards are read one at a time, of each only the rank's part: at no time does more exist than that part and one shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from .checkpoint import FLOAT8, READABLE, Checkpoint, scale_name
from .config import ModelConfig
from .dsa import DSAModel
from .hf_config import config_from_hf
from .hf_names import Wanted, model_names, nextn_names
from .nextn import NextN, draft_config
from .sharding import Rank

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_SHOWN = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of a model


def load_model(
    path: str | Path,
    config: ModelConfig | None = None,
    *,
    rank: Rank | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> DSAModel:
    """The model in a ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM`` checkpoint, without its NextN layer.

    path: a folder with ``config.json`` and ``*.safetensors``, one or sharded, block-scaled float8 or not.
    config: of the whole model, if it is not to be that of ``config.json`` (``config_from_hf``): fewer layers, another
        index sharing or index_topk. Tensors of layers and indexers that it leaves out are not read.
    rank: read and hold this rank's part only (``Rank.of(mesh)``: of a model whose ranks sum up what they give); None:
        all.
    dtype: bfloat16, float16 or float32; router, correction bias and the indexer's norm are float32.
    progress: show a progress bar on stderr.
    Raises ValueError naming every tensor that is missing, not expected or of another shape or type, before any
    weight is read; FileNotFoundError for files that are not there.
    """
    if dtype not in DTYPES:
        raise ValueError(f"load_model: dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    checkpoint, rank = Checkpoint(path), rank or Rank()
    whole = config or config_from_hf(checkpoint.config)
    tied = bool(checkpoint.config.get("tie_word_embeddings")) and "lm_head.weight" not in checkpoint.tensors
    wanted = list(model_names(whole, rank, _stacked(checkpoint), tied))
    _check(checkpoint, wanted, lambda name: _outside_model(name, whole, checkpoint))
    model = DSAModel(whole, dtype, device, seed=None, rank=rank)
    _fill(model, checkpoint, wanted, dtype, progress)
    return model


def load_nextn(
    path: str | Path, target: DSAModel, *, rank: Rank | None = None, layer_id: int | None = None, progress: bool = True
) -> NextN:
    """The NextN layer of a checkpoint, ``model.layers.{num_hidden_layers}.*``, for the ``target`` loaded from it.

    rank: that of ``target``, and by default taken from it. layer_id: of ``NextN``. Dtype and device are those of
    ``target``, whose embedding and head it shares: the checkpoint's copies of them are not read.
    Raises ValueError for a checkpoint without such a layer and as ``load_model`` does.
    """
    checkpoint, rank = Checkpoint(path), rank or target.rank
    if not checkpoint.config.get("num_nextn_predict_layers"):
        raise ValueError(f"load_nextn: the checkpoint must have a NextN layer, {str(path)!r} has none")
    whole = config_from_hf(checkpoint.config)
    if draft_config(rank.part_of(_as_target(whole, target.config))) != draft_config(target.config):
        raise ValueError("load_nextn: target must be the model of this checkpoint, and of this rank")
    wanted = list(nextn_names(draft_config(whole), rank, whole.num_layers, _stacked(checkpoint)))
    own = f"model.layers.{whole.num_layers}."
    copies = (f"{own}embed_tokens.weight", f"{own}shared_head.head.weight")
    _check(checkpoint, wanted, lambda name: not name.startswith(own) or name in copies)
    draft = NextN(target, layer_id, seed=None)
    _fill(draft, checkpoint, wanted, target.embed_tokens.dtype, progress)
    return draft


def _as_target(whole: ModelConfig, target: ModelConfig) -> ModelConfig:
    """``whole`` with what may differ between a checkpoint and a model with its shapes."""
    free = ("index_topk", "max_positions", "indexer_hadamard", "indexer_round_scale", "indexer_float8")
    return replace(whole, **{name: getattr(target, name) for name in free})


def assign(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make ``tensors`` the parameters of these names of ``module``; nothing is copied and nothing takes a gradient."""
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _stacked(checkpoint: Checkpoint) -> bool:
    return any(name.endswith("mlp.experts.gate_up_proj") for name in checkpoint.tensors)


def _outside_model(name: str, config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the tensor is one that the checkpoint may have and ``config`` has no use for."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return False
    layer, rest = int(match[1]), match[2]
    written = checkpoint.config["num_hidden_layers"] + (checkpoint.config.get("num_nextn_predict_layers") or 0)
    if layer >= config.num_layers:
        return layer < written
    return rest.startswith("self_attn.indexer.") and not config.has_indexer(layer)


def _check(checkpoint: Checkpoint, wanted: Iterable[Wanted], unread: Callable[[str], bool]) -> None:
    """Raise ValueError unless the checkpoint has the wanted tensors and else only ``unread`` ones."""
    shapes = {w.name: w.shape for w in wanted}
    tensors = checkpoint.tensors
    wrong = []
    for name in [name for name in shapes if name in tensors and tensors[name].dtype == FLOAT8]:
        if len(tensors[name].shape) < 2:
            wrong.append(f"{name} must be a matrix to be {FLOAT8}, got {list(tensors[name].shape)}")
            continue
        shapes[scale_name(name)] = checkpoint.scale_shape(name)
    for name in (name for name in shapes if name in tensors):
        given = tensors[name]
        if given.shape != shapes[name]:
            wrong.append(f"{name} must be {list(shapes[name])}, got {list(given.shape)}")
        elif given.dtype not in READABLE and not name.endswith("_scale_inv"):
            wrong.append(f"{name} must be one of {', '.join(READABLE)}, got {given.dtype}")
    missing = [name for name in shapes if name not in tensors]
    extra = [name for name in tensors if name not in shapes and not unread(name)]
    found = [("missing", missing), ("not expected", extra), ("misshapen", wrong)]
    if any(names for _, names in found):
        told = "; ".join(f"{kind}: {_listed(names)}" for kind, names in found if names)
        raise ValueError(f"checkpoint {str(checkpoint.path)!r} does not fit the configuration: {told}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@torch.no_grad()
def _fill(
    module: nn.Module, checkpoint: Checkpoint, wanted: Iterable[Wanted], dtype: torch.dtype, progress: bool
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    parameters = dict(module.named_parameters())
    by_file: dict[Path, list[Wanted]] = {file: [] for file in checkpoint.files}
    for tensor in wanted:
        if tensor.part is not None:
            by_file[checkpoint.tensors[tensor.name].file].append(tensor)
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("", total=sum(file.stat().st_size for file, tensors in by_file.items() if tensors))
        for file, tensors in by_file.items():
            parts = [(tensor.name, tensor.part or ()) for tensor in tensors]
            for tensor, read in zip(tensors, checkpoint.read_shard(file, parts, dtype), strict=True):
                tensor.store(parameters, read)
            if tensors:
                bar.advance(task, file.stat().st_size)
