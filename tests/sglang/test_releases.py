"""Each SGLang release in a process of its own: the tests in ``inside`` with that release on the path."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .releases import RELEASES, paths

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("release", RELEASES)
def test_release(release: str) -> None:
    found = paths(release)
    if found is None:
        pytest.skip(f"SGLang {release} is not here (python -m tests.sglang.releases fetches it)")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SGLANG_"))}
    env.update(PYTHONPATH=os.pathsep.join(map(str, [*found, ROOT])), OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--show-capture=no",
        "-rs",
    ]
    done = subprocess.run(
        [*command, "tests/sglang/inside"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    print(done.stdout[-12000:], done.stderr[-3000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 10, "most tests of a release were not run"
