"""The cluster tests in `tests/transport/multinode`, with a launcher for each of two nodes on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launches import shared_memory, torchrun_nodes

pytestmark = pytest.mark.once

NODES, RANKS_PER_NODE = 2, 4


@pytest.mark.thorough
def test_all_pass_on_two_nodes(tmp_path: Path) -> None:
    before = shared_memory()
    arguments = ("-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "tests/transport/multinode")
    launchers = torchrun_nodes(NODES, RANKS_PER_NODE, tmp_path, *arguments)
    output = "\n".join(f"--- node {node}:\n{done.stdout}" for node, done in enumerate(launchers))
    assert [done.returncode for done in launchers] == [0] * NODES, output
    ranks = [log.read_text() for log in tmp_path.glob("*/*/attempt_0/*/stdout.log")]
    passed = [re.findall(r"^(\d+) passed in ", rank, re.MULTILINE) for rank in ranks]
    assert len(passed) == NODES * RANKS_PER_NODE and all(passed) and all(one == passed[0] for one in passed), output
    assert shared_memory() <= before, "processes have left shared memory behind"
