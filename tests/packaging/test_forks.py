"""A forked program ends as a process of its own does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forks import run_python
from launches import of_ranks

pytestmark = pytest.mark.once

ENDS = """
import atexit, sys, threading, time

class Kept:
    def __del__(self):
        print("freed")

def beside():
    time.sleep(0.2)
    print("thread")

kept = Kept()
atexit.register(print, "atexit")
threading.Thread(target=beside).start()
print("main")
{end}
"""


FAILING = """
def failing():
    kept = Kept()
    raise KeyError

try:
    failing()
except KeyError:
    raise ValueError("no")
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('a reason')", "raise KeyboardInterrupt", FAILING])
@pytest.mark.parametrize("of_a_file", [False, True])
@pytest.mark.covers
def test_as_a_process_of_its_own(end: str, of_a_file: bool, tmp_path: Path) -> None:
    program = ["-c", ENDS.format(end=end)]
    if of_a_file:
        file = tmp_path / "program.py"
        file.write_text(program[1])
        program = [str(file)]
    own = subprocess.run([sys.executable, *program], env=of_ranks(), capture_output=True, text=True)
    done = run_python(program, of_ranks())
    freed = ["freed"] * (2 if end == FAILING else 1)
    assert done.stdout.split() == own.stdout.split() == ["main", "thread", "atexit", *freed]
    assert done.returncode == own.returncode
    assert done.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]
