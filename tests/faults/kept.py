"""The file of kept results: the matrix and the figures, each replaced by its own run.

Owns: the file's form, one result a line, so that a change of one reads as one.
Must not know: what a result says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    """What is kept; nothing yet is nothing."""
    if not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def keep(path: Path, name: str, value: Any) -> None:
    """Replace one part of what is kept."""
    kept = {**load(path), name: value}
    path.write_text(_lines(kept, "") + "\n", encoding="utf-8")


def _lines(value: Any, indent: str, depth: int = 0) -> str:
    """JSON whose outer levels have a line for each member."""
    inner = indent + " "
    if depth < 2 and isinstance(value, dict) and value:
        members = (
            f"{inner}{json.dumps(key)}: {_lines(one, inner, depth + 1)}"
            for key, one in value.items()
        )
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        members = (inner + json.dumps(one, ensure_ascii=False) for one in value)
        return "[\n" + ",\n".join(members) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
