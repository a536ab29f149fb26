"""Which parts of a prefill are captured here: deployments where capture does not hold, and the kill switches.

Each feature is on, or off with a reason. Off means that the composite stays whole and is a cut, that the draft runs
uncaptured, or that no short graphs are made.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from .counters import COUNTS, say_once
from .options import Options

ATTENTION, INDEXER, DRAFT, SHORT = FEATURES = (
    "attn_in_graph",
    "indexer_prep_in_graph",
    "draft_in_graph",
    "short_graphs",
)
# The composites that stay whole where a feature is off.
_COMPOSITES = {
    ATTENTION: ("mla_attention",),
    INDEXER: ("indexer_prefill", "k_cache_and_topk_result"),
}
# The same switches by the names that SGLang's users know; they count where SGLang is loaded.
_SGLANG = {
    ATTENTION: "SGLANG_ENABLE_DSA_PREFILL_ATTN_IN_CUDA_GRAPH",
    INDEXER: "SGLANG_ENABLE_DSA_PREFILL_INDEXER_PREP_IN_CUDA_GRAPH",
    DRAFT: "SGLANG_ENABLE_NEXTN_DRAFT_PREFILL_CUDA_GRAPH",
}
_WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


@dataclass(frozen=True)
class Deployment:
    """How the model is served, as far as captured prefill depends on it.

    dcp, prefill_cp: ranks of decode and of prefill context parallelism. pp: pipeline stages. dp_attention,
    two_batch_overlap, hisparse, page_sharded_kv, indexer_lora: whether these are in use. kpool: indexer keys pooled
    together (1: none). layer_kv_loader: what loads KV layer by layer during a forward (a name for the log), or None.

    Raises ValueError naming the field for a number below 1 or a value of another type.
    """

    dcp: int = 1
    dp_attention: bool = False
    prefill_cp: int = 1
    pp: int = 1
    hisparse: bool = False
    kpool: int = 1
    two_batch_overlap: bool = False
    page_sharded_kv: bool = False
    layer_kv_loader: str | None = None
    indexer_lora: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                good, expected = isinstance(value, bool), "True or False"
            elif isinstance(field.default, int):
                good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
                expected = "an int of at least 1"
            else:
                good, expected = value is None or (isinstance(value, str) and bool(value)), "a name or None"
            if not good:
                raise ValueError(f"deployment: {field.name} must be {expected}, got {value!r}")

    def objections(self) -> list[str]:
        """What in this deployment speaks against any capture; empty where nothing does."""
        found = {
            f"decode context parallelism ({self.dcp} ranks)": self.dcp > 1,
            "data-parallel attention": self.dp_attention,
            f"prefill context parallelism ({self.prefill_cp} ranks)": self.prefill_cp > 1,
            "hierarchical sparse attention (hisparse)": self.hisparse,
            f"pooled indexer keys ({self.kpool} tokens)": self.kpool > 1,
            "two-batch overlap": self.two_batch_overlap,
            "page-sharded KV": self.page_sharded_kv,
            f"KV loaded layer by layer ({self.layer_kv_loader})": self.layer_kv_loader is not None,
            "LoRA on the indexer": self.indexer_lora,
        }
        return [reason for reason, holds in found.items() if holds]


class Gate(NamedTuple):
    """Whether a feature is on; if not, why."""

    feature: str
    on: bool
    reason: str


class Gates(tuple[Gate, ...]):
    """One ``Gate`` per feature, in the order of ``FEATURES``."""

    def on(self, feature: str) -> bool:
        """Whether the feature is on."""
        return next(gate.on for gate in self if gate.feature == feature)

    @property
    def whole(self) -> frozenset[str]:
        """Names of the composites that stay whole."""
        off = [gate.feature for gate in self if not gate.on]
        return frozenset(name for feature in off for name in _COMPOSITES.get(feature, ()))

    def record(self, *features: str) -> None:
        """Count one batch that was served without each of these features that is off (``gate:<feature>``)."""
        for gate in self:
            if not gate.on and gate.feature in features:
                COUNTS.fallbacks[f"gate:{gate.feature}"] += 1


def _switch(name: str) -> bool:
    """Whether the environment leaves a feature on. Raises ValueError for a value that says neither."""
    given = os.environ.get(name, "1")
    if given.strip().lower() not in _WORDS:
        raise ValueError(f"{name}: must be one of {', '.join(_WORDS)}, got {given!r}")
    return _WORDS[given.strip().lower()]


def _killed(feature: str) -> str:
    names = [f"SPARSE_PCG_{feature.upper()}"]
    if "sglang" in sys.modules and feature in _SGLANG:
        names.append(_SGLANG[feature])
    return ", ".join(f"{name}={os.environ[name]}" for name in names if not _switch(name))


def decide(deployment: Deployment, options: Options, device: torch.device) -> Gates:
    """The gates of a runner. Each reason is logged once."""
    common = deployment.objections()
    if options.graphs == "off":
        common.append("option graphs='off'")
    elif device.type not in ("cuda", "cpu"):
        common.append(f"no graphs on device {device.type!r}")
    reasons: dict[str, str] = {}
    for feature in FEATURES:
        found = [*common, *filter(None, [_killed(feature)])]
        if feature == INDEXER and reasons[ATTENTION]:
            found.append("attention is not in the graph")
        if feature == DRAFT and deployment.pp > 1:
            found.append(f"pipeline parallelism ({deployment.pp} stages)")
        if feature == SHORT:
            found += ["option short_graphs=False"] if not options.short_graphs else []
            found += ["the indexer is not in the graph"] if reasons[INDEXER] else []
        reasons[feature] = "; ".join(found)
    for feature, reason in reasons.items():
        if reason:
            say_once(f"gate:{feature}:{reason}", "%s is off: %s", feature, reason)
    return Gates(Gate(feature, not reason, reason) for feature, reason in reasons.items())
