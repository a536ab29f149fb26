"""Triton kernels that a model launches itself are part of its pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_kernels_of_the_model_are_in_pieces_and_what_they_write_is_known() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.sparse_pcg.triton_kernel_model"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] == [True, True, True]
    assert found["kinds"] == ["piece", "cut"] * 4 + ["piece"]
    assert found["kernels"][:8:2] == [2, 2, 2, 1]  # the sum and the kernel
    # Only what it writes, not what it reads. Two layers are alike: a launch's constants count, its number does not.
    assert [name for name in found["written"] if "total" in name] == found["written"] != []
    assert found["distinct"] == 4
