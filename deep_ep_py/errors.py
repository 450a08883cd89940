"""Exceptions that the library raises, besides `ValueError` and `TypeError` for bad arguments."""

from __future__ import annotations


class DeepEPError(RuntimeError):
    """Failure of an operation, or use of a Buffer after such a failure.

    Attributes
    ----------
    told_by : int or None
        The rank that failed first and notified this one, if that is the cause.
    """

    told_by: int | None = None


class DeepEPTimeout(DeepEPError):
    """Timeout of a bounded wait inside a kernel.

    Attributes
    ----------
    rank : int
        The rank that waited.
    kernel : str
        The call that was waiting: "dispatch" or "combine".
    phase : str
        What it waited for.
    peer : int
        The rank that should have ended the wait, or -1 if it was not a particular rank.
    expected, seen : int
        Signals that would have ended the wait, counted since the Buffer was made, and signals that have arrived.
    compiling : list of int
        Ranks that were still compiling their kernels.
    """

    def __init__(
        self,
        rank: int,
        kernel: str,
        phase: str,
        peer: int,
        expected: int,
        seen: int,
        seconds: float,
        compiling: list[int] | None = None,
    ) -> None:
        self.rank, self.kernel, self.phase, self.peer = rank, kernel, phase, peer
        self.expected, self.seen, self.compiling = expected, seen, compiling or []
        busy = "".join(f"; rank {other} is still compiling its kernels" for other in self.compiling)
        whose = f" of rank {peer}" if peer >= 0 else ""
        super().__init__(
            f"rank {rank} gave up in {kernel} after {seconds:g} s: waited for {phase}{whose}, "
            f"expected {expected} signal{'' if expected == 1 else 's'}, saw {seen}{busy} (the limit: `timeout`, "
            "DEEP_EP_TIMEOUT)"
        )


class CudaError(RuntimeError):
    """Missing GPU or driver, or a call that the driver refused; the message names it and quotes the driver."""


class DeadlockError(RuntimeError):
    """Deadlock in a world of rank threads; the message lists what each thread waits for."""


class SimtError(RuntimeError):
    """Violation of a rule of the SIMT machine on the CPU by a kernel; the message names the rule and the line."""


class PeerFailed(RuntimeError):
    """A collective of a `ThreadGroup` that can never complete because another rank's function has raised.

    Attributes
    ----------
    rank : int
        The rank whose function raised.
    """

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} failed before it reached {what}")


def brief(error: BaseException) -> str:
    """Return an exception's type and the first line of its text, in bounded length."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0][:300] if lines else ''}"
