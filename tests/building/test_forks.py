"""A forked program ends as a process of its own does."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('a reason')", "raise ValueError('no')"])
def test_as_a_process_of_its_own(end: str) -> None:
    program = ["-c", ENDS.format(end=end)]
    own = subprocess.run([sys.executable, *program], env=of_ranks(), capture_output=True, text=True)
    done = run_python(program, of_ranks())
    assert done.stdout.split() == own.stdout.split() == ["main", "thread", "atexit", "freed"]
    assert done.returncode == own.returncode
    assert done.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]
