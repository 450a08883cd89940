"""How the processes of a Buffer find each other on one machine, and authenticate each other.

Each rank listens at an abstract socket name and connects to every other rank's. Any process in the network namespace
can read such names and connect to them, so both ends of a connection prove that they know a secret, which has traveled
only through the ranks' own process group. The proof is a keyed digest over two fresh nonces, the two ranks and the
direction, so the secret itself is never sent, and no proof is valid twice or on another connection. Before that, only
messages of fixed sizes are accepted from a connection.

    connector: rank, nonce      listener: nonce, proof      connector: proof      listener: welcome

A stranger can neither make the ranks fail nor keep them waiting. A connection that has proved nothing after a while is
dropped, the oldest first if there are many; a rank whose connection was dropped this way, or that finds the backlog
full, tries again.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

SECRET_BYTES = 32
"""Size of each rank's part of the secret."""
PROOF_SECONDS = 5.0
"""How long a connection may take to prove itself."""

MAX_GUESTS = 128
"""How many connections that have proved nothing yet are kept at a time."""
_MAX_ACCEPTED = 32
"""Accepted at a time, so that a rank among many strangers is served before it is the oldest."""
_BACKLOG = 128
_RETRY_SECONDS = 0.01
NONCE_BYTES = 32
"""Size of the nonce that each end contributes to a proof."""
_HELLO = struct.Struct(f"=i{NONCE_BYTES}s")
ANSWER = struct.Struct(f"={NONCE_BYTES}s32s")
"""The listener's nonce, and its proof."""
WELCOME = b"welcome"
"""The listener's last message."""
LISTENER, CONNECTOR = b"listener", b"connector"
"""Roles of the two ends."""


class PeerGone(Exception):
    """A rank no longer listens, or has closed its end.

    Attributes
    ----------
    rank : int
        The rank.
    why : str
        What it has done.
    """

    def __init__(self, rank: int, why: str = "has closed the Buffer") -> None:
        self.rank, self.why = rank, why
        super().__init__(rank, why)


class PeersLate(Exception):
    """Some ranks did not come in time.

    Attributes
    ----------
    ranks : list of int
        These ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        super().__init__(self.ranks)


def make_socket() -> socket.socket:
    """Return a local socket that preserves message boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def listen() -> tuple[socket.socket, str]:
    """Return a socket that others can connect to, and its name, which cannot be predicted."""
    listener, name = make_socket(), f"\0deep_ep_py-{os.getpid()}-{secrets.token_hex(16)}"
    listener.bind(name)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener, name


def secret_of(parts: Iterable[bytes]) -> bytes:
    """Make the group's secret from what each rank has contributed, by rank."""
    return hashlib.sha256(b"".join(parts)).digest()


@dataclass
class Session:
    """One connection as both of its ends see it: the inputs of their proofs, and what else both can derive."""

    secret: bytes = field(repr=False)
    connector: int
    listener: int
    connector_nonce: bytes = b""
    listener_nonce: bytes = b""

    def digest(self, purpose: bytes) -> bytes:
        """Return 32 bytes that only the two ends know, different for each purpose and connection."""
        ranks = struct.pack("=ii", self.connector, self.listener)
        return hmac.digest(self.secret, purpose + ranks + self.connector_nonce + self.listener_nonce, "sha256")

    def proof(self, role: bytes) -> bytes:
        """Return the proof that the end with this role knows the secret."""
        return self.digest(role)

    def proves(self, role: bytes, proof: bytes) -> bool:
        """Return whether this is the valid proof of the end with this role."""
        return hmac.compare_digest(self.proof(role), proof)


class _Knock:
    """A connection that the caller makes to another rank."""

    def __init__(self, name: str, session: Session) -> None:
        self.rank = session.listener
        self.socket: socket.socket | None = None
        self._name, self._session, self._answered = name, session, False
        self._not_before = 0.0

    @property
    def due(self) -> bool:
        return self.socket is None and time.monotonic() >= self._not_before

    def connect(self) -> None:
        """Connect if there is room in the listener's backlog; otherwise, call this again after a while."""
        self._not_before = time.monotonic() + _RETRY_SECONDS
        self._answered = False
        self._session.connector_nonce = secrets.token_bytes(NONCE_BYTES)
        connection = make_socket()
        connection.setblocking(False)
        try:
            connection.connect(self._name)
            connection.send(_HELLO.pack(self._session.connector, self._session.connector_nonce))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):  # the backlog is full, or dropped at once
            connection.close()
            return
        except OSError:  # no process listens
            connection.close()
            raise PeerGone(self.rank) from None
        self.socket = connection

    def advance(self) -> bool:
        """Take the next message. Returns whether both ends have proved themselves."""
        assert self.socket is not None
        message = _receive(self.socket)
        if message is None:
            return False
        if self._answered and message == WELCOME:
            return True
        if self._answered or len(message) != ANSWER.size:
            self.close()  # this end was dropped as if it were a stranger
            return False
        self._session.listener_nonce, proof = ANSWER.unpack(message)
        # No other process can have bound the name, but a wrong proof is refused anyway.
        if not self._session.proves(LISTENER, proof):
            raise PeerGone(self.rank)
        self._answered = True
        try:
            self.socket.send(self._session.proof(CONNECTOR))
        except OSError:
            self.close()
        return False

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = None


class _Guest:
    """A connection that another process has made to this rank."""

    def __init__(self, connection: socket.socket, own: int, secret: bytes) -> None:
        self.socket, self._own, self._secret = connection, own, secret
        self._session: Session | None = None
        self.until = time.monotonic() + PROOF_SECONDS

    def advance(self, awaited: Iterable[int]) -> int | None:
        """Take the next message. Returns the rank of the other end once it has proved it.

        Raises
        ------
        OSError, ValueError
            The connection must be dropped.
        """
        message = _receive(self.socket)
        if message is None:
            return None
        if self._session is None:
            if len(message) != _HELLO.size:
                raise ValueError("not a rank's first message")
            rank, nonce = _HELLO.unpack(message)
            if rank not in awaited:
                raise ValueError("not an awaited rank")
            session = Session(self._secret, rank, self._own, nonce, secrets.token_bytes(NONCE_BYTES))
            self.socket.send(ANSWER.pack(session.listener_nonce, session.proof(LISTENER)))
            self._session = session
            return None
        if self._session.connector not in awaited or not self._session.proves(CONNECTOR, message):
            raise ValueError("not the rank that it claims to be")
        self.socket.send(WELCOME)
        return self._session.connector


class Meeting:
    """The meeting of one rank with all others. Sockets belong to the owner of the maps as soon as they are in them.

    Parameters
    ----------
    rank : int
        The caller.
    listener : socket.socket
        As returned by `listen`.
    names : dict
        The name at which each rank listens, by rank, including this one.
    secret : bytes
        The secret that only the ranks know.
    outgoing, incoming : dict
        Filled with the authenticated connections, by rank; they do not block.
    processes : dict
        Filled with a descriptor (pidfd) of each other rank's process, by rank, if the kernel supports it.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        names: dict[int, str],
        secret: bytes,
        outgoing: dict[int, socket.socket],
        incoming: dict[int, socket.socket],
        processes: dict[int, int],
    ) -> None:
        self._rank, self._listener, self._secret = rank, listener, secret
        self._outgoing, self._incoming, self._processes = outgoing, incoming, processes
        self._others = [peer for peer in names if peer != rank]
        self._knocks = {peer: _Knock(names[peer], Session(secret, rank, peer)) for peer in self._others}
        self._guests: list[_Guest] = []

    def run(self, seconds: float) -> None:
        """Return once all ranks are connected to each other.

        Raises
        ------
        PeerGone, PeersLate
            Some ranks have ended, or did not connect in time.
        """
        deadline = time.monotonic() + seconds
        try:
            while missing := [peer for peer in self._others if peer in self._knocks or peer not in self._incoming]:
                if time.monotonic() > deadline:
                    raise PeersLate(missing)
                self._connect()
                ready = self._poll(missing, deadline)
                ended = self._ended(missing, ready)
                for knock in [one for one in self._knocks.values() if one.socket and one.socket.fileno() in ready]:
                    self._answer(knock)
                for guest in [one for one in self._guests if one.socket.fileno() in ready]:
                    self._hear(guest)
                self._drop_guests(lambda guest: time.monotonic() > guest.until)
                if self._listener.fileno() in ready:
                    self._accept()
                for peer in ended:
                    if peer in self._knocks or peer not in self._incoming:
                        raise PeerGone(peer)
        finally:
            self._drop_guests(lambda _: True)
            for knock in self._knocks.values():
                knock.close()

    def _connect(self) -> None:
        for knock in self._knocks.values():
            if knock.due:
                knock.connect()
            # An old kernel has no pidfd, or hides other processes: then the sockets report the end of a process.
            if knock.socket is not None and knock.rank not in self._processes:
                with suppress(AttributeError, OSError):
                    self._processes[knock.rank] = os.pidfd_open(credentials(knock.socket)[0])

    def _poll(self, missing: list[int], deadline: float) -> set[int]:
        sockets = [self._listener, *(guest.socket for guest in self._guests)]
        sockets += [knock.socket for knock in self._knocks.values() if knock.socket is not None]
        sockets += [self._outgoing[peer] for peer in missing if peer in self._outgoing]
        processes = [self._processes[peer] for peer in missing if peer in self._processes]
        poller = select.poll()
        for descriptor in (*(one.fileno() for one in sockets), *processes):
            poller.register(descriptor, select.POLLIN)
        moments = [deadline, *(guest.until for guest in self._guests)]
        if any(knock.socket is None for knock in self._knocks.values()):
            moments.append(time.monotonic() + _RETRY_SECONDS)
        left = max(0.0, min(moments) - time.monotonic())
        return {descriptor for descriptor, _ in poller.poll(left * 1e3 + 1)}

    def _answer(self, knock: _Knock) -> None:
        if knock.advance():
            assert knock.socket is not None
            self._outgoing[knock.rank] = knock.socket
            del self._knocks[knock.rank]

    def _hear(self, guest: _Guest) -> None:
        try:
            rank = guest.advance([peer for peer in self._others if peer not in self._incoming])
        except (OSError, ValueError):
            self._drop_guests(lambda one: one is guest)
            return
        if rank is not None:
            self._incoming[rank] = guest.socket
            self._guests.remove(guest)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._guests:
                    raise
                self._drop_guests(lambda one: one is self._guests[0])
                continue
            # Another user's process cannot be a rank.
            if credentials(connection)[1] != os.geteuid():
                connection.close()
                continue
            connection.setblocking(False)
            self._guests.append(_Guest(connection, self._rank, self._secret))
            if len(self._guests) > MAX_GUESTS:
                self._drop_guests(lambda one: one is self._guests[0])

    def _drop_guests(self, which: Callable[[_Guest], bool]) -> None:
        dropped = [guest for guest in self._guests if which(guest)]
        self._guests = [guest for guest in self._guests if guest not in dropped]
        for guest in dropped:
            guest.socket.close()

    def _ended(self, missing: list[int], ready: set[int]) -> list[int]:
        """Return the ranks that have closed their end or whose process has ended.

        Nothing else becomes readable on an authenticated connection that this rank has made.
        """
        return [
            peer
            for peer in missing
            if (peer in self._outgoing and self._outgoing[peer].fileno() in ready)
            or self._processes.get(peer, -1) in ready
        ]


def credentials(connection: socket.socket) -> tuple[int, ...]:
    """Return the process, user and group of the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))


def _receive(connection: socket.socket) -> bytes | None:
    """Return a message, empty if the other end has closed, or None if there is none. Descriptors are not accepted."""
    try:
        return connection.recv(ANSWER.size + 1)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
