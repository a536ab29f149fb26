"""The reference DSA model and its presets."""

from .config import ModelConfig, Yarn
from .dsa import DSAModel
from .nextn import NextN
from .presets import preset
from .sharding import Rank

__all__ = ["DSAModel", "ModelConfig", "NextN", "Rank", "Yarn", "preset"]
