"""Private connections between the processes of a Buffer: what they exchange once they have met, and how they notice
that one has ended.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from deep_ep_py.bootstrap.far_meeting import FarMeeting, Met, Place
from deep_ep_py.bootstrap.handshake import Meeting, PeerGone, PeersLate
from deep_ep_py.bootstrap.silence import silent_text, unheard_text
from deep_ep_py.core.native import C
from deep_ep_py.errors import DeepEPError

EXCHANGE_SECONDS = 1800.0
"""How long ranks wait for others that live: as process groups do. That one has died they hear at once."""

Piece = tuple[int, int]
"""A part of a rank's heap: offset and bytes."""

_MAX_BYTES = 1 << 16
_PIECE, _PIECE_FORMAT = b"piece", "=5sQQ"
"""What a message about a piece begins with, as no JSON does."""
_DYING_MS = 50
"""How long after its sockets a process may still seem to live."""


class Connections:
    """Of one rank to all others. It does what a `Bootstrap` does, and hears at once when a process ends.

    Each rank connects to each other on its machine, as `handshake` says: it sends on its own connections and receives
    on the others'. Their addresses are in the abstract namespace and gone once all have met, so a crash leaves nothing
    behind. Of each process there is also a descriptor (pidfd) that tells of its end even where another one keeps its
    sockets open. Ranks of other machines are connected by TCP, as `far_meeting` says, and a `native.C.Mesh` serves
    these connections.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    pids : list of int
        The ranks' processes.
    machines : list of int
        By rank: which machine it is on, counted from 0 in the order of ranks.
    mesh : native.C.Mesh or None
        To the ranks of other machines; None where there are none.
    address : str
        At which these reach this machine; empty where there are none.
    """

    in_process = False

    def __init__(self, rank: int, size: int, pids: list[int], numbered_alike: Iterable[int] = ()) -> None:
        self.rank, self.size, self.pids = rank, size, pids
        self.machines = [0] * size
        self.mesh: C.Mesh | None = None
        self.address = ""
        self._addresses: dict[int, str] = {}  # of ranks on other machines
        self._meeting: FarMeeting | None = None
        self._numbered_alike = frozenset(numbered_alike) - {rank}  # ranks whose pids name the same processes here
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._pieces: dict[int, deque[tuple[Piece, int]]] = defaultdict(deque)
        self._handed: dict[int, int] = defaultdict(int)  # the end of what each has got of this rank's heap
        _all.add(self)

    def close(self) -> None:
        """Let go of all of them. The others take it that this rank has left. Closed once, it does nothing more."""
        _all.discard(self)
        self.drop({*self._outgoing, *self._incoming, *self._processes, *self._pieces, *self._addresses})
        self.mesh = None

    def drop(self, ranks: Iterable[int]) -> None:
        """Let go of some ranks: from now on the others exchange without them."""
        for rank in ranks:
            self._dropped.add(rank)
            for sockets in (self._outgoing, self._incoming):
                if rank in sockets:
                    sockets.pop(rank).close()
            if rank in self._processes:
                os.close(self._processes.pop(rank))
            for _, descriptor in self._pieces.pop(rank, ()):
                os.close(descriptor)
            if self.mesh is not None:
                self.mesh.drop(rank)

    def close_in_child(self) -> None:
        """Close a forked child's copies."""
        if self._meeting is not None:
            self._meeting.close_in_child()
        if self.mesh is not None:
            self.mesh.close_in_child()
            self.mesh = None
        self.close()

    @property
    def _connected(self) -> C.Mesh:
        assert self.mesh is not None, "ranks of other machines have been met"
        return self.mesh

    def is_far(self, rank: int) -> bool:
        """Tell whether a rank is on another machine."""
        return self.machines[rank] != self.machines[self.rank]

    def process_of(self, rank: int) -> str:
        """Name a rank's process."""
        machine = f" on {self._addresses[rank]}" if rank in self._addresses else ""
        return f"pid {self.pids[rank]}{machine}"

    def watched(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return pairs of a rank of this machine and a descriptor: of sockets, which become readable when that rank
        ends or lets go, and of processes, readable when these have ended.
        """
        sockets = [(rank, connection.fileno()) for rank, connection in self._outgoing.items()]
        return sockets, list(self._processes.items())

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank: what JSON can say, in 64 KiB. Nothing that comes from a socket is code.

        Raises
        ------
        TypeError, ValueError
            The value is something else, or too large. Nothing has been sent.
        DeepEPError
            If a process has ended, or its rank has given up, or did not come in time.
        """
        message = json.dumps(value, allow_nan=False).encode()
        if len(message) > _MAX_BYTES:
            raise ValueError(f"value: expected at most {_MAX_BYTES} bytes as JSON, not {len(message)}")
        values: list[Any] = [None] * self.size
        values[self.rank] = json.loads(message)
        far = [rank for rank in self._addresses if rank not in self._dropped]
        for rank in far:
            self._connected.send(rank, message)
        self._send(message)
        for rank, message, _ in self._receive(far):
            try:
                values[rank] = json.loads(message)
            except ValueError:
                raise DeepEPError(f"rank {self.rank}: rank {rank} is in another exchange: it sent no value") from None
        return values

    def exchange_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give every other rank of this machine a descriptor; return theirs, the caller's to close."""
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
        """Give every other rank of this machine a descriptor of a piece of this rank's heap, for its `next_piece`;
        pieces in their order. It never waits: false where it would have to, and then the caller repeats it later, for
        the ranks that have not got it.
        """
        message, end = struct.pack(_PIECE_FORMAT, _PIECE, *piece), sum(piece)
        missing = [rank for rank in self._outgoing if self._handed[rank] < end]
        for rank in missing:
            try:
                if _send_to(self._outgoing[rank], message, [descriptor]):
                    self._handed[rank] = end
            except ConnectionError:
                self._handed[rank] = end  # its rank has ended: a rank that waits for it will be told
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
                    # A process that has ended leaves no room, though another one may hold its sockets.
                    if _is_readable(self._processes.get(rank)):
                        self._raise_gone(rank)
                    self._poll({rank: connection}, deadline, select.POLLOUT)
            except OSError:
                self._raise_gone(rank)

    def _receive(self, far: Iterable[int] = ()) -> Iterator[tuple[int, bytes, list[int]]]:
        """One message of each other rank of this machine, and of some of others, as they come."""
        missing, far_missing = dict(self._incoming), set(far)
        deadline = time.monotonic() + EXCHANGE_SECONDS
        while missing or far_missing:
            for rank in self._poll(missing, deadline, select.POLLIN, far_missing):
                try:
                    message, descriptors = _receive_from(missing[rank])
                except (BlockingIOError, ConnectionError):  # its process has ended, and that was its last message
                    message, descriptors = b"", []
                if not message:
                    self._raise_gone(rank)
                if self._keep_piece(rank, message, descriptors):
                    continue  # the message that is waited for is behind it
                del missing[rank]
                yield rank, message, descriptors
            for rank in sorted(far_missing):
                ended = self._connected.state(rank) != C.Mesh.State.HEARD  # before its last message is looked for
                if (told := self._connected.receive(rank)) is not None:
                    far_missing.discard(rank)
                    yield rank, told, []
                elif ended:
                    self._raise_gone(rank)

    def meet(self, listener: socket.socket, names: dict[int, str], secret: bytes) -> None:
        """Connect to all others of this machine, which listen at these names, and wait until they have.

        Raises
        ------
        DeepEPError
            As `all_gather`.
        """
        meeting = Meeting(self.rank, listener, names, secret, self._outgoing, self._incoming, self._processes)
        try:
            meeting.run(EXCHANGE_SECONDS)
        except PeerGone as gone:
            self._raise_gone(gone.rank)
        except PeersLate as late:
            self._raise_late(late.ranks)
        except OSError as error:  # of this machine: too many open files, say
            raise DeepEPError(f"rank {self.rank}: the other ranks cannot be connected to: {error}") from error

    def meet_far(self, listener: socket.socket, places: list[Place], secret: bytes) -> None:
        """Connect to all ranks of other machines, which listen at these places, and wait until they have.

        Raises
        ------
        DeepEPError
            As `all_gather`, or a machine cannot be reached.
        """
        self._addresses = {place.rank: place.address for place in places}
        sockets, processes = self.watched()
        near: dict[int, list[int]] = defaultdict(list)
        for rank, descriptor in (*sockets, *processes):
            near[rank].append(descriptor)
        self._meeting = FarMeeting(self.rank, listener, places, secret, near)
        failed: PeerGone | PeersLate | None = None
        try:
            met = self._meeting.run(EXCHANGE_SECONDS)
        except (PeerGone, PeersLate) as error:
            failed = error
        except OSError as error:
            raise DeepEPError(f"rank {self.rank}: other machines cannot be connected to: {error}") from error
        if isinstance(failed, PeerGone):
            self._raise_gone(failed.rank, failed.why)
        if failed is not None:
            self._raise_late(failed.ranks)
        try:
            self.mesh = C.Mesh([self._end(rank, one) for rank, one in sorted(met.items())])
        except RuntimeError as error:  # too many open files, say
            raise DeepEPError(f"rank {self.rank}: connections to other machines cannot be kept: {error}") from error
        finally:
            self._meeting = None
            for one in met.values():
                one.socket.close()  # the mesh has copies

    def _end(self, rank: int, met: Met) -> C.Mesh.End:
        machine = str(self.machines[rank])
        return C.Mesh.End(rank=rank, socket=met.socket.fileno(), machine=machine, own=met.own, theirs=met.theirs)

    def _poll(
        self, connections: dict[int, socket.socket], deadline: float, events: int, far: Iterable[int] = ()
    ) -> list[int]:
        """Wait for some ranks' connections, or for the end of their processes, even if another process still holds one
        of their sockets, or for news of ranks on other machines; -> the ranks of this one with news.
        """
        owners = {connection.fileno(): rank for rank, connection in connections.items()}
        poller = select.poll()
        for descriptor in owners:
            poller.register(descriptor, events)
        for rank in connections:
            if rank in self._processes:
                owners[self._processes[rank]] = rank
                poller.register(self._processes[rank], select.POLLIN)
        if far:
            self._connected.clear_news()  # before they are asked for what has come
            if any(self._connected.has_news(rank) for rank in far):
                return []
            poller.register(self._connected.news, select.POLLIN)
        left = max(0.0, deadline - time.monotonic())
        ready = {descriptor for descriptor, _ in poller.poll(left * 1e3)}
        if not ready:
            self._raise_late({*connections, *far})
        return sorted({owners[descriptor] for descriptor in ready if descriptor in owners})

    def _raise_late(self, ranks: Iterable[int]) -> NoReturn:
        raise DeepEPError(f"rank {self.rank}: ranks {sorted(ranks)} did not come within {EXCHANGE_SECONDS:g} s")

    def _raise_gone(self, rank: int, how: str = "has let go of the Buffer") -> NoReturn:
        """Say why. A rank that has let go may have done so because another's process has died."""
        state = C.Mesh.State.HEARD if self.mesh is None else self.mesh.state(rank)
        if state == C.Mesh.State.SILENT:
            raise DeepEPError(f"rank {self.rank}: {silent_text(rank, self.process_of(rank))}")
        if state == C.Mesh.State.UNHEARD:
            raise DeepEPError(f"rank {self.rank}: {unheard_text(rank, self.process_of(rank), self.rank)}")
        died, unknown = self._died()
        if died:
            deaths = (f"rank {one}'s process ({self.process_of(one)}) has died" for one in died)
            raise DeepEPError(f"rank {self.rank}: {'; '.join(deaths)}")
        perhaps = f", or its process ({self.process_of(rank)}) has died" if rank in unknown else ""
        raise DeepEPError(f"rank {self.rank}: rank {rank} {how}{perhaps}")

    def _died(self) -> tuple[list[int], set[int]]:
        """Return the ranks whose processes have died, and those of which nothing tells whether theirs has."""
        died, unknown, opened = set(), set(), {}
        # Before all have met there may be some without a descriptor. Those that were left out have been reported.
        for rank in {*range(self.size)} - {self.rank, *self._processes} - self._dropped:
            if rank not in self._numbered_alike:
                unknown.add(rank)
                continue
            try:
                opened[rank] = os.pidfd_open(self.pids[rank])
            except ProcessLookupError:
                died.add(rank)
            except (AttributeError, OSError):  # an old kernel has none, or it hides other processes
                unknown.add(rank)
        poller = select.poll()
        owners = {descriptor: rank for rank, descriptor in (*self._processes.items(), *opened.items())}
        try:
            for descriptor in owners:
                poller.register(descriptor, select.POLLIN)
            died |= {owners[descriptor] for descriptor, _ in poller.poll(_DYING_MS)}
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return sorted(died), unknown


# Sockets of ranks that have met never block: a caller that wants to wait polls. `socket.send_fds` and `socket.recv_fds`
# do not work here: CPython's ignore their flags.


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
    message, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def _is_readable(descriptor: int | None) -> bool:
    if descriptor is None:
        return False
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


_all: set[Connections] = set()
"""Those that are open. They close when their owner says so, never by a collection: the others would take it that this
rank's kernels have ended. A process that just ends is told of by its end."""


def _let_go_in_child() -> None:
    """Close a forked child's copies, which would keep the others from hearing that its parent has let go."""
    for connections in list(_all):
        connections.close_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
