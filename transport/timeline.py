"""A timeline as one HTML file that needs nothing else.

Owns: putting the model into the page.
Must not know: what the model means, or how the page draws it.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

DATA = "/*DATA*/"
TITLE = "<!--TITLE-->"
SUMMARY = "<!--SUMMARY-->"


def page(document: dict[str, Any]) -> str:
    """The whole file."""
    template = (files("transport") / "assets" / "timeline.html").read_text(encoding="utf-8")
    # Nothing in the data can end the script element that holds it.
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    lines = "".join(f"<li>{escape(line)}</li>" for line in document["summary"])
    return (
        template.replace(TITLE, escape(document["title"]))
        .replace(SUMMARY, lines)
        .replace(DATA, data)
    )
