"""The documentation site: its navigation, its API reference, its notebook, its first program, and its pictures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import deep_ep_py as deep_ep
from deep_ep_py import errors, moe, ops, testing
from places import ROOT, python_path

pytestmark = pytest.mark.once

DOCS = ROOT / "docs"
SITE = DOCS / "site"
NAVIGATION = SITE / "index.md"
NOTEBOOK = DOCS / "notebooks" / "first_steps.ipynb"
PICTURES = DOCS / "pictures"
SUFFIXES = (".md", ".rst", ".ipynb")
NEEDED = ("sphinx", "furo", "myst_nb", "numpydoc")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

EACH_CELL = """
import contextlib, io, json, sys

names = {"__name__": "__main__"}
printed = []
for cell in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(cell, "<cell>", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""
"""Executes the code cells that it reads, and prints what each has printed."""


def run_python(*arguments: str | Path, **options: Any) -> str:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    environment.pop("DEEP_EP_SEED", None)
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def listed() -> list[str]:
    """Return the pages in the navigation, relative to docs/site and without suffix."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```$", NAVIGATION.read_text(), re.S | re.M)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [path for path in DOCS.rglob("*") if path.suffix in SUFFIXES and path != NAVIGATION]
    pages += [*ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    assert sorted(listed()) == sorted(os.path.relpath(path.with_suffix(""), SITE) for path in pages)


def test_the_reference_has_all_of_a_buffer() -> None:
    text = (SITE / "api" / "buffer.rst").read_text()
    documented = re.findall(r"^\.\. auto(?:method|property):: Buffer\.(\w+)$", text, re.M)
    public = {name for name in dir(deep_ep.Buffer) if not name.startswith("_")} - {"num_sms"}
    assert sorted(documented) == sorted(public)


@pytest.mark.parametrize("module", [deep_ep, errors, ops, moe, testing])
def test_the_reference_has_every_public_name(module: ModuleType) -> None:
    text = "".join(path.read_text() for path in sorted((SITE / "api").glob("*.rst")))
    if re.search(rf"automodule:: {re.escape(module.__name__)}\n   :members:$", text, re.M):
        return  # all names of its __all__
    names = getattr(module, "__all__", [name for name in dir(module) if name.endswith(("Error", "Timeout", "Failed"))])
    constants = {"__version__", "topk_idx_t", "DEFAULT_FREEZE"}
    assert [name for name in names if name not in constants and not re.search(rf"\b{name}\b", text)] == []


def test_the_notebook_prints_what_it_shows() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    stored = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]
    assert len(NOTEBOOK.read_bytes()) < 50_000
    assert sum(map(bool, stored)) >= 5
    printed = run_python("-c", EACH_CELL, input=json.dumps(["".join(cell["source"]) for cell in cells]))
    assert json.loads(printed) == stored


def test_the_first_program_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(# python first\.py\n.*?)```", page, re.S)
    (tmp_path / "first.py").write_text(code)
    printed = run_python(tmp_path / "first.py").splitlines()
    shown = re.findall(r"^    (rank \d: sent .*|correct)$", page, re.M)
    assert len(shown) == 5 and printed == shown


@pytest.mark.thorough
def test_the_pictures_are_drawn_and_shown(tmp_path: Path) -> None:
    run_python(DOCS / "pictures.py", "--folder", tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    committed = sorted(PICTURES.glob("*.svg"))
    assert drawn == {path.name for path in committed}
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\w+\.svg)\)", (DOCS / "concepts.md").read_text())
    assert sorted(shown) == sorted(drawn)
    for path in committed:
        assert path.stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (`make docs` installs them)")
@pytest.mark.thorough
def test_the_site_is_built_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    strict = ("--quiet", "--fail-on-warning", "--keep-going")
    run_python("-m", "sphinx", *strict, "--conf-dir", SITE, "--doctree-dir", tmp_path / "trees", ROOT, site)
    assert (site / "index.html").exists()
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']([^\"']+)", page.read_text())
        assert [one for one in loaded if re.match(r"(?:\w+:)?//", one)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style
