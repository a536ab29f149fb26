"""The tests in ``inside`` run in a process of their own with a SGLang release on its path."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("sglang") else ["inside"]
