"""Private sockets between the processes of a Buffer: what they exchange once they have met, and how they notice that
one has ended.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
import struct
import time
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .errors import DeepEPError

if TYPE_CHECKING:
    from .bootstrap import Bootstrap

EXCHANGE_SECONDS = 1800.0
"""How long ranks wait for others that live: as process groups do. That one has died they hear at once."""

Piece = tuple[int, int]
"""A part of a rank's heap: offset and bytes."""

_MOST_BYTES = 1 << 16
_PIECE, _PIECE_FORMAT = b"piece", "=5sQQ"
"""What a message about a piece begins with, as no pickle does."""
_DYING_MS = 50
"""How long after its sockets a process may still seem to live."""


class Connections:
    """Of one rank to all others. It does what a `Bootstrap` does, and hears at once when a process ends.

    Each rank connects to each other: it sends on its own connections and receives on the others'. Their addresses are
    in the abstract namespace and gone once all have met, so a crash leaves nothing behind. Of each process there is
    also a descriptor (pidfd) that tells of its end even where a child that it has forked keeps its sockets open.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    pids : list of int
        The ranks' processes.
    """

    in_process = False

    def __init__(self, rank: int, size: int, pids: list[int]) -> None:
        self.rank, self.size, self.pids = rank, size, pids
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._pieces: dict[int, deque[tuple[Piece, int]]] = defaultdict(deque)
        self._handed: dict[int, int] = defaultdict(int)  # the end of what each has got of this rank's heap
        maps = (self._outgoing, self._incoming, self._processes, self._pieces)
        self._finalizer = weakref.finalize(self, _close, *maps)
        self._finalizer.atexit = False  # a process that just ends is told of by its end
        _all.add(self)

    def close(self) -> None:
        """Let go of all of them. The others take it that this rank has left."""
        self._finalizer()

    def drop(self, ranks: Iterable[int]) -> None:
        """Let go of some ranks: from now on the others exchange without them."""
        for rank in ranks:
            for sockets in (self._outgoing, self._incoming):
                if rank in sockets:
                    sockets.pop(rank).close()
            if rank in self._processes:
                os.close(self._processes.pop(rank))
            for _, descriptor in self._pieces.pop(rank, ()):
                os.close(descriptor)

    def watched(self) -> list[tuple[int, int]]:
        """Return pairs of a rank and a descriptor that becomes readable when that rank ends, or lets go."""
        sockets = [(rank, connection.fileno()) for rank, connection in self._outgoing.items()]
        return sockets + list(self._processes.items())

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank.

        Raises
        ------
        DeepEPError
            If a process has ended, or its rank has given up, or did not come in time.
        """
        values: list[Any] = [None] * self.size
        values[self.rank] = value
        self._send(pickle.dumps(value))
        for rank, message, _ in self._receive():
            values[rank] = pickle.loads(message)
        return values

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give every other rank a descriptor; return theirs, the caller's to close."""
        self._send(b"descriptor", [descriptor])
        theirs: dict[int, int] = {}
        try:
            for rank, _, descriptors in self._receive():
                theirs[rank] = self._received(rank, descriptors)
        except BaseException:
            for received in theirs.values():
                os.close(received)
            raise
        return theirs

    def hand_over(self, piece: Piece, descriptor: int) -> bool:
        """Give every other rank a descriptor of a piece of this rank's heap, for its `next_piece`; pieces in their
        order. Nobody waits: false where that would have to be, and then it is to be done once more, for the ranks that
        have not got it.
        """
        message, end = struct.pack(_PIECE_FORMAT, _PIECE, *piece), sum(piece)
        missing = [rank for rank in self._outgoing if self._handed[rank] < end]
        for rank in missing:
            try:
                if _send_to(self._outgoing[rank], message, [descriptor]):
                    self._handed[rank] = end
            except ConnectionError:
                self._handed[rank] = end  # its rank has ended: whoever waits for it will hear of that
            except OSError:  # too many descriptors of this user are on their way, say
                pass
        return all(self._handed[rank] >= end for rank in missing)

    def next_piece(self, rank: int) -> tuple[Piece, int]:
        """Return the next piece that a rank has handed over, and its descriptor, until `drop_piece`.

        Raises
        ------
        DeepEPError
            If there is none.
        """
        if not self._pieces[rank]:
            try:
                received = _receive_from(self._incoming[rank])
            except OSError:
                received = b"", []
            if not self._keep_piece(rank, *received):
                raise DeepEPError(f"rank {self.rank}: rank {rank} has announced memory that it has not handed over")
        return self._pieces[rank][0]

    def drop_piece(self, rank: int) -> None:
        """Close what `next_piece` has returned, and go on to the next."""
        os.close(self._pieces[rank].popleft()[1])

    def _keep_piece(self, rank: int, message: bytes, descriptors: list[int]) -> bool:
        if not message.startswith(_PIECE):
            return False
        _, offset, size = struct.unpack(_PIECE_FORMAT, message)
        self._pieces[rank].append(((offset, size), self._received(rank, descriptors)))
        return True

    def _received(self, rank: int, descriptors: list[int]) -> int:
        if not descriptors:  # the kernel has left it out
            raise DeepEPError(f"rank {self.rank}: memory of rank {rank} cannot be mapped: too many files are open")
        return descriptors[0]

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        deadline = time.monotonic() + EXCHANGE_SECONDS
        for rank, connection in self._outgoing.items():
            try:
                while not _send_to(connection, message, descriptors):
                    self._poll([connection.fileno()], deadline, [rank], select.POLLOUT)
            except OSError:
                self._raise_gone(rank)

    def _receive(self) -> Iterator[tuple[int, bytes, list[int]]]:
        """One message of each other rank, as they come."""
        missing = {connection.fileno(): rank for rank, connection in self._incoming.items()}
        deadline = time.monotonic() + EXCHANGE_SECONDS
        while missing:
            for ready in self._poll(list(missing), deadline, list(missing.values())):
                rank = missing[ready]
                try:
                    message, descriptors = _receive_from(self._incoming[rank])
                except ConnectionError:
                    message, descriptors = b"", []
                if not message:
                    self._raise_gone(rank)
                if self._keep_piece(rank, message, descriptors):
                    continue  # the message that is waited for is behind it
                del missing[ready]
                yield rank, message, descriptors

    def meet(self, listener: socket.socket, names: list[str]) -> None:
        """Connect to all others, which listen at these names, and wait until they have.

        Raises
        ------
        DeepEPError
            As `all_gather`.
        """
        for rank, name in enumerate(names):
            if rank == self.rank:
                continue
            # Needs no partner that accepts yet: the backlog holds all ranks.
            connection = self._outgoing[rank] = _make_socket()
            try:
                connection.connect(name)
                connection.send(struct.pack("i", self.rank))
            except OSError:
                self._raise_gone(rank)
            connection.setblocking(False)
            # An old kernel has none, or it hides other processes: then the sockets will tell.
            with suppress(AttributeError, OSError):
                self._processes[rank] = os.pidfd_open(_credentials(connection)[0])
        deadline = time.monotonic() + EXCHANGE_SECONDS
        while len(self._incoming) < self.size - 1:
            missing = {c.fileno(): rank for rank, c in self._outgoing.items() if rank not in self._incoming}
            ready = self._poll([listener.fileno(), *missing], deadline, list(missing.values()))
            if listener.fileno() in ready:
                self._accept(listener)
            else:
                self._raise_gone(missing[ready[0]])

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        # Any process of the machine can reach an abstract name: only this user's are let in.
        if _credentials(connection)[1] != os.getuid():
            connection.close()
            return
        connection.settimeout(EXCHANGE_SECONDS)
        message = connection.recv(struct.calcsize("i"))
        rank = struct.unpack("i", message)[0] if len(message) == struct.calcsize("i") else -1
        if rank in self._outgoing and rank not in self._incoming:
            connection.setblocking(False)
            self._incoming[rank] = connection
        else:
            connection.close()

    def _poll(
        self, descriptors: list[int], deadline: float, ranks: list[int], events: int = select.POLLIN
    ) -> list[int]:
        poller = select.poll()
        for descriptor in descriptors:
            poller.register(descriptor, events)
        left = max(0.0, deadline - time.monotonic())
        ready = [descriptor for descriptor, _ in poller.poll(left * 1e3)]
        if not ready:
            raise DeepEPError(f"rank {self.rank}: ranks {sorted(ranks)} did not come within {EXCHANGE_SECONDS:g} s")
        return ready

    def _raise_gone(self, rank: int) -> None:
        """Say why. A rank that has let go may have done so because another's process has died."""
        poller = select.poll()
        owners = {descriptor: owner for owner, descriptor in self._processes.items()}
        for descriptor in owners:
            poller.register(descriptor, select.POLLIN)
        died = sorted(owners[descriptor] for descriptor, _ in poller.poll(_DYING_MS))
        if not died and rank not in self._processes:
            died = [rank]
        if died:
            deaths = (f"rank {one}'s process (pid {self.pids[one]}) has died" for one in died)
            raise DeepEPError(f"rank {self.rank}: {'; '.join(deaths)}")
        raise DeepEPError(f"rank {self.rank}: rank {rank} has let go of the Buffer")


def connect(bootstrap: Bootstrap) -> Bootstrap:
    """Let the processes of a Buffer meet, by one exchange of the bootstrap; what they exchange next needs no other.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.

    Returns
    -------
    Bootstrap
        `Connections`; inside one process the bootstrap itself.

    Raises
    ------
    ValueError
        If the ranks are on several machines.
    DeepEPError
        If one's process ends meanwhile.
    """
    if bootstrap.in_process:
        return bootstrap
    with _make_socket() as listener:
        name = f"\0deep_ep_py-{os.getpid()}-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(bootstrap.size)
        # The same machine, whatever its containers call themselves. A socket's name is a network namespace's.
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = (file.read().strip(), os.readlink("/proc/self/ns/net"))
        addresses = bootstrap.all_gather((machine, name, os.getpid()))
        strangers = [rank for rank, (other, _, _) in enumerate(addresses) if other != machine]
        if strangers:
            raise ValueError(
                f"group: ranks {strangers} are on other machines than rank {bootstrap.rank}, or in other network "
                "namespaces; expected one machine"
            )
        connections = Connections(bootstrap.rank, bootstrap.size, [pid for _, _, pid in addresses])
        try:
            connections.meet(listener, [address for _, address, _ in addresses])
        except BaseException:
            connections.close()
            raise
    return connections


def exchange_heaps(bootstrap: Bootstrap, heap: Any, map_heap: Callable[[int, int, int], Any]) -> list[Any]:
    """Give every rank every rank's heap.

    Inside one process the heaps themselves are passed. Between processes of one machine the descriptors of the heaps'
    nameless memory travel over private sockets: nothing has a name on disk, so a crash leaves nothing behind.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as `connect` has returned them.
    heap : native.C.Heap
        This rank's heap; the same size on all ranks.
    map_heap : callable
        Makes a peer's heap of its descriptor, its size, and how much of it there is.

    Returns
    -------
    list of native.C.Heap
        By rank, this rank's own included.

    Raises
    ------
    DeepEPError
        If a rank's process ends meanwhile.
    """
    if not isinstance(bootstrap, Connections):
        return bootstrap.all_gather(heap)
    heaps: list[Any] = [heap] * bootstrap.size
    descriptors = bootstrap.exchange_descriptors(heap.descriptor)
    try:
        for rank, descriptor in descriptors.items():
            heaps[rank] = map_heap(descriptor, heap.bytes, heap.mapped)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    bootstrap.all_gather(None)  # everybody has mapped everything
    heap.close_descriptor()
    return heaps


def _make_socket() -> socket.socket:
    # Keeps messages apart.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


# Sockets of ranks that have met never block: who wants to wait polls. `socket.send_fds` and `socket.recv_fds` would not
# do: CPython's ignore their flags.


def _send_to(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> bool:
    """Send a message with descriptors; false, and nothing sent, if there is no room for it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    try:
        connection.sendmsg([message], rights)
    except BlockingIOError:
        return False
    return True


def _receive_from(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and what descriptors came with it, which no program started from here gets."""
    descriptors = array("i")
    room = socket.CMSG_LEN(descriptors.itemsize)
    message, ancillary, _, _ = connection.recvmsg(_MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    """Return the other end's process, user and group."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close a forked child's copies, which would keep the others from hearing that its parent has let go."""
    for connections in list(_all):
        connections.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def _close(
    outgoing: dict[int, Any], incoming: dict[int, Any], processes: dict[int, int], pieces: dict[int, Any]
) -> None:
    for connection in (*outgoing.values(), *incoming.values()):
        connection.close()
    for descriptor in (*processes.values(), *(one for kept in pieces.values() for _, one in kept)):
        os.close(descriptor)
