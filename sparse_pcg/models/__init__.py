"""The reference DSA model and its presets."""

from .config import ModelConfig, Yarn, preset
from .dsa import DSAModel

__all__ = ["DSAModel", "ModelConfig", "Yarn", "preset"]
