# Written by `make stubs` from the bindings in csrc/python: change those.
"""
Measurements of the proxy. Times are those of time.monotonic().
"""

from __future__ import annotations
import collections.abc
import deep_ep_py._C
import typing

__all__: list[str] = [
    "HEAP_BYTES",
    "Kind",
    "MEASURED_BYTES",
    "OwnCost",
    "Puts",
    "SOURCES",
    "TARGETS",
    "command_rate",
    "own_cost",
]

class Kind:
    """
    Members:

      RAW

      STEPPED

      THREADED
    """

    RAW: typing.ClassVar[Kind]
    STEPPED: typing.ClassVar[Kind]
    THREADED: typing.ClassVar[Kind]
    __members__: typing.ClassVar[dict[str, Kind]]
    @typing.overload
    def __eq__(self, other: Kind) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Kind) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Puts:
    """
    Puts between rank 0 and rank 1, two processes that have mapped each other's heaps.
    """
    def __init__(
        self, *, kind: Kind, rank: int, heaps: collections.abc.Sequence[deep_ep_py._C.Heap], provider: str
    ) -> None: ...
    def meet(self) -> None:
        """
        Wait until the peer has called this equally often.
        """
    def receive(self, count: int) -> float:
        """
        Wait for `count` more puts of the peer; return when they had arrived.
        """
    def round_trips(self, bytes: int, count: int, first: bool) -> tuple[float, float]:
        """
        Make `count` puts and wait for the answer to each, or answer them; return when this began and ended.
        """
    def send(self, bytes: int, count: int, window: int) -> tuple[float, float]:
        """
        Make `count` puts, at most `window` at once; return when the first began and when all had completed.
        """
    @property
    def name(self) -> str: ...

class OwnCost:
    """
    Latencies in nanoseconds, one of each kind per put.
    """
    @property
    def arrival_to_word(self) -> list[float]: ...
    @property
    def command_to_post(self) -> list[float]: ...
    @property
    def completion_to_word(self) -> list[float]: ...

def command_rate(commands: int) -> float:
    """
    Measure commands per second, each sent and received, over a transport that does both at once.
    """

def own_cost(puts: int) -> OwnCost:
    """
    Measure the proxy's own cost, over the loopback.
    """

HEAP_BYTES: int = 33570816
MEASURED_BYTES: int = 16777216
SOURCES: int = 12288
TARGETS: int = 16789504
