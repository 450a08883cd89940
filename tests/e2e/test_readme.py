"""The examples in the README and the other documents work, and say so themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks
from documents import snippet
from launches import forked, torchrun

pytestmark = pytest.mark.once

LAYER = r"rank (\d): sent 512 tokens, received \d+ rows, correct\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("layer.py", LAYER),
        ("decode.py", r"rank (\d): \d+ rows for 4 experts, correct\n"),
        ("elastic.py", r"rank (\d): 4\d\d rows whose experts end at \[(?:\d+(?:, )?){4}\], correct\n"),
        ("model.py", r"rank (\d): \d+ rows, gradient \(4, 256, 128\), correct\n"),
        ("decode_layer.py", r"rank (\d): \(1\d, 512\), and in halves \[6, 5\], correct\n"),
    ],
)
def test_programs(name: str, line: str, tmp_path: Path) -> None:
    check_program(partial(forked, teardown=True), name, line, tmp_path)


@pytest.mark.thorough
def test_a_program_under_torchrun(tmp_path: Path) -> None:
    check_program(torchrun, "layer.py", LAYER, tmp_path)


def check_program(launch: Callable[..., CompletedProcess[str]], name: str, line: str, folder: Path) -> None:
    program = folder / name
    program.write_text(snippet(f"torchrun --nproc-per-node 4 {name}"))
    result = launch(program, 4)
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(line, result.stdout)) == ["0", "1", "2", "3"], result.stdout


def test_ranks_as_threads() -> None:
    names = {"deep_ep": deep_ep, "run_ranks": run_ranks}
    exec(snippet("def on_each_rank"), names)
    assert list(names["results"]) == [list(range(8))] * 8
