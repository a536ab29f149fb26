"""One SGLang release in this process, importable and able to capture on a CPU."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("SGLANG_CACHE_DIR", tempfile.mkdtemp(prefix="sglang"))

from . import harness

harness.prepare()
