"""Log lines of the library: `DEEP_EP_LOG=info` writes one for each operation, `DEEP_EP_LOG=debug` also says why.

The operations of a timeline are noted here too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class Span:
    """An operation in a timeline, by the clock of kernels in nanoseconds."""

    kind: str
    operation: int
    begin: int
    end: int
    moved: str
    ended: bool = True
    """Whether the operation had ended by then."""


@dataclass
class _Begun:
    kind: str
    at: float
    clock: int = 0
    moved: str = ""
    end_range: Callable[[], None] | None = None


@dataclass
class OperationLog:
    """The log lines of one Buffer's operations, and their spans while a timeline is recorded.

    Parameters
    ----------
    rank : int
        This rank, which begins each line.
    asynchronous : bool
        Whether kernels run after their launch, so that the time is that of the launches.
    now_ns : callable
        The clock of kernels.
    open_range : callable
        Opens a range with a name in the device's profiler, and returns what closes it, or None.
    """

    rank: int
    asynchronous: bool
    now_ns: Callable[[], int]
    open_range: Callable[[str], Callable[[], None] | None]
    _writes_lines: bool = field(init=False)
    _spans: list[Span] | None = field(init=False, default=None)
    _begun: dict[int, _Begun] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._writes_lines = log.isEnabledFor(logging.INFO)

    def start_spans(self) -> None:
        """Note a span for each operation that begins from now on."""
        self._spans = []

    def end_spans(self) -> list[Span]:
        """Return the spans, and note no more."""
        spans, self._spans = self._spans or [], None
        now = self.now_ns()
        for operation, begun in list(self._begun.items()):
            if begun.clock:
                spans.append(Span(begun.kind, operation, begun.clock, now, begun.moved, ended=False))
                begun.clock = 0
            if begun.end_range is not None:
                begun.end_range()
                begun.end_range = None
        return spans

    def begin(self, operation: int, kind: str) -> None:
        """Note when an operation begins."""
        if self._writes_lines or self._spans is not None:
            begun = self._begun[operation] = _Begun(kind, time.perf_counter())
            if self._spans is not None:
                begun.clock = self.now_ns()
                begun.end_range = self.open_range(kind)

    def moved(self, operation: int, what: str, rows: int, row_bytes: int, path: str) -> None:
        """Note what an operation moves: rows or tokens, and how."""
        if (begun := self._begun.get(operation)) is not None:
            begun.moved = f", {rows} {what}, {rows * row_bytes} bytes, {path}"

    def end(self, operation: int) -> None:
        """Write the line of an operation, and note its span."""
        if (begun := self._begun.pop(operation, None)) is None:
            return
        if begun.end_range is not None:
            begun.end_range()
        if self._spans is not None and begun.clock:
            self._spans.append(Span(begun.kind, operation, begun.clock, self.now_ns(), begun.moved))
        if self._writes_lines:
            took = f"{'launched in ' if self.asynchronous else ''}{1e3 * (time.perf_counter() - begun.at):.3f} ms"
            log.info("rank %d: %s, operation %d%s, %s", self.rank, begun.kind, operation, begun.moved, took)
