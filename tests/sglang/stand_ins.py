"""Makes the SGLang package importable on a machine without a GPU and without the binary packages that it names.

``install()`` once, before anything of sglang. Packages named here import as empty modules whose capitalised names are
classes and whose other names are functions that give back their argument; what SGLang's compile path, breakable graphs
and sparse indexer do on a CPU uses none of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any, ClassVar

ABSENT = {
    "IPython",
    "aiohttp",
    "av",
    "blobfile",
    "compressed_tensors",
    "cuda",
    "cutlass",
    "decord",
    "decord2",
    "deep_gemm",
    "einops",
    "fastapi",
    "flash_mla",
    "flashinfer",
    "gguf",
    "interegular",
    "llguidance",
    "mooncake",
    "nvidia",
    "openai",
    "outlines",
    "partial_json_parser",
    "quack",
    "sentencepiece",
    "sgl_kernel",
    "soundfile",
    "starlette",
    "tokenspeed_mla",
    "torch_memory_saver",
    "torchao",
    "torchcodec",
    "torchvision",
    "triton_kernels",
    "uvicorn",
    "xgrammar",
    "zmq",
}


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _accept(self: Any, *args: Any, **kwargs: Any) -> None:
    """Any constructor or subclass call."""


def _any(cls: type, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _StandIn(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value: Any
        if name == "__version__":
            value = "0"
        elif name[0].isupper():
            body = {
                "__init__": _accept,
                "__init_subclass__": classmethod(_accept),
                "__module__": self.__name__,
                "__get_pydantic_core_schema__": classmethod(_any),
            }
            value = _AnyName(name, (), body)
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.setdefault(full, _StandIn(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Put the stand-ins in place; packages that are installed are found first."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("SGLANG_DISABLE_VERSION_CHECK", "1")
    import transformers.image_utils  # noqa: F401  (asks whether torchvision is there, once: the answer must be no)
    from transformers.models.auto import auto_factory, configuration_auto

    for mapping in (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping):
        _allow_twice(mapping)
    sys.meta_path.append(_Finder())
    for name in ("compilation.weak_ref_tensor", "model_executor.runner_backend_utils.weak_ref_tensor"):
        module = types.ModuleType(f"sglang.srt.{name}")
        module.weak_ref_tensor = module.weak_ref_tensors = lambda value: value  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def _allow_twice(mapping: Any) -> None:
    """SGLang registers models that this transformers knows already."""
    register = mapping.register
    mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)
