# Written by `make stubs` from the bindings in csrc/python: change those.
"""
A recording of kernels, waits, and what software NICs do.
"""

from __future__ import annotations
import typing

__all__: list[str] = ["Event", "Kind", "lost", "start", "stop", "take"]

class Kind:
    """
    Members:

      KERNEL

      WAIT

      HOST_WAIT

      PUT

      SIGNAL
    """

    HOST_WAIT: typing.ClassVar[Kind]
    KERNEL: typing.ClassVar[Kind]
    PUT: typing.ClassVar[Kind]
    SIGNAL: typing.ClassVar[Kind]
    WAIT: typing.ClassVar[Kind]
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

class Event:
    @property
    def begin(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def thread(self) -> int: ...
    @property
    def value(self) -> int: ...
    @property
    def word(self) -> int: ...

def lost() -> int:
    """
    Return how many events were not kept.
    """

def start(most: int) -> None:
    """
    Begin a recording of at most `most` events.
    """

def stop() -> None:
    """
    End the recording.
    """

def take(rank: int) -> list[Event]:
    """
    Take the events of a rank out of the recording.
    """
