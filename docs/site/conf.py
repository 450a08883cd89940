"""Configuration of the documentation site, which `make docs` builds.

The source directory is the root of the repository, so that links between documents hold on the site as they do in the
clone. What a document links to and what is not a page itself (results, sources) becomes a download.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import deep_ep_py  # noqa: E402 - found by the line above

project = "deep_ep_py"
author = "the deep_ep_py authors"
project_copyright = author
version = release = deep_ep_py.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**", "benchmarks/**"]
exclude_patterns = [".*", "build", "out", "csrc", "scripts", "tests", "third_party", "**/.ipynb_checkpoints"]

# GitHub's Markdown: its anchors, and links to lines of a page. Notebooks are committed with their outputs.
myst_heading_anchors = 6
nb_execution_mode = "off"

# Docstrings are numpydoc, with code in single backticks.
default_role = "code"
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
add_module_names = False

html_theme = "furo"
html_title = f"deep_ep_py {version}"
html_extra_path = ["extra"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def is_field_alias(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool:
    """Leave out the fields of named tuples, which the docstrings of their classes describe."""
    return skip or (getattr(member, "__doc__", None) or "").startswith("Alias for field number")


def let_long_code_wrap(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let long names in code wrap after their separators, rather than anywhere; site.css keeps short ones whole."""
    context["body"] = re.sub(
        r'(?<=<span class="pre">)[^<]{25,}',
        lambda name: re.sub(r"(?<=[/_.:=])(?=\w)(?!py\b)", "<wbr>", name[0]),
        context.get("body", ""),
    )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", let_long_code_wrap)
    app.connect("autodoc-skip-member", is_field_alias)
