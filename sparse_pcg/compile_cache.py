"""A cache directory of our own for what Inductor compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_ENV = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def cache_path(version: str) -> str:
    """The directory of this process: below the user's Inductor cache, one per ``version`` and rank."""
    base = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    name = f"sparse_pcg-{version}-rank{_rank()}"
    return base if os.path.basename(base) == name else os.path.join(base, name)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or 0)


@contextmanager
def cache_dir(version: str) -> Iterator[str]:
    """Inside the block Inductor and Triton read and write ``cache_path(version)``; nests.

    Inductor's caches in memory need no reset: they are keyed by the content of generated code. Loaded
    artifacts keep their libraries open and work after the block. Both variables are put back, also where
    PyTorch set them.
    """
    path = cache_path(version)
    before = {name: os.environ.get(name) for name in _ENV}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = path
    os.environ["TRITON_CACHE_DIR"] = os.path.join(path, "triton")
    try:
        yield path
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
