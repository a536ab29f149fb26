"""The tensors of a checkpoint folder, read slice by slice: sharded safetensors, block-scaled float8 dequantised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .hf_config import read_config, read_object

FLOAT8 = "F8_E4M3"
READABLE = ("F64", "F32", "F16", "BF16", FLOAT8)
_STEP = 1 << 22  # elements that exist in float32 at one time


class Tensor(NamedTuple):
    """What a shard's header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def scale_name(name: str) -> str:
    """The name of the block scales of a float8 tensor."""
    return f"{name}_scale_inv"


def _open(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading a checkpoint needs safetensors: pip install 'sparse-pcg[hf]'") from error
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {file.name} must be a whole safetensors file: {error}") from error


def dequantise(
    weight: torch.Tensor, scales: torch.Tensor, at: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """A part of a block-scaled float8 matrix in ``dtype``, the products rounded once.

    weight: float8_e4m3fn [rows, columns] (or [experts, rows, columns]), beginning at row and column ``at`` of the
    whole. scales: of the whole, [ceil(whole rows / block[0]), ceil(whole columns / block[1])], one a block.
    """
    if weight.dim() == 3:
        pairs = zip(weight, scales, strict=True)
        return torch.stack([dequantise(w, s, at, block, dtype) for w, s in pairs])
    rows, columns = ((start + torch.arange(n)) // b for start, n, b in zip(at, weight.shape, block, strict=True))
    wide, out = scales.float()[:, columns], torch.empty(weight.shape, dtype=dtype)
    for part in torch.arange(len(weight)).split(max(1, _STEP // max(weight.shape[1], 1))):
        chunk = slice(int(part[0]), int(part[-1]) + 1)
        out[chunk] = (weight[chunk].float() * wide[rows[chunk]]).to(dtype)
    return out


class Checkpoint:
    """A folder with ``config.json`` and one or several ``*.safetensors``; only the headers are read at first.

    config: the fields of ``config.json``. tensors: name -> ``Tensor``. block: rows and columns of a block that has
    one float8 scale.
    Raises FileNotFoundError for a folder, file or shard that is not there, ValueError for a file that is damaged, a
    shard that repeats a tensor and weights quantised in another way.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"checkpoint: path must be a folder, got {str(path)!r}")
        self.config = read_config(self.path)
        quantised = self.config.get("quantization_config") or {}
        method = quantised.get("quant_method", "fp8")
        if method != "fp8":
            raise ValueError(f"checkpoint: quant_method must be 'fp8' or absent, got {method!r}")
        block = quantised.get("weight_block_size") or (128, 128)
        if len(block) != 2 or not all(isinstance(size, int) and size >= 1 for size in block):
            raise ValueError(f"checkpoint: weight_block_size must be two positive ints, got {block!r}")
        self.block = (block[0], block[1])
        self.files = self._files()
        self.tensors: dict[str, Tensor] = {}
        for file in self.files:
            with _open(file) as shard:
                for name in shard.keys():  # noqa: SIM118  (not a mapping)
                    if name in self.tensors:
                        raise ValueError(f"checkpoint: {name} is in {self.tensors[name].file.name} and {file.name}")
                    header = shard.get_slice(name)
                    self.tensors[name] = Tensor(file, tuple(header.get_shape()), header.get_dtype())

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            named = read_object(index).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
                raise ValueError(f"checkpoint: {index.name} must have a weight_map, tensor to file, got {named!r:.80}")
            files = [self.path / name for name in sorted(set(named.values()))]
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise FileNotFoundError(f"checkpoint: {index.name} names shards that are not there: {missing}")
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"checkpoint: no *.safetensors in {str(self.path)!r}")
        return files

    def read_shard(
        self, file: Path, parts: list[tuple[str, tuple[slice, ...]]], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """The parts of tensors of one shard, one after the other; ``dtype`` is that of dequantised ones."""
        with _open(file) as shard:
            for name, part in parts:
                tensor = shard.get_slice(name)[part]
                yield self._dequantised(name, tensor, part, dtype) if self.tensors[name].dtype == FLOAT8 else tensor

    def _dequantised(
        self, name: str, weight: torch.Tensor, part: tuple[slice, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        # A shard of its own for the scales is allowed; they are small.
        with _open(self.tensors[scale_name(name)].file) as shard:
            scales = shard.get_slice(scale_name(name))[part[:-2]] if part[:-2] else shard.get_tensor(scale_name(name))
        return dequantise(weight, scales, (part[-2].start, part[-1].start), self.block, dtype)

    def scale_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the block scales of this float8 tensor must have."""
        shape = self.tensors[name].shape
        blocks = (-(-size // block) for size, block in zip(shape[-2:], self.block, strict=True))
        return (*shape[:-2], *blocks)
