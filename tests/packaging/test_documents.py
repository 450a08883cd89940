"""The documents: their links lead somewhere, and the commands that they name exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from deep_ep_py.__main__ import _COMMANDS, main
from documents import BLOCK, DOCS, PAGES
from places import ROOT

pytestmark = pytest.mark.once

NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
README_LINES = 250


def without_code(text: str, inline: bool) -> str:
    """Return the text without fenced and indented blocks and, if `inline`, without inline code."""
    text = BLOCK.sub("", text)
    return re.sub(r"`[^`]+`", "", text) if inline else text


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, by GitHub's rules."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code(path.read_text(), inline=False), re.M):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = sum(slug == one or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.append(f"{slug}-{again}" if again else slug)
    return frozenset(found)


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text, inline=True)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield target


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each use of the command line: the command, or "", and the options after it."""
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    lines = [line.split("#")[0] for line in blocks.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    for line in (*lines, *spans):
        for use in re.findall(r"(?:-m deep_ep_py|^ *deep-ep)(?![\w.])([^|;&]*)", line):
            words = use.split()
            name = words[0] if words and not words[0].startswith("-") else ""
            if name != "COMMAND":
                yield name, [word.partition("=")[0] for word in words if word.startswith("-")]


def options(name: str) -> set[str]:
    """Return the options of a command and its subcommands, or those before any command if the name is empty."""
    command: click.Command = importlib.import_module(_COMMANDS[name]).command if name else main
    nested = command.commands.values() if name and isinstance(command, click.Group) else ()
    known = {
        option for each in (command, *nested) for one in each.params for option in (*one.opts, *one.secondary_opts)
    }
    return known | {"-h", "--help"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links(page: Path) -> None:
    assert list(broken_links(page, page.read_text())) == []


def test_a_broken_link_is_found() -> None:
    page = DOCS / "index.md"
    good = "[a](../README.md#install) [b](#start) ![c](../LICENSE) [d](https://example.org/x#y) `[e](none.md)`"
    assert list(broken_links(page, good)) == []
    assert list(broken_links(page, "[a](none.md) [b](usage.md#no-such-heading) [c](#nor-this)")) == [
        "none.md",
        "usage.md#no-such-heading",
        "#nor-this",
    ]


def test_all_documents_are_listed() -> None:
    listed = set(re.findall(r"\]\(([\w./]+\.md)\)", (DOCS / "index.md").read_text()))
    assert {path.name for path in PAGES if path.parent == DOCS} - {"index.md"} <= listed


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands(page: Path) -> None:
    for name, given in commands(page.read_text()):
        assert not name or name in _COMMANDS, f"no such command: {name}"
        assert set(given) <= options(name), f"{name}: no such options"


def test_commands_are_found() -> None:
    used = {name for page in PAGES for name, _ in commands(page.read_text())}
    assert used >= set(_COMMANDS) | {""}
    block = "\n\n    torchrun -m deep_ep_py bench --device cuda \\\n        --nodes 2    # --not\n\n"
    text = f"See{block}`deep-ep doctor\n--json`\n"
    assert list(commands(text)) == [("bench", ["--device", "--nodes"]), ("doctor", ["--json"])]
