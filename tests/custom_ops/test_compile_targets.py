"""Every kernel compiles for sm_90 and sm_100, on a machine with or without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_kernels.py"
SHARED_MEMORY = 227 * 1024  # bytes a block can have on both targets


def compile_kernels(*arguments: str) -> dict:
    root = str(SCRIPT.parent.parent.parent)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": root}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *lines, last = done.stdout.splitlines()
    print(*lines, sep="\n")
    return json.loads(last)


def assert_fine(result: dict) -> None:
    assert result["unlisted"] == [], "jitted functions that no KERNELS list reaches"
    targets: dict[str, set[str]] = {}
    for kernel in result["kernels"]:
        assert kernel["registers"] > 0 and kernel["shared"] <= SHARED_MEMORY, kernel
        targets.setdefault(kernel["kernel"], set()).add(kernel["target"])
    assert len(targets) >= 8 and all(t == {"sm_90", "sm_100"} for t in targets.values()), targets


def test_every_kernel_compiles() -> None:
    assert_fine(compile_kernels("--first"))


@pytest.mark.heavy
def test_every_specialisation_compiles() -> None:
    assert_fine(compile_kernels())
