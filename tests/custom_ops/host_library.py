"""A kernel in CUDA C++ as a library of the host, built by g++ (cuda_host.h)."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.custom_ops import strategies as s

_HERE = Path(__file__).parent
# Fibers jump between stacks, which checked library functions take for an error.
_OPTIONS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", f"-I{_HERE.parent.parent}")
_CALLED = {"--fmad=false": "-ffp-contract=off"}  # by NVRTC and by g++

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or s.DEVICE != "cpu",
    reason="needs g++ and tensors of the CPU",
)


@functools.cache
def host_library(source: str, *options: str) -> ctypes.CDLL:
    """The library of a file beside this one; options: as NVRTC is given."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/host.so"
        command = ["g++", *_OPTIONS, *(_CALLED.get(option, option) for option in options)]
        command += ["-o", target, str(_HERE / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return ctypes.CDLL(target)
