"""The recording of one rank's timeline, from its start to its file."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_ep_py.core import files
from deep_ep_py.core.logs import log
from deep_ep_py.core.native import C
from deep_ep_py.trace.chrome import write_rank

VARIABLE = "DEEP_EP_TRACE"
"""The environment variable that has every Buffer of a process record a timeline, into this file."""

MAX_EVENTS = 1_000_000
"""Events that a process keeps, about 100 bytes each; later ones are counted and named in the file."""

_MAX_HEAP_BYTES = 1 << 44
_lock = threading.Lock()
_recordings = 0  # in progress in this process, whose kernels and NICs have one common record
_files: dict[Path, itertools.count[int]] = {}


@dataclass(frozen=True)
class Words:
    """Names words in the heaps, the same on every rank.

    Parameters
    ----------
    engine : session.engine.Engine
        The engine of a Buffer.
    """

    engine: Any

    @property
    def rank(self) -> int:
        """The rank of the Buffer."""
        rank: int = self.engine.rank
        return rank

    def name(self, owner: int, address: int) -> str | None:
        """Return the name of the word at an address of this process that is in the memory of a rank."""
        base = self.engine.runtime.peer_base(owner)
        offset = address - base if base else -1
        return f"{owner}:{offset}" if 0 <= offset < _MAX_HEAP_BYTES else None


class Recording:
    """A recording in progress.

    Parameters
    ----------
    path : pathlib.Path
        The file of the timeline. With several ranks, each writes its own, with its rank before the suffix.
    engine : session.engine.Engine
        The engine of the Buffer.

    Attributes
    ----------
    ended : bool
        Whether `end` has been called.

    Raises
    ------
    OSError
        The file cannot be written.
    """

    def __init__(self, path: Path, engine: Any) -> None:
        global _recordings
        self.path = file_of(path, engine.rank, engine.ranks)
        files.check_writable(self.path)
        self._engine, self._process = engine, os.getpid()
        with _lock:
            if _recordings == 0:
                C.timeline.start(MAX_EVENTS)
            _recordings += 1
        self.ended = False
        engine.log.start_spans()

    def end(self) -> None:
        """End the recording and write the file; does nothing the second time, or in a forked child."""
        global _recordings
        if self.ended or os.getpid() != self._process:
            return
        self.ended = True
        spans, words = self._engine.log.end_spans(), Words(self._engine)
        events, lost = C.timeline.take(words.rank), C.timeline.lost()
        with _lock:
            _recordings -= 1
            if _recordings == 0:
                C.timeline.stop()
        write_rank(self.path, words, self._engine.ranks, spans, events, lost)
        log.info("rank %d: timeline written to %s", words.rank, self.path)
        self._engine = None  # it holds the memory of the Buffer


def file_of(path: Path, rank: int, ranks: int) -> Path:
    """Return the file of a rank's timeline."""
    return path if ranks == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def start_if_asked(engine: Any) -> list[Recording]:
    """Start a recording if `DEEP_EP_TRACE` names a file; it ends with the Buffer, or at the latest with the process.

    The second Buffer of a rank in a process gets a file of its own, with its number before the suffix.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return []
    path = Path(name)
    with _lock:
        number = next(_files.setdefault(file_of(path, engine.rank, engine.ranks), itertools.count(1)))
    if number > 1:
        path = path.with_name(f"{path.stem}.{number}{path.suffix}")
    recording = Recording(path, engine)
    atexit.register(_end, weakref.ref(recording))
    return [recording]


def _end(reference: weakref.ref[Recording]) -> None:
    recording = reference()
    if recording is not None:
        recording.end()
