"""Check each synchronization idiom of csrc/ against the PTX memory model, and that all of its parts are needed.

python scripts/litmus.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "protocol"))
from litmus.idioms import LITMUS  # noqa: E402
from litmus.model import Executions  # noqa: E402
from litmus.program import Litmus, Program  # noqa: E402


def happens(litmus: Litmus, program: Program, program_order_is_causal: bool) -> bool:
    """Return whether some execution ends in a forbidden state."""
    return any(litmus.never(outcome) for outcome in Executions(program, program_order_is_causal).outcomes())


def main() -> int:
    """Print a table; return 1 if an idiom does not hold, or holds without one of its parts."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    began, bad = time.monotonic(), 0
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("idiom", "orders", "", "fails, as it should, with"):
        table.add_column(column, overflow="fold")
    for litmus in LITMUS:
        holds = not happens(litmus, litmus.program, False)
        needed = {wrong: happens(litmus, program, True) for wrong, program in litmus.broken.items()}
        bad += (not holds) + list(needed.values()).count(False)
        parts = [wrong if fails else f"[red]{wrong}: still holds[/]" for wrong, fails in needed.items()]
        table.add_row(litmus.name, litmus.what, "[green]holds" if holds else "[red]FAILS", "; ".join(parts))
    console.print(table)
    console.print(f"{len(LITMUS)} idioms in {time.monotonic() - began:.1f} s" + (f", {bad} wrong" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
