"""The recording of one rank's timeline, from its start to its file."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_ep_py.base import files
from deep_ep_py.base.environment import TRACE
from deep_ep_py.base.logs import log
from deep_ep_py.base.native import C
from deep_ep_py.errors import CudaError, DeepEPError
from deep_ep_py.session.timeline.chrome import write_rank
from deep_ep_py.session.timeline.stages import Stages

SETTLE_SECONDS = 1.0
"""How long the end of a recording waits for kernels whose stages it has."""

STAGE_BYTES = 16 << 20
"""Memory of a Buffer for what its kernels note about their stages, if they do: 128 bytes per launch and warp."""

MAX_EVENTS = 1_000_000
"""Events that a process keeps, 64 bytes each; the file says how many came later."""


_FAILURES = (DeepEPError, CudaError)


class _Process:
    """The recordings in progress in this process, whose kernels and NICs have one common record."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.recorded: set[int] = set()  # ranks
        self.files: dict[Path, itertools.count[int]] = {}

    def begin(self, rank: int) -> None:
        with self.lock:
            if rank in self.recorded:
                raise DeepEPError(f"trace: a recording of rank {rank} is in progress in this process")
            if not self.recorded:
                C.timeline.start(MAX_EVENTS)
            self.recorded.add(rank)

    def end(self, rank: int) -> tuple[list[C.timeline.Event], int]:
        """Return the events of a rank, and how many of all ranks were not kept."""
        with self.lock:
            try:
                return C.timeline.take(rank), C.timeline.lost()
            finally:
                self.recorded.discard(rank)
                if not self.recorded:
                    C.timeline.stop()


_process = _Process()


def _forget() -> None:
    """Forget the parent's recordings in a forked child, whose own first recording clears the record."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_forget)


@dataclass(frozen=True)
class Words:
    """Names words in the heaps, the same on every rank.

    Parameters
    ----------
    rank : int
        The rank of the Buffer.
    bases : tuple of int
        Where this process has mapped the far part of each rank's heap; 0 where it has not.
    heap_bytes : int
        Size of that part. Words elsewhere, such as those of near parts, have no name.
    """

    rank: int
    bases: tuple[int, ...]
    heap_bytes: int

    def name(self, owner: int, address: int) -> str | None:
        """Return the name of the word at an address of this process that is in the memory of a rank."""
        base = self.bases[owner]
        offset = address - base if base and address else -1
        return f"{owner}:{offset}" if 0 <= offset < self.heap_bytes else None


class Recording:
    """A recording in progress. It has the operations of one Buffer, and what all kernels and NICs of its rank do in
    this process.

    Parameters
    ----------
    path : pathlib.Path
        The file of the timeline. With several ranks, each writes its own, with its rank before the suffix.
    engine : session.engine.Engine
        The engine of the Buffer.

    Attributes
    ----------
    path : pathlib.Path
        The file of this rank.
    ended : bool
        Whether `end` has been called.

    Raises
    ------
    OSError
        The file cannot be written.
    DeepEPError
        A recording of a Buffer with this rank is in progress in this process.
    """

    def __init__(self, path: Path, engine: Any) -> None:
        self.path = file_of(path.absolute(), engine.rank, engine.ranks)
        files.check_writable(self.path)
        self._process, self._ranks, self._log = os.getpid(), engine.ranks, engine.log
        self._group = f"{engine.membership.number} {_mark_of(engine)}"
        bases = tuple(engine.runtime.peer_base(rank) for rank in range(engine.ranks))
        self._words = Words(engine.rank, bases, engine.runtime.heap_bytes)
        # Until the recording ends: a Buffer that is destroyed gives its memory back.
        self._runtime: Any = engine.runtime if engine.runtime.notes_stages else None
        self._clocks_differ = engine.device.asynchronous
        _process.begin(engine.rank)
        try:
            if self._runtime is not None:
                self._runtime.record_stages(STAGE_BYTES)
        except BaseException:
            _process.end(engine.rank)
            raise
        self.ended = False
        self._log.start_spans()

    def end(self, settles: float = SETTLE_SECONDS) -> None:
        """End the recording and write the file; does nothing the second time, or in a forked child.

        Parameters
        ----------
        settles
            Seconds to wait for kernels whose stages it has.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        if self.ended or os.getpid() != self._process:
            return
        self.ended = True
        try:
            stages, launches_lost = self._take_stages(settles)  # first: the kernels that it waits for are events, too
            spans = self._log.end_spans()
        finally:
            events, lost = _process.end(self._words.rank)
        write_rank(self.path, self._words, self._ranks, self._group, spans, events, lost + launches_lost, stages)
        log.info("rank %d: timeline written to %s", self._words.rank, self.path)

    def _take_stages(self, seconds: float) -> tuple[Stages | None, int]:
        """Return the stages of the kernels, if they were noted, and the number of launches without."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return None, 0
        try:
            launches = runtime.take_stages(seconds)
        except _FAILURES as error:  # what else was recorded may tell why
            log.error("rank %d: the stages of kernels are lost: %s", self._words.rank, error)
            return None, 0
        return Stages(launches, self._clocks_differ), runtime.stages_lost

    def end_quietly(self, settles: float = SETTLE_SECONDS) -> None:
        """End the recording where an error must not hide another, or fail the caller: it is logged."""
        try:
            self.end(settles)
        except OSError as error:
            log.error("rank %d: the timeline is lost: %s", self._words.rank, error)


def file_of(path: Path, rank: int, ranks: int) -> Path:
    """Return the file of a rank's timeline."""
    return path if ranks == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _mark_of(engine: Any) -> str:
    """Return a short text that the ranks of a Buffer have in common, and those of others do not."""
    return hashlib.sha256("\0".join(engine.membership.members).encode()).hexdigest()[:8]


def start_if_asked(engine: Any) -> list[Recording]:
    """Start a recording if `DEEP_EP_TRACE` names a file; it ends with the Buffer, or at the latest with the process.

    Where the Buffer's group is not that of all processes which torchrun has started, the file's name has a mark of the
    group. A later Buffer of the same rank in this process gets a file of its own, with its number before the suffix; it
    is not recorded while the earlier one is. What keeps a timeline from being recorded is logged, and does not keep the
    Buffer from working.
    """
    name = os.environ.get(TRACE)
    if not name:
        return []
    path = Path(name)
    if os.environ.get("WORLD_SIZE", str(engine.ranks)) != str(engine.ranks):
        path = path.with_name(f"{path.stem}.{_mark_of(engine)}{path.suffix}")
    with _process.lock:
        number = next(_process.files.setdefault(file_of(path, engine.rank, engine.ranks), itertools.count(1)))
    if number > 1:
        path = path.with_name(f"{path.stem}.{number}{path.suffix}")
    try:
        return [Recording(path, engine)]
    except (OSError, MemoryError, *_FAILURES) as error:
        log.error("rank %d: no timeline is recorded: %s", engine.rank, error)
        return []
