"""The software NICs of a Buffer: their settings, faults included, and the traces of their requests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deep_ep_py.base.native import C

_MAX_BLOCKS = 1 << 15


@dataclass(frozen=True)
class NicOptions:
    """Settings of a rank's software NICs, which execute the same work requests that kernels write for a ConnectX.

    Parameters
    ----------
    blocks : int
        Requests that a send queue holds, a power of two; kernels wait while it is full.
    queues_per_peer : int
        Queue pairs to each peer. Requests on different queue pairs may overtake each other.
    nics : int
        NICs per rank; queue pairs are distributed among them in turn.
    chunk_log2 : int
        Every 2 ** chunk_log2 bytes of a heap have keys of their own; no request crosses such a boundary.
    key_offset : int
        Where a heap begins within its first chunk, a multiple of 16; models heaps inside larger registered memory.
    max_bytes : int
        Maximum size of a request.
    mtu : int
        Bytes that arrive at a time.
    in_flight : int
        Requests of a queue pair that are in flight at a time.
    max_delay : int
        Maximum number of turns that other fibers get before each step of a queue pair; the number is random. Only for
        `deep_ep_py.testing.run_ranks` on a CPU: elsewhere one thread serves a rank's queue pairs as fast as it can.
    relaxed : bool
        Data may overtake data on a queue pair as well.
    atomics_pass : bool
        An atomic may overtake data, as on memory that is registered with relaxed ordering where NICs use atomic
        operations of PCIe. Such memory is never used (P8): with this option results are wrong.
    fault_rank, fault_peer : int
        The queue pairs from one rank to another (-1: to all) that fail.
    fault_after : int
        The request from which on they fail.
    fault_syndrome : int
        The syndrome of their completion, such as 0x15, retries exceeded. 0 means that there is never a completion.
    fault_flushes : bool
        The requests behind the one that fails are flushed, and their completion takes the place of its own, as on a
        ConnectX: the first error is then unknown.
    traced : bool
        Keep every request for `Buffer.network_trace`.
    """

    blocks: int = 256
    queues_per_peer: int = 1
    nics: int = 1
    chunk_log2: int = 30
    key_offset: int = 0
    max_bytes: int = 1 << 20
    mtu: int = 4096
    in_flight: int = 4
    max_delay: int = 0
    relaxed: bool = False
    atomics_pass: bool = False
    fault_rank: int = -1
    fault_peer: int = -1
    fault_after: int = 0
    fault_syndrome: int = 0
    fault_flushes: bool = False
    traced: bool = False

    def __post_init__(self) -> None:
        limits = {
            "blocks": (8, _MAX_BLOCKS),
            "queues_per_peer": (1, 64),
            "nics": (1, 8),
            "chunk_log2": (12, 40),
            "max_bytes": (16, 1 << 30),
            "mtu": (16, 1 << 30),
            "in_flight": (1, 1024),
            "max_delay": (0, 1 << 16),
            "fault_after": (0, 1 << 40),
            "fault_syndrome": (0, 255),
        }
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: expected {least} to {most}")
        if not 0 <= self.key_offset < 1 << self.chunk_log2:
            raise ValueError(f"key_offset={self.key_offset}: expected 0 to {(1 << self.chunk_log2) - 1}")
        if self.blocks & (self.blocks - 1):
            raise ValueError(f"blocks={self.blocks}: expected a power of two")
        for name in ("key_offset", "max_bytes", "mtu"):
            if getattr(self, name) % 16:
                raise ValueError(f"{name}={getattr(self, name)}: expected a multiple of 16")

    def native(self) -> Any:
        """Return the options in the form that the extension takes."""
        options = C.NicOptions()
        for name, value in asdict(self).items():
            setattr(options, name, value)
        return options


def save_trace(messages: list[dict[str, int]], path: Path | str) -> None:
    """Write a trace as JSON lines, one request per line, in order of time.

    Parameters
    ----------
    messages
        The result of `Buffer.network_trace`, or the concatenated results of several ranks.
    path
        The file.
    """
    with Path(path).open("w") as file:
        for message in sorted(messages, key=lambda one: one["time_ns"]):
            file.write(json.dumps(message) + "\n")
