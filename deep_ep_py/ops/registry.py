"""Names of Buffers. An op's schema carries a name: a compiled graph cannot carry the Buffer itself."""

from __future__ import annotations

import itertools
import threading
import weakref

from deep_ep_py.buffer import Buffer

_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()
_serials: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
_next_serial = itertools.count(1)
_lock = threading.Lock()
_ROUTES_VERSION = 1
"""Grows when routes become other tensors."""


def register(buffer: Buffer, name: str | None = None) -> str:
    """Give a Buffer the name by which ops find it.

    A name means one Buffer of the whole process, in whatever thread an op or its backward runs. So ranks that are
    threads of one process each have a name of their own; in processes the name of the process group suffices. The
    Buffer is not kept alive: hold on to it as long as ops use it.

    Parameters
    ----------
    buffer : Buffer
        To be found. Registering it again, under this or another name, is fine.
    name : str, optional
        Default: the name of its process group.

    Returns
    -------
    str
        The argument `group` of ops: the name, with what the shapes of routes depend on. A compiler's cache knows a
        graph by its strings, so it does not take one that was made for another number of ranks, or by another version.

    Raises
    ------
    TypeError
        If `buffer` is no Buffer.
    ValueError
        If the name is another Buffer's that is alive, or if its group has no name and none is given.
    """
    if not isinstance(buffer, Buffer):
        raise TypeError(f"buffer={buffer!r}: expected a Buffer")
    if name is None:
        name = getattr(buffer.group, "group_name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"name={name!r}: expected a string that is not empty; a {type(buffer.group).__name__} has none"
        )
    name = f"{name}/{buffer.group_size} ranks/{_ROUTES_VERSION}"
    with _lock:
        taken = _buffers.get(name)
        if taken is not None and taken is not buffer and taken.runtime is not None:
            raise ValueError(
                f"name={name!r}: expected one of this Buffer's own, it is another Buffer's of this process"
            )
        _buffers[name] = buffer
        if buffer not in _serials:
            _serials[buffer] = next(_next_serial)
    return name


def buffer_of(group: str) -> Buffer:
    """Return the Buffer of a name.

    Raises
    ------
    ValueError
        If there is none, or it is gone.
    """
    buffer = _buffers.get(group)
    if buffer is None:
        known = ", ".join(sorted(repr(name) for name in _buffers)) or "none"
        raise ValueError(
            f"group={group!r}: expected the name of a Buffer that `deep_ep_py.ops.register` knows and that is alive; "
            f"there are: {known}"
        )
    return buffer


def serial_of(buffer: Buffer) -> int:
    """Return a registered Buffer's number, which no other of this process has or had."""
    return _serials[buffer]
