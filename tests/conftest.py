"""Test settings: the Triton interpreter where no GPU is, fixed seeds, few hypothesis examples by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: before any module with kernels

import hypothesis
import pytest

if not torch.cuda.is_available():
    from tests.interpreter_casts import repair

    repair()

# Workers side by side have a core each; threads that wait for one another would take it from the others.
if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)
elif not os.environ.get("OMP_NUM_THREADS"):
    torch.set_num_threads(min(2, os.cpu_count() or 1))

_CI = bool(os.environ.get("CI"))
hypothesis.settings.register_profile("default", deadline=None, max_examples=12, derandomize=_CI)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextmanager
def _nothing_kept() -> Iterator[None]:
    import sparse_pcg

    torch._dynamo.reset()
    sparse_pcg.reset()
    yield
    sparse_pcg.reset()
    torch._dynamo.reset()


@pytest.fixture(name="fresh")
def without_what_was_compiled() -> Iterator[None]:
    """Neither Dynamo nor the backend keeps anything from before the test, nor from it."""
    with _nothing_kept():
        yield


@pytest.fixture(name="fresh_module", scope="module")
def without_what_was_compiled_before_the_module() -> Iterator[None]:
    """As ``fresh``, for what the tests of a module share."""
    with _nothing_kept():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
