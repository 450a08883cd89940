"""Log lines of the library: `DEEP_EP_LOG=info` writes one for each operation, `DEEP_EP_LOG=debug` also says why."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

VARIABLE = "DEEP_EP_LOG"
LEVELS = ("info", "debug")

log = logging.getLogger("deep_ep_py")


class _WholeLines(logging.Handler):
    """A handler that writes each line to standard error at once, so that ranks do not mix within a line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        with suppress(OSError):  # a closed terminal must not fail a rank
            os.write(2, f"{self.format(record)}\n".encode(errors="replace"))


def configure() -> None:
    """Write log lines to standard error if `DEEP_EP_LOG` is set. Without it, the program's own handlers decide.

    Raises
    ------
    ValueError
        The variable has another value than `LEVELS`.
    """
    level = os.environ.get(VARIABLE, "")
    if not level:
        return
    if level not in LEVELS:
        raise ValueError(f"{VARIABLE}={level!r}: expected {' or '.join(LEVELS)}")
    handler = _WholeLines()
    handler.setFormatter(logging.Formatter("%(asctime)s deep_ep_py %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False  # otherwise a program that logs to standard error too would write each line twice


@dataclass
class _Begun:
    kind: str
    at: float
    moved: str = ""


@dataclass
class OperationLog:
    """The log lines of one Buffer's operations.

    Parameters
    ----------
    rank : int
        This rank, which begins each line.
    asynchronous : bool
        Whether kernels run after their launch, so that the time is that of the launches.
    """

    rank: int
    asynchronous: bool
    enabled: bool = field(init=False)
    _begun: dict[int, _Begun] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.enabled = log.isEnabledFor(logging.INFO)

    def begin(self, operation: int, kind: str) -> None:
        """Note when an operation begins."""
        if self.enabled:
            self._begun[operation] = _Begun(kind, time.perf_counter())

    def moved(self, operation: int, what: str, rows: int, row_bytes: int, path: str) -> None:
        """Note what an operation moves: rows or tokens, and how."""
        if self.enabled and (begun := self._begun.get(operation)) is not None:
            begun.moved = f", {rows} {what}, {rows * row_bytes} bytes, {path}"

    def end(self, operation: int) -> None:
        """Write the line of an operation."""
        if self.enabled and (begun := self._begun.pop(operation, None)) is not None:
            took = f"{'launched in ' if self.asynchronous else ''}{1e3 * (time.perf_counter() - begun.at):.3f} ms"
            log.info("rank %d: %s, operation %d%s, %s", self.rank, begun.kind, operation, begun.moved, took)
