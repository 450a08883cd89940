"""What the library raises besides `ValueError` and `TypeError` for bad arguments."""

from __future__ import annotations


class DeepEPError(RuntimeError):
    """An operation failed, or a Buffer is used after one did.

    Attributes
    ----------
    told_by : int or None
        The rank that failed first and told this one, where that is why.
    """

    told_by: int | None = None


class DeepEPTimeout(DeepEPError):
    """A bounded wait inside a kernel ran out.

    Attributes
    ----------
    rank : int
        The rank that waited.
    kernel : str
        The call it was in: "dispatch" or "combine".
    phase : str
        What it waited for.
    peer : int
        The rank that should have ended the wait, -1 where it was none.
    expected, seen : int
        Signals that would have ended the wait, counted since the Buffer was made, and signals that have come.
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
            f"expected {expected} signals, saw {seen}{busy}"
        )


class CudaError(RuntimeError):
    """There is no GPU or no driver, or the driver refused something: the message says what, and the driver's text."""


class DeadlockError(RuntimeError):
    """Nothing in a world of rank threads could ever run again; the message lists what each thread waits for."""


class SimtError(RuntimeError):
    """A kernel broke a rule of the SIMT machine on the CPU; the message names rule and line."""


class PeerFailed(RuntimeError):
    """A collective of a `ThreadGroup` can never complete, because another rank's function has raised.

    Attributes
    ----------
    rank : int
        The rank whose function raised.
    """

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} failed before it reached {what}")
