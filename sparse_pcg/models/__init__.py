"""The reference DSA model and its presets."""

from .config import ModelConfig, Yarn
from .dsa import DSAModel
from .hf_config import config_from_hf
from .nextn import NextN
from .presets import preset
from .sharding import Rank
from .weights import load_model, load_nextn

__all__ = [
    "DSAModel",
    "ModelConfig",
    "NextN",
    "Rank",
    "Yarn",
    "config_from_hf",
    "load_model",
    "load_nextn",
    "preset",
]
