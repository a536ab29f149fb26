"""The reference DSA model and its presets."""

from .config import ModelConfig, Yarn, preset
from .dsa import DSAModel
from .nextn import NextN

__all__ = ["DSAModel", "ModelConfig", "NextN", "Yarn", "preset"]
