"""What is installed here, who serves each operator and why, how SGLang would be served, and known bad combinations."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

import custom_ops
from custom_ops._register import OPS

PACKAGES = (
    "sparse-pcg",
    "torch",
    "triton",
    "numpy",
    "flashinfer-python",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "transformers",
    "safetensors",
    "prometheus-client",
    "sglang",
)
LEAST_TORCH, LEAST_TRITON = (2, 11), (3, 6)


@dataclass(frozen=True)
class Complaint:
    """Something known not to work. serious: captures or results are at stake; else it only costs time or features."""

    serious: bool
    what: str
    fix: str


@dataclass(frozen=True)
class Choice:
    """Who serves an operator's device tensors: tried holds (provider, usable, reason why not), in order."""

    op: str
    chosen: str
    reason: str
    tried: list[tuple[str, bool, str]]


@dataclass
class Diagnosis:
    """What ``diagnose`` found. ``ok``: no serious complaint. ``str()`` gives the text."""

    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    providers: list[Choice] = field(default_factory=list)
    sglang: str = ""
    complaints: list[Complaint] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing serious was found."""
        return not any(c.serious for c in self.complaints)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = ["versions:", *(f"  {k:18} {v}" for k, v in self.versions.items())]
        lines += ["", "GPU:", *(f"  {g}" for g in self.gpus or ["none: graphs are emulated on the CPU"])]
        lines += ["", "providers:"]
        for choice in self.providers:
            lines.append(f"  {choice.op:26} {choice.chosen:12} {choice.reason}")
            lines += [f"  {'':26}   not {name}: {why}" for name, usable, why in choice.tried if not usable]
        lines += ["", f"SGLang: {self.sglang}", "", "known bad combinations:"]
        lines += [f"  {'PROBLEM' if c.serious else 'note'}: {c.what}\n    fix: {c.fix}" for c in self.complaints] or [
            "  none found"
        ]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this process and this machine. Starts no kernel and changes nothing."""
    result = Diagnosis(versions=_versions(), gpus=_gpus(), sglang=_sglang())
    result.providers = [_choice(name) for name in sorted(OPS)]
    result.complaints = [c for look in _LOOKS for c in look()]
    return result


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= {name: _version(name) or "not installed" for name in PACKAGES}
    found["torch"] = torch.__version__  # says which build it is
    found["CUDA of torch"] = torch.version.cuda or "none (a CPU build)"
    return found


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        memory = p.total_memory / (1 << 30)
        gpus.append(f"{i}: {p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {memory:.0f} GiB")
    return gpus


def _choice(name: str) -> Choice:
    tried = [(provider, usable, why or "") for provider, usable, why in custom_ops.providers_of(name)]
    variable = f"SPARSE_PCG_{name.upper()}"
    forced = os.environ.get(variable)
    if forced:
        return Choice(name, forced, f"forced by {variable}", tried)
    if not torch.cuda.is_available():
        return Choice(name, "reference", "serves CPU tensors; with a GPU: " + _first(name, tried), tried)
    return Choice(name, _first(name, tried), "the first preferred one that runs here (shapes may say otherwise)", tried)


def _first(name: str, tried: list[tuple[str, bool, str]]) -> str:
    preferred = (*OPS[name].preference, "reference")
    return next((p for p, usable, _ in tried if usable and p in preferred), "reference")


def _sglang() -> str:
    installed = _version("sglang")
    if installed is None:
        return "not installed"
    try:
        from .integrations import sglang as plugin
    except ImportError:
        return f"{installed}; this build has no plug-in for it"
    if os.environ.get("SPARSE_PCG_SGLANG", "1").strip().lower() in ("0", "false", "no", "off"):
        return f"{installed}; left as it is (SPARSE_PCG_SGLANG is off)"
    if not plugin.is_known(installed):
        known = f"{'.'.join(map(str, plugin.FIRST))} to {'.'.join(map(str, plugin.LAST))}"
        return f"{installed}: an unknown release, left as it is (known: {known})"
    return (
        f"{installed}: served where its prefill graphs are tc_piecewise (compiled pieces; 0.5.13: piecewise) or "
        "breakable (recorded pieces); any other is left as it is"
    )


# Known bad combinations, each a function that looks and complains.


def _torch_release() -> tuple[int, ...]:
    return tuple(
        int("".join(filter(str.isdigit, part)) or 0) for part in torch.__version__.split("+")[0].split(".")[:2]
    )


def _old_versions() -> list[Complaint]:
    found = []
    if _torch_release() < LEAST_TORCH:
        found.append(Complaint(True, f"torch {torch.__version__} is older than 2.11", "install torch 2.11 or newer"))
    triton = _version("triton")
    if triton is None:
        found.append(Complaint(True, "triton is not installed: no operator has a kernel", "pip install triton"))
    elif tuple(int(p) for p in triton.split(".")[:2] if p.isdigit()) < LEAST_TRITON:
        found.append(Complaint(True, f"triton {triton} is older than 3.6", "install the triton that torch asks for"))
    return found


def _untested_torch() -> list[Complaint]:
    from .inductor_fixes import TRUSTED_VERSIONS, ensure_supported

    if _torch_release() in TRUSTED_VERSIONS or _torch_release() < LEAST_TORCH:
        return []
    what = f"torch {torch.__version__} is none of those that the compiler repairs were tested with"
    try:
        ensure_supported()
    except Exception as error:
        return [Complaint(True, f"{what}, and their self-test fails: {error}", "use compiler='eager' or another torch")]
    return [Complaint(False, f"{what}; their self-test passes", "nothing to do")]


def _cpu_torch_beside_a_gpu() -> list[Complaint]:
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return [Complaint(True, "a GPU driver is here, but torch is a CPU build", "install a CUDA build of torch")]
    if torch.version.cuda is not None and not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        return [Complaint(True, "torch finds no GPU although a driver is here", "compare driver and CUDA of torch")]
    return []


def _interpreter() -> list[Complaint]:
    if os.environ.get("TRITON_INTERPRET") == "1" and torch.cuda.is_available():
        return [Complaint(True, "TRITON_INTERPRET=1: kernels run in Python, and no capture holds them", "unset it")]
    return []


def _blocking_launches() -> list[Complaint]:
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return [Complaint(True, "CUDA_LAUNCH_BLOCKING=1: a capture fails at its first launch", "unset it")]
    return []


def _allocator() -> list[Complaint]:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
        return [Complaint(True, "PYTORCH_NO_CUDA_MEMORY_CACHING=1: graphs have no pool to allocate from", "unset it")]
    return []


def _caches_off() -> list[Complaint]:
    if os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        what = "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1: every start compiles every distinct piece again"
        return [Complaint(False, what, "unset it unless that is what you want")]
    return []


def _old_kernels() -> list[Complaint]:
    least = {"flashinfer-python": (0, 6, 14), "sgl-deep-gemm": (0, 1, 4), "sgl-flash-mla": (1, 0, 0)}
    found = []
    for name, version in least.items():
        installed = _version(name)
        parts = tuple(int(p) for p in (installed or "").split(".")[:3] if p.isdigit())
        if installed is not None and parts < version:
            wanted = ".".join(map(str, version))
            found.append(Complaint(False, f"{name} {installed} is older than {wanted}", f"install {name}>={wanted}"))
    return found


def _compute_capability() -> list[Complaint]:
    if not torch.cuda.is_available():
        return []
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) >= (9, 0):
        return []
    what = f"sm_{major}{minor} has no float8 tensor cores of the kind the kernels are written for (sm_90 and later)"
    return [Complaint(True, what, "use SPARSE_PCG_<OP>=reference, or a newer GPU")]


_LOOKS: tuple[Callable[[], list[Complaint]], ...] = (
    _old_versions,
    _untested_torch,
    _cpu_torch_beside_a_gpu,
    _interpreter,
    _blocking_launches,
    _allocator,
    _caches_off,
    _old_kernels,
    _compute_capability,
)
