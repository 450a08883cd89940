"""The layout of NVSHMEM that csrc/wire/nvshmem.h assumes, against the offsets in the headers of its releases."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import nvshmem_layouts
from native_programs import native_build
from places import CSRC, DATA, NATIVE

pytestmark = pytest.mark.once

GOLDEN = sorted((DATA / "nvshmem").glob("*.json"))
# Arguments of functions that the host calls; csrc/wire/nvshmem.h has no tables for them.
ARGUMENTS = ("UniqueId", "UniqueIdArguments", "InitArguments")
# The device state grows from version to version; later fields are not read.
GROWS = "DeviceState"

Numbers = dict[str, "int | list[int]"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return the words of each output line of tests/native/nvshmem_tables.cpp."""
    program = tmp_path_factory.mktemp("tables") / "nvshmem_tables"
    compiler, _ = native_build.find_compiler(native_build.VARIANTS["fast"])
    source = str(NATIVE / "nvshmem_tables.cpp")
    subprocess.run([*compiler, "-std=c++20", "-Werror", f"-I{CSRC}", source, "-o", str(program)], check=True)
    return [line.split() for line in subprocess.check_output([program], text=True).splitlines()]


@pytest.fixture(scope="module")
def ours(said: list[list[str]]) -> Numbers:
    plain = [words for words in said if words[0] != "since"]
    return {name: int(rest[0]) if len(rest) == 1 else list(map(int, rest)) for name, *rest in plain}


@pytest.fixture(scope="module")
def since(said: list[list[str]]) -> dict[str, tuple[int, ...]]:
    return {words[1]: as_numbers(words[2]) for words in said if words[0] == "since"}


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def read(path: Path) -> tuple[tuple[int, ...], Numbers]:
    """Return the version of a golden file, and its numbers without those of arguments."""
    golden = json.loads(path.read_text())
    version = as_numbers(golden.pop("version"))
    del golden["functions"]
    return version, {name: value for name, value in golden.items() if name.partition(".")[0] not in ARGUMENTS}


def test_there_is_a_golden_file_for_each_known_version() -> None:
    assert {path.stem for path in GOLDEN} == set(nvshmem_layouts.KNOWN)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_tables_are_as_in_the_headers(path: Path, ours: Numbers, since: dict[str, tuple[int, ...]]) -> None:
    version, theirs = read(path)
    assert theirs[GROWS] >= ours[GROWS]
    theirs[GROWS] = ours[GROWS]
    assert theirs.items() <= ours.items()
    # Missing fields do not exist yet in this version. Values do not matter: none is read if its field is missing.
    lacking = {name for name in set(ours) - set(theirs) if "." in name}
    assert lacking == {name for name, first in since.items() if version < first}


def test_the_oldest_state_is_what_is_read(ours: Numbers) -> None:
    """Up to 3.6, the host library copies the size of its own state, whatever the size of the symbol."""
    assert ours[GROWS] == min(read(path)[1][GROWS] for path in GOLDEN)


def test_every_field_that_has_a_name_is_compared(ours: Numbers) -> None:
    text = (CSRC / "wire" / "nvshmem.h").read_text()
    for table, body in re.findall(r"^struct (\w+) \{\n(.+?)^\};", text, re.DOTALL | re.MULTILINE):
        named = [name for name in re.findall(r"^ +(?:u8|u16|u32|u64|Key) (\w+)", body, re.MULTILINE)]
        fields = {f"{table}.{name}" for name in named if not name.startswith("unread")}
        assert fields == {name for name in ours if name.startswith(f"{table}.")}


def test_arguments_do_not_differ_by_version() -> None:
    """Therefore the host may fill them without asking for the version; only `device` was added later."""
    found = [json.loads(path.read_text()) for path in GOLDEN]
    for golden in found:
        golden.pop("InitArguments.device", None)
    kept = [{k: v for k, v in golden.items() if k.partition(".")[0] in ARGUMENTS} for golden in found]
    assert all(kept) and all(arguments == kept[0] for arguments in kept)
