"""Private connections between the processes of a Buffer: their exchanges once they have met, and the detection of
processes that have ended.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from deep_ep_py.base.native import C
from deep_ep_py.errors import DeepEPError
from deep_ep_py.transport.bootstrap.handshake import Meeting, PeerGone, PeersLate
from deep_ep_py.transport.bootstrap.machine_rendezvous import MachineRendezvous, Met, Place
from deep_ep_py.transport.bootstrap.silence import silent_text, unheard_text
from deep_ep_py.transport.bootstrap.together import told_of

EXCHANGE_SECONDS = 1800.0
"""How long ranks wait for live ones, as in process groups. The death of a rank is noticed at once."""

Piece = tuple[int, int]
"""A part of a rank's heap: offset and bytes."""

_MAX_BYTES = 1 << 16
_PIECE, _PIECE_FORMAT = b"piece", "=5sQQ"
"""The first bytes of a message about a piece, with which no JSON begins."""
_NOTE = b"note"
"""Likewise, of a note."""
_DYING_MS = 50
"""How long a process may still seem alive after its sockets have closed."""


class Connections:
    """The connections of one rank to all others: a `Bootstrap` that also notices at once when a process ends.

    Each rank connects to every other rank on its machine, as `handshake` describes: it sends on its own connections and
    receives on the others'. Their addresses are in the abstract namespace and vanish once all have met, so a crash
    leaves nothing behind. For each process there is also a descriptor (pidfd) that reports its end even if another
    process keeps its sockets open. Ranks on other machines are connected by TCP, as `machine_rendezvous` describes, and
    a `native.C.Mesh` serves these connections.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    pids : list of int
        The ranks' processes.
    machines : list of int
        The machine of each rank, numbered from 0 in the order of ranks.
    mesh : native.C.Mesh or None
        Connections to the ranks on other machines; None if there are none.
    address : str
        The address at which those ranks reach this machine; empty if there are none.
    """

    in_process = False

    def __init__(self, rank: int, size: int, pids: list[int], numbered_alike: Iterable[int] = ()) -> None:
        self.rank, self.size, self.pids = rank, size, pids
        self.machines = [0] * size
        self.mesh: C.Mesh | None = None
        self.address = ""
        self._addresses: dict[int, str] = {}  # addresses of ranks on other machines
        self._meeting: MachineRendezvous | None = None
        self._numbered_alike = frozenset(numbered_alike) - {rank}  # ranks whose pids are valid here
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}
        self._dropped: set[int] = set()
        # Without a descriptor where this process had too many files open to receive it.
        self._pieces: dict[int, deque[tuple[Piece, int | None]]] = defaultdict(deque)
        self._receiving = threading.RLock()
        # Messages of exchanges that this rank has not come to yet.
        self._early: dict[int, deque[tuple[bytes, list[int]]]] = defaultdict(deque)
        self._notes: dict[int, Any] = {}
        # The rank that failed first, and what it has told.
        self._first_failure: tuple[int, str, bool] | None = None
        self._handed: dict[int, int] = defaultdict(int)  # by rank: the end of what it has received of this heap
        _all.add(self)

    def leave(self, failed: BaseException) -> None:
        """Tell the other ranks why this one leaves, and close. If another rank has failed first, they are told that."""
        why = (self.rank, *told_of(failed)) if self._first_failure is None else self._first_failure
        message = _note({"left": why})
        self._tell(message)
        for rank in self._addresses:
            if self.mesh is not None and rank not in self._dropped:
                self.mesh.send(rank, message)
        self.close()

    def close(self) -> None:
        """Close all connections, which tells the others that this rank has left. Calls after the first do nothing."""
        _all.discard(self)
        self.drop({*self._outgoing, *self._incoming, *self._processes, *self._pieces, *self._addresses})
        self.mesh = None

    def drop(self, ranks: Iterable[int]) -> None:
        """Close the connections to some ranks; exchanges continue without them."""
        for rank in ranks:
            self._dropped.add(rank)
            for sockets in (self._outgoing, self._incoming):
                if rank in sockets:
                    sockets.pop(rank).close()
            if rank in self._processes:
                os.close(self._processes.pop(rank))
            for _, descriptor in self._pieces.pop(rank, ()):
                if descriptor is not None:
                    os.close(descriptor)
            for _, descriptors in self._early.pop(rank, ()):
                for descriptor in descriptors:
                    os.close(descriptor)
            self._notes.pop(rank, None)
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
        """Return whether a rank is on another machine."""
        return self.machines[rank] != self.machines[self.rank]

    def process_of(self, rank: int) -> str:
        """Name a rank's process."""
        machine = f" on {self._addresses[rank]}" if rank in self._addresses else ""
        return f"pid {self.pids[rank]}{machine}"

    def watched(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return two lists of pairs of a rank on this machine and a descriptor.

        The first has sockets, which become readable when the rank ends or closes them; the second has processes, which
        become readable when they have ended.
        """
        sockets = [(rank, connection.fileno()) for rank, connection in self._outgoing.items()]
        return sockets, list(self._processes.items())

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. A value is JSON of at most 64 KiB: no code is taken from a socket.

        Raises
        ------
        TypeError, ValueError
            The value is not representable or too large. Nothing has been sent.
        DeepEPError
            A process has ended, or its rank has given up or did not come in time.
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
        """Give every other rank on this machine a descriptor; return theirs, which the caller must close."""
        self._send(b"descriptor", [descriptor])
        theirs: dict[int, int] = {}
        try:
            for rank, _, descriptors in self._receive():
                theirs[rank] = self._received(rank, _first(descriptors))
        except BaseException:
            for received in theirs.values():
                os.close(received)
            raise
        return theirs

    def hand_over(self, piece: Piece, descriptor: int) -> bool:
        """Give every other rank on this machine a descriptor of a piece of this rank's heap, for its `next_piece`.

        Pieces must be handed over in order. Never waits: returns False if it would have to, and the caller repeats the
        call later, for the ranks that have not received the piece.
        """
        message, end = struct.pack(_PIECE_FORMAT, _PIECE, *piece), sum(piece)
        missing = [rank for rank in self._outgoing if self._handed[rank] < end]
        for rank in missing:
            try:
                if _send_to(self._outgoing[rank], message, [descriptor]):
                    self._handed[rank] = end
            except ConnectionError:
                self._handed[rank] = end  # the rank has ended; ranks that wait for it will be notified
            except OSError:  # for example, too many of this user's descriptors are in flight
                pass
        return all(self._handed[rank] >= end for rank in missing)

    def next_piece(self, rank: int) -> tuple[Piece, int]:
        """Return the next piece that a rank has handed over, and its descriptor, both valid until `drop_piece`.

        Raises
        ------
        DeepEPError
            There is none.
        """
        while not self._pieces[rank]:
            try:
                received = _receive_from(self._incoming[rank])
            except OSError:
                received = b"", []
            if not self._keep(rank, *received):
                raise DeepEPError(f"rank {self.rank}: rank {rank} has announced memory that it has not handed over")
        piece, descriptor = self._pieces[rank][0]
        return piece, self._received(rank, descriptor)

    def drop_piece(self, rank: int) -> None:
        """Close the piece that `next_piece` returned, and advance to the next."""
        _, descriptor = self._pieces[rank].popleft()
        if descriptor is not None:
            os.close(descriptor)

    def leave_note(self, value: dict[str, Any]) -> None:
        """Send values to every other rank on this machine, for its `notes`. Never waits: a rank may miss them."""
        self._tell(_note(value))

    def _tell(self, message: bytes) -> None:
        for connection in list(self._outgoing.values()):  # another thread may close the connections
            with suppress(OSError):  # the rank has ended
                _send_to(connection, message, [])

    def notes(self) -> dict[int, dict[str, Any]]:
        """Return the latest value of each name that the other ranks on this machine have left, by rank. Never waits."""
        if self._receiving.acquire(blocking=False):  # otherwise another thread is in an exchange, and takes them in
            try:
                for rank, connection in list(self._incoming.items()):
                    self._take_in(rank, connection)
            finally:
                self._receiving.release()
        return {rank: dict(values) for rank, values in self._notes.copy().items()}

    def _take_in(self, rank: int, connection: socket.socket) -> None:
        with suppress(OSError):  # there are no more messages
            while True:
                message, descriptors = _receive_from(connection)
                if not message:
                    return  # the rank has ended
                if not self._keep(rank, message, descriptors):
                    self._early[rank].append((message, descriptors))

    def _keep(self, rank: int, message: bytes, descriptors: list[int]) -> bool:
        """Keep a message that no exchange awaits. Returns False if it is of an exchange."""
        if message.startswith(_NOTE):
            self._notes.setdefault(rank, {}).update(json.loads(message.removeprefix(_NOTE)))
            return True
        if not message.startswith(_PIECE):
            return False
        _, offset, size = struct.unpack(_PIECE_FORMAT, message)
        self._pieces[rank].append(((offset, size), _first(descriptors)))
        return True

    def _received(self, rank: int, descriptor: int | None) -> int:
        if descriptor is None:  # the kernel has dropped it
            raise DeepEPError(f"rank {self.rank}: memory of rank {rank} cannot be mapped: too many files are open")
        return descriptor

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        deadline = time.monotonic() + EXCHANGE_SECONDS
        for rank, connection in self._outgoing.items():
            try:
                while not _send_to(connection, message, descriptors):
                    # A process that has ended never makes room, though another process may hold its sockets.
                    if _is_readable(self._processes.get(rank)):
                        self._raise_gone(rank)
                    self._poll({rank: connection}, deadline, select.POLLOUT)
            except OSError:
                self._raise_gone(rank)

    def _receive(self, far: Iterable[int] = ()) -> Iterator[tuple[int, bytes, list[int]]]:
        """Yield one message from each other rank on this machine, and from the `far` ranks, as they arrive."""
        with self._receiving:
            yield from self._receive_each(dict(self._incoming), set(far))

    def _receive_each(
        self, missing: dict[int, socket.socket], far_missing: set[int]
    ) -> Iterator[tuple[int, bytes, list[int]]]:
        deadline = time.monotonic() + EXCHANGE_SECONDS
        for rank in [rank for rank in missing if self._early[rank]]:
            del missing[rank]
            yield rank, *self._early[rank].popleft()
        while missing or far_missing:
            for rank in self._poll(missing, deadline, select.POLLIN, far_missing):
                try:
                    message, descriptors = _receive_from(missing[rank])
                except (BlockingIOError, ConnectionError):  # its process has ended, and there are no more messages
                    message, descriptors = b"", []
                if not message:
                    self._raise_gone(rank)
                if self._keep(rank, message, descriptors):
                    continue  # the awaited message follows it
                del missing[rank]
                yield rank, message, descriptors
            for rank in sorted(far_missing):
                ended = self._connected.state(rank) != C.Mesh.State.HEARD  # read before its last message is
                if (told := self._connected.receive(rank)) is not None:
                    if self._keep(rank, told, []):
                        continue
                    far_missing.discard(rank)
                    yield rank, told, []
                elif ended:
                    self._raise_gone(rank)

    def meet(self, listener: socket.socket, names: dict[int, str], secret: bytes) -> None:
        """Connect to all other ranks on this machine, which listen at these names, and wait until they have connected.

        Raises
        ------
        DeepEPError
            As for `all_gather`.
        """
        meeting = Meeting(self.rank, listener, names, secret, self._outgoing, self._incoming, self._processes)
        try:
            meeting.run(EXCHANGE_SECONDS)
        except PeerGone as gone:
            self._raise_gone(gone.rank)
        except PeersLate as late:
            self._raise_late(late.ranks)
        except OSError as error:  # of this machine: for example, too many open files
            raise DeepEPError(f"rank {self.rank}: cannot connect to the other ranks: {error}") from error

    def meet_far(self, listener: socket.socket, places: list[Place], secret: bytes) -> None:
        """Connect to all ranks on other machines, which listen at these places, and wait until they have connected.

        Raises
        ------
        DeepEPError
            As for `all_gather`, or a machine cannot be reached.
        """
        self._addresses = {place.rank: place.address for place in places}
        sockets, processes = self.watched()
        near: dict[int, list[int]] = defaultdict(list)
        for rank, descriptor in (*sockets, *processes):
            near[rank].append(descriptor)
        self._meeting = MachineRendezvous(self.rank, listener, places, secret, near)
        failed: PeerGone | PeersLate | None = None
        try:
            met = self._meeting.run(EXCHANGE_SECONDS)
        except (PeerGone, PeersLate) as error:
            failed = error
        except OSError as error:
            raise DeepEPError(f"rank {self.rank}: cannot connect to other machines: {error}") from error
        if isinstance(failed, PeerGone):
            self._raise_gone(failed.rank, failed.why)
        if failed is not None:
            self._raise_late(failed.ranks)
        try:
            self.mesh = C.Mesh([self._end(rank, one) for rank, one in sorted(met.items())])
        except RuntimeError as error:  # for example, too many open files
            raise DeepEPError(f"rank {self.rank}: cannot keep the connections to other machines: {error}") from error
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
        """Wait for events on some ranks' connections, for the end of their processes, or for news from the `far` ranks.

        The end of a process is noticed even if another process still holds one of its sockets. Returns the ranks on
        this machine that have news.
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
            self._connected.clear_news()  # before they are asked what has arrived
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

    def _raise_gone(self, rank: int, how: str = "has closed the Buffer") -> NoReturn:
        """Raise with the cause: a rank may have closed the Buffer because another rank's process has died.

        A rank that could not make the Buffer has told why, as the same exception that it has raised itself.
        """
        if told := next((note["left"] for note in self.notes().values() if "left" in note), None):
            self._first_failure = (origin, why, by_argument) = (int(told[0]), str(told[1]), bool(told[2]))
            raise (ValueError if by_argument else DeepEPError)(f"rank {origin}: {why}")
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
        """Return the ranks whose processes have died, and the ranks for which that cannot be determined."""
        died, unknown, opened = set(), set(), {}
        # Before all have met, some may have no descriptor yet. Ranks that were left out have already been reported.
        for rank in {*range(self.size)} - {self.rank, *self._processes} - self._dropped:
            if rank not in self._numbered_alike:
                unknown.add(rank)
                continue
            try:
                opened[rank] = os.pidfd_open(self.pids[rank])
            except ProcessLookupError:
                died.add(rank)
            except (AttributeError, OSError):  # an old kernel has no pidfd, or hides other processes
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


def _note(value: dict[str, Any]) -> bytes:
    return _NOTE + json.dumps(value).encode()


# Sockets of ranks that have met never block: a caller that wants to wait polls. `socket.send_fds` and `socket.recv_fds`
# cannot be used here, because CPython's versions ignore their flags.


def _send_to(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> bool:
    """Send a message with descriptors. Returns False, and sends nothing, if there is no room for it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    try:
        connection.sendmsg([message], rights)
    except BlockingIOError:
        return False
    return True


def _receive_from(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and the descriptors that came with it, which are not inherited by programs started here."""
    descriptors = array("i")
    room = socket.CMSG_LEN(descriptors.itemsize)
    message, ancillary, _, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)


def _first(descriptors: list[int]) -> int | None:
    return descriptors[0] if descriptors else None


def _is_readable(descriptor: int | None) -> bool:
    if descriptor is None:
        return False
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


_all: set[Connections] = set()
"""The open ones. They are closed only by their owner, never by garbage collection, which would tell the others that
this rank's kernels have ended. When a process just ends, its end is what the others notice."""


def _let_go_in_child() -> None:
    """Close a forked child's copies, which would keep the others from noticing that its parent has closed."""
    for connections in list(_all):
        connections.close_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
