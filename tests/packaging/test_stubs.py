"""The type stubs of the extension match its contents."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import stubs
from deep_ep_py.base.native import WARP_SIZE

pytestmark = [
    pytest.mark.skipif(WARP_SIZE != 32, reason="the interpreter of PTX is in the others"),
    pytest.mark.skipif(
        importlib.util.find_spec("pybind11_stubgen") is None, reason="pybind11-stubgen is not installed"
    ),
]


def test_stubs_are_current(tmp_path: Path) -> None:
    """`make stubs` has been run since the last change of the bindings."""
    written = stubs.write_stubs(tmp_path)
    assert {path.name for path in written} == {path.name for path in stubs.FOLDER.glob("*.pyi")}
    for path in written:
        assert path.read_text() == (stubs.FOLDER / path.name).read_text(), path.name
