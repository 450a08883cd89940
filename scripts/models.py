"""Check the rules of docs/PROTOCOL.md in models, and print the shortest failure that occurs without each rule.

python scripts/models.py
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "protocol"))
from models.catalogue import CASES, MODELS  # noqa: E402
from models.explore import explore, name_of  # noqa: E402


def main() -> int:
    """Print the shortest counterexample of each rule; return 1 if a model or a counterexample is not as expected."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    began, bad = time.monotonic(), 0
    for case in CASES:
        console.print(f"{case.number} without {case.rule} (tests/protocol/models/{case.file}.py)", style="bold")
        found = case.counterexample() or ["nothing goes wrong"]
        for number, step in enumerate(found[:-1], 1):
            console.print(f"  {number:3} {step}")
        expected = len(found) == case.steps + 1 and re.search(case.wrong, found[-1]) is not None
        bad += not expected
        console.print(
            f"      {found[-1]}{'' if expected else ': not the expected one'}\n", style="" if expected else "red"
        )
    for model in MODELS:
        if found := explore(model):
            bad += 1
            console.print(f"{name_of(model)} with all rules:", *found, sep="\n      ", style="red")
    seconds = time.monotonic() - began
    console.print(f"{len(CASES)} rules, {len(MODELS)} models in {seconds:.1f} s" + (f", {bad} wrong" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
