"""The documents, and the code in them."""

from __future__ import annotations

import re

from places import ROOT

DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(?s:.*?)^```$|(?:(?<=\n\n)|\A) {4,}.*(?:\n+ {4,}.*)*", re.M)
"""A fenced or an indented block of code."""


def snippet(marker: str) -> str:
    """Return the only Python example in all documents that contains `marker`."""
    examples = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]
    (found,) = [code for code in examples if marker in code]
    return found
