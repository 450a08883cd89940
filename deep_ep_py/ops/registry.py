"""Names of Buffers. An op's schema has a name instead of the Buffer, which a compiled graph cannot hold."""

from __future__ import annotations

import itertools
import threading
import weakref

from deep_ep_py.base import arguments
from deep_ep_py.buffer import Buffer
from deep_ep_py.v2.elastic import ElasticBuffer, buffer_under

_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()
_serials: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count(1)
_lock = threading.Lock()
_ROUTES_VERSION = 2
"""Increases whenever the tensors of routes change, or how ops are compiled."""


def register(buffer: Buffer | ElasticBuffer, name: str | None = None) -> str:
    """Register a Buffer under a name by which ops find it.

    A name stands for one Buffer of the whole process, whichever thread an op or its backward runs on. Ranks that are
    threads of one process therefore each need a name of their own; for ranks that are processes, the name of the
    process group suffices. The registry does not keep the Buffer alive: keep a reference as long as ops use it.

    Parameters
    ----------
    buffer : Buffer or ElasticBuffer
        The Buffer to register. It may be registered again, under the same or another name.
    name : str, optional
        Default: the name of its process group.

    Returns
    -------
    str
        The `group` argument of ops: the name, extended by everything that the shapes of routes depend on. A compiler's
        cache identifies a graph by its strings; this keeps it from reusing one compiled for another number of ranks, or
        by another version.

    Raises
    ------
    TypeError
        `buffer` is neither a Buffer nor an ElasticBuffer.
    ValueError
        Another live Buffer has the name, or no name is given and the group has none.
    """
    buffer = buffer_under(buffer)
    if buffer.runtime is None:
        raise ValueError("buffer: it has been destroyed, expected one that is in use")
    if name is None:
        name = getattr(buffer.group, "group_name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"name={arguments.describe(name)}: expected a non-empty string; a {type(buffer.group).__name__} has no name"
        )
    name = f"{name}/{buffer.group_size} ranks/{_ROUTES_VERSION}"
    with _lock:
        taken = _buffers.get(name)
        if taken is not None and taken is not buffer and taken.runtime is not None:
            raise ValueError(
                f"name={arguments.describe(name)}: expected a name that no other Buffer of this process has"
            )
        _buffers[name] = buffer
        if buffer not in _serials:
            _serials[buffer] = next(_next_serial)
    return name


def buffer_of(group: str) -> Buffer:
    """Return the Buffer that is registered under a name.

    Raises
    ------
    ValueError
        There is none, or it no longer exists.
    """
    buffer = _buffers.get(group) if isinstance(group, str) else None
    if buffer is None:
        known = ", ".join(sorted(repr(name) for name in _buffers)) or "none"
        raise ValueError(
            f"group={arguments.describe(group)}: expected the name of a live Buffer, registered by "
            f"`deep_ep_py.ops.register`; registered: {known}"
        )
    return buffer


def serial_of(buffer: Buffer) -> int:
    """Return a registered Buffer's number, which is unique in this process and never reused."""
    return _serials[buffer]
