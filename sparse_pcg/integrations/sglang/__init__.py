"""The plug-in that SGLang loads (entry-point group ``sglang.srt.plugins``).

Installing the package and choosing SGLang's own flag is all there is to do; ``SPARSE_PCG_SGLANG=0`` leaves SGLang as it
is. ``activate`` only registers a hook on SGLang's choice of a prefill graph backend (on 0.5.13, on its construction of
a runner): nothing else of SGLang is touched until a server builds prefill graphs.
"""

from __future__ import annotations

import logging
import os
import re

logger = logging.getLogger("sparse_pcg")

FIRST, LAST = (0, 5, 13), (0, 5, 23)


def release_of(version: str) -> tuple[int, ...] | None:
    """(0, 5, 17) for "0.5.17" or "0.5.17.post1"; None where it is not a version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else None


def is_known(version: str) -> bool:
    """Whether this release's graph code is one that the plug-in was written for."""
    release = release_of(version)
    return release is not None and FIRST <= release <= LAST


def activate() -> None:
    """What SGLang calls in each of its processes. Never raises: SGLang runs as it was where this cannot."""
    if os.environ.get("SPARSE_PCG_SGLANG", "1").strip().lower() in ("0", "false", "no", "off"):
        logger.info("sparse_pcg: off (SPARSE_PCG_SGLANG)")
        return
    from importlib.metadata import version

    installed = version("sglang")
    if not is_known(installed):
        known = f"{'.'.join(map(str, FIRST))} to {'.'.join(map(str, LAST))}"
        logger.warning("sparse_pcg: SGLang %s is not one of the known releases (%s): left as it is", installed, known)
        return
    from .hooks import register

    register(installed)
