"""The SGLang releases that the plug-in is tested with, fetched once into a folder beside the virtual environment.

``python -m tests.sglang.releases`` fetches what is missing: each wheel alone, without what it depends on, and the few
small packages that its modules import. What it cannot fetch it names, and the tests of that release are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RELEASES = ("0.5.13.post1", "0.5.14", "0.5.17", "0.5.19", "0.5.23")
SMALL = (
    "pydantic>=2.12,<3", "orjson", "pybase64", "apache-tvm-ffi==0.1.15.post2", "dill", "traitlets", "msgspec", "psutil",
    "pyzmq", "requests", "setproctitle", "sniffio", "pillow",
)  # fmt: skip
# SGLang's wheels are built for one Python; its pure-Python modules run on any.
PLATFORM = (
    "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--platform=manylinux_2_34_x86_64",
)  # fmt: skip


def folder() -> Path:
    """Where the releases lie: ``SPARSE_PCG_SGLANG_RELEASES``, or ``sglang-releases`` in the virtual environment."""
    return Path(os.environ.get("SPARSE_PCG_SGLANG_RELEASES") or Path(sys.prefix) / "sglang-releases")


def paths(release: str) -> list[Path] | None:
    """What goes on the path for a release, or None where it was not fetched."""
    found = [folder() / release, folder() / "small"]
    return found if all((path / ".complete").exists() for path in found) else None


def _install(name: str, *what: str) -> str | None:
    """Install into a folder of its own; gives what went wrong, or None."""
    target = folder() / name
    if (target / ".complete").exists():
        return None
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(target), *what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:
        return f"{name}: not fetched within 150 s"
    if done.returncode:
        return f"{name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    (target / ".complete").touch()
    return None


def fetch() -> list[str]:
    """Fetch what is missing, all at once; gives what went wrong."""
    wanted = [("small", *SMALL)] + [(r, "--no-deps", *PLATFORM, f"sglang=={r}") for r in RELEASES]
    with ThreadPoolExecutor(len(wanted)) as pool:
        return [problem for problem in pool.map(lambda one: _install(*one), wanted) if problem]


if __name__ == "__main__":
    for problem in fetch():
        print("not fetched:", problem)
    print("SGLang releases to test with:", ", ".join(r for r in RELEASES if paths(r)) or "none")
