"""What ``run.sh`` found, as JSON: machine, versions, commit, command, how many tests of each file came out how."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from sparse_pcg.bench.timing import provenance, write_json

_KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def summary(*reports: Path) -> dict[str, Any]:
    """Counts in all and by test file, the tests that failed, and the reasons of those skipped, of JUnit reports."""
    files: dict[str, Counter[str]] = {}
    failed: list[str] = []
    reasons: Counter[str] = Counter()
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        came_out = next((c for c in case if c.tag in _KINDS), None)
        kind = _KINDS[came_out.tag] if came_out is not None else "passed"
        file = "/".join(case.get("classname", "").split(".")) + ".py"
        files.setdefault(file, Counter())[kind] += 1
        if kind == "failed":
            failed.append(f"{file}::{case.get('name')}")
        elif kind == "skipped" and came_out is not None:
            reasons[came_out.get("message", "")] += 1
    total = Counter(dict.fromkeys(("passed", "failed", "skipped"), 0))
    for counts in files.values():
        total.update(counts)
    result = {**total, "failures": failed, "skipped_because": dict(reasons)}
    return {**result, "files": {name: dict(counts) for name, counts in sorted(files.items())}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    head = {**provenance(), "command": "bash tests/gpu/run.sh OUT_DIR"}
    statuses = {"tests_exit_status": int(sys.argv[2]), "demo_exit_status": int(sys.argv[3])}
    result = {"bench": "tests", **head, **statuses, **summary(folder / "tests.xml", folder / "alone.xml")}
    write_json(folder / "tests.json", result)
    print({name: result[name] for name in ("passed", "failed", "skipped")})
