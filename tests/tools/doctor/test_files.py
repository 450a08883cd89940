"""Where `doctor` looks for the files of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deep_ep_py.base.machine_files import Files
from machine_trees import Tree

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("link", "target", "resolved"),
    [
        ("/sys/there", "/sys/devices/a", "/sys/devices/a"),
        ("/sys/there", "devices/a", "/sys/devices/a"),
        ("/sys/class/there", "../devices/a", "/sys/devices/a"),
        ("/sys/there", "../../../../sys/devices/a", "/sys/devices/a"),
        ("/there", "/sys/devices/../devices/./a", "/sys/devices/a"),
    ],
)
def test_links_stay_within_the_root(tmp_path: Path, link: str, target: str, resolved: str) -> None:
    tree, files = Tree(tmp_path), Files(tmp_path)
    tree.file("/sys/devices/a/name", "of the copy\n")
    place = tmp_path / link.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    assert files.resolved(link) == resolved
    assert files.text(f"{link}/name") == "of the copy" and files.names(link) == ["name"]


def test_a_copy_shows_nothing_of_this_machine(tmp_path: Path) -> None:
    """An absolute link must be resolved inside the copy, not on this machine."""
    (tmp_path / "secret").write_text("of this machine")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "link").symlink_to(tmp_path / "secret")
    (copy / "chain").symlink_to("link")
    files = Files(copy)
    for name in ("link", "chain"):
        assert files.text(f"/{name}") is None and not files.exists(f"/{name}")


def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("/other")
    (tmp_path / "other").symlink_to("one")
    files = Files(tmp_path)
    assert files.path("/one/file") is None and files.text("/one/file") is None
    assert files.names("/one") == [] and not files.exists("/one") and files.resolved("/one") == "/one"


def test_pipes_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert Files(tmp_path).text("/pipe") is None
