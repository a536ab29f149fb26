"""What mkdocs calls while it builds: the tables of measured results come from docs/results/*.json as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_FACTS = ("bench", "machine", "device", "versions", "commit", "command", "tests", "note", "notes")
_LONG = ("kernels", "log")  # in the files only


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Put the tables where a page says RESULTS."""
    return markdown.replace("RESULTS", tables(RESULTS)) if page.file.src_path == "comparison.md" else markdown


def tables(folder: Path) -> str:
    """Markdown of every result file: its facts, then each list of records as a table."""
    parts = []
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text())
        parts.append(f"## {path.stem.replace('-', ' ').replace('_', ' ')}\n")
        facts = [f"- {key}: {_text(data[key])}" for key in _FACTS if isinstance(data, dict) and key in data]
        parts.append("\n".join(facts) + "\n")
        parts += _sections(data, "")
    return "\n".join(parts)


def _sections(value: Any, title: str) -> list[str]:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return [f"### {title}\n", _table(value)] if title else [_table(value)]
    if isinstance(value, dict) and len(value) > 1 and all(_is_record(v) for v in value.values()):
        return [f"### {title}\n", _table([{"": name, **record} for name, record in value.items()])]
    if isinstance(value, dict):
        records = [_sections(v, f"{title} {k}".strip()) for k, v in value.items() if k not in _FACTS]
        scalars = {k: v for k, v in value.items() if k not in _FACTS and not isinstance(v, (dict, list))}
        head = [f"### {title}\n"] if title and scalars else []
        head += [_table([scalars])] if scalars else []
        return head + [line for section in records for line in section]
    return []


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(v, (dict, list)) for v in value.values())


def _table(rows: list[dict[str, Any]]) -> str:
    columns = [c for c in dict.fromkeys(key for row in rows for key in row) if c not in _LONG]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_text(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
