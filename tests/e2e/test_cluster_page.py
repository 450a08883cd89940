"""The quotes in docs/cluster.md match the code: environment variables, error messages, lines of `doctor`, the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.driver import OWNER_ORDERING, DriverFacts, DriverGpu
from deep_ep_py.tools.doctor.findings import Section
from deep_ep_py.tools.doctor.gpus import gpus
from deep_ep_py.tools.doctor.network import network
from deep_ep_py.tools.doctor.nvshmem import Process
from deep_ep_py.tools.doctor.posting import posting
from deep_ep_py.tools.doctor.visible import visible
from deep_ep_py.transport.nvshmem.settings import ENABLE_IBGDA
from deep_ep_py.transport.topology.matrix import matrix
from machine_trees import roce, two_gpus_and_nics
from places import CSRC, ROOT

pytestmark = pytest.mark.once

PAGE = (ROOT / "docs/cluster.md").read_text()
PACKAGE = ROOT / "deep_ep_py"
READ_BY_OTHERS = {
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
    "NVSHMEM_MAX_MEMORY_PER_GPU",
}
"""Variables that only NVSHMEM reads: the code does not name them."""


def python_texts() -> Iterator[str]:
    """Yield all string literals, with adjacent ones joined; a value in an f-string ends a text."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def native_texts() -> Iterator[str]:
    for path in (*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")):
        joined = re.sub(r'(?<!\\)"\s*\+?\s*"', "", path.read_text())
        yield from (text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined))


TEXTS = "\n".join((*python_texts(), *native_texts()))


def test_environment_variables_exist() -> None:
    named = set(re.findall(r"\b(?:NVSHMEM|DEEP_EP|GLOO|LOCAL)_[A-Z0-9_]*[A-Z0-9]\b", PAGE))
    assert len(named) > 15
    assert {name for name in named if not re.search(rf"\b{name}\b", TEXTS)} == READ_BY_OTHERS


def quoted_errors() -> list[str]:
    section = PAGE.split("## When something goes wrong")[1]
    heads = re.findall(r"^\* (`[^`]+`(?:, `[^`]+`)*):", section, re.M)
    assert len(heads) == section.count("\n* ")
    return [" ".join(text.split()) for head in heads for text in re.findall(r"`([^`]+)`", head)]


@pytest.mark.parametrize("error", quoted_errors())
def test_errors_are_raised_somewhere(error: str) -> None:
    pieces = [piece.strip() for piece in error.split("...")]
    assert max(map(len, pieces)) > 20
    assert [piece for piece in pieces if piece not in TEXTS] == []


def reported(root: Path, environment: dict[str, str]) -> set[str]:
    """Return verdict, name and value of all findings on a machine whose driver answers."""
    of_gpu = tuple(DriverGpu("NVIDIA H100 80GB HBM3", address, True, OWNER_ORDERING, True, False) for address in "01")
    both = frozenset({(0, 1), (1, 0)})
    facts = DriverFacts("13.0", of_gpu, both, both)
    files, process = Files(root), Process(environment, "nvidia-nvshmem-cu13 3.4.5")
    sections = [
        gpus(files, process),
        visible(2, lambda: facts),
        network(files, process),
        Section.of("Paths", posting(files, environment, True, lambda: facts)),
    ]
    return {f"{one.verdict.value} {one.name} {one.value}" for section in sections for one in section.findings}


def test_lines_of_doctor(tmp_path: Path) -> None:
    lines = {" ".join(line.split()) for line in re.findall(r"^ {6}(?:good|warning|info|error) .*", PAGE, re.M)}
    assert len(lines) > 12
    said = set()
    for name, make in (("infiniband", two_gpus_and_nics), ("roce", roce)):
        make(tmp_path / name)
        said |= reported(tmp_path / name, {ENABLE_IBGDA: "1"})
    assert lines - said == set()


def test_the_table_of_paths() -> None:
    routes = [["peer" if one // 8 == other // 8 else "ibgda" for other in range(16)] for one in range(16)]
    table = matrix(routes, [("node0", range(8)), ("node1", range(8, 16))], 78)
    shown = PAGE.split("should be this:\n\n")[1].split("\n\n")[0].splitlines()
    assert [line[4:] for line in shown if line.strip() != "..."] == [*table[:4], table[10], *table[17:]]
