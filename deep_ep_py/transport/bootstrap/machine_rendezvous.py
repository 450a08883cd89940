"""How ranks on different machines connect pairwise and authenticate each other.

Until all ranks have met, any machine on the network can connect to the port at which a rank listens. So both ends
prove, as `handshake` describes, that they know a secret, which has traveled only through the ranks' own process group,
and each direction of the connection gets its own key for what follows. Of two ranks, the lower connects.

    connector: magic, rank, nonce   listener: nonce, proof   connector: proof   listener: welcome

A stranger, garbage or a replayed hello is refused and logged, and keeps no rank waiting. An attacker who can see or
alter the traffic between the machines is not kept out: rows, and what networks need to write them, are not encrypted.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deep_ep_py.base.environment import ADDRESS, SECRET
from deep_ep_py.errors import DeepEPError
from deep_ep_py.transport.bootstrap.handshake import (
    ANSWER,
    CONNECTOR,
    LISTENER,
    MAX_GUESTS,
    NONCE_BYTES,
    PROOF_SECONDS,
    WELCOME,
    PeerGone,
    PeersLate,
    Session,
)
from deep_ep_py.transport.bootstrap.machines import bound_silence, make_connection

_log = logging.getLogger("deep_ep_py")

CONNECT_SECONDS = 60.0
"""How long a machine may be unreachable; all ranks listen before any connects."""

_MAGIC = b"deep_ep1"
_HELLO = struct.Struct(f"=8si{NONCE_BYTES}s")
_PROOF_BYTES = ANSWER.size - NONCE_BYTES
_RETRY_SECONDS = 0.1
_LOOK_SECONDS = 0.5
_KEY_BYTES = 16
_OF_A_GUEST = (errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
"""Errors of `accept` for a connection that failed before it was accepted."""
_MAX_LOGGED = 20


@dataclass(frozen=True)
class Place:
    """The address at which a rank on another machine listens."""

    rank: int
    address: str
    port: int


@dataclass(frozen=True)
class Met:
    """A connection to an authenticated rank, with the keys for what this end sends and receives."""

    socket: socket.socket
    own: bytes = field(repr=False)
    theirs: bytes = field(repr=False)


class _Refused(Exception):
    """The other end is not an awaited rank."""


class _NothingSaid(EOFError):
    """The other end has closed without sending anything, as ranks do to check whether this one listens."""


class MachineRendezvous:
    """The meeting of one rank with all ranks on other machines.

    Parameters
    ----------
    rank : int
        The caller.
    listener : socket.socket
        As returned by `listen_at`.
    places : list of Place
        The ranks on other machines.
    secret : bytes
        The secret that only the ranks know.
    near : dict
        For ranks that have already been met, descriptors that become readable when they end.
    """

    def __init__(
        self, rank: int, listener: socket.socket, places: list[Place], secret: bytes, near: dict[int, list[int]]
    ) -> None:
        self._rank, self._listener, self._secret, self._near = rank, listener, secret, near
        self._places = {place.rank: place for place in places}
        self._met: dict[int, Met] = {}
        self._guests: dict[socket.socket, asyncio.Task[None]] = {}  # in order of arrival
        self._knocking: set[socket.socket] = set()
        self._refused = 0

    def run(self, seconds: float) -> dict[int, Met]:
        """Return the connections by rank once all exist.

        Raises
        ------
        PeerGone, PeersLate
            Some ranks have ended, or did not connect in time.
        DeepEPError
            A machine cannot be reached.
        """
        try:
            _run(self._meet(seconds))
        except BaseException:
            for met in self._met.values():
                met.socket.close()
            raise
        return self._met

    def close_in_child(self) -> None:
        """Close a forked child's copies, which would make this rank seem to listen, or stay, after it has ended."""
        met = [met.socket for met in self._met.values()]
        for one in (self._listener, *met, *self._guests, *self._knocking):
            one.close()

    async def _meet(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        for rank, descriptors in self._near.items():
            for descriptor in descriptors:
                loop.add_reader(descriptor, self._fail, PeerGone(rank))
        tasks = [
            asyncio.create_task(self._knock(place) if place.rank > self._rank else self._look_for(place))
            for place in self._places.values()
        ]
        tasks.append(asyncio.create_task(self._accept()))
        for task in tasks:
            task.add_done_callback(self._fail_with)
        try:
            await asyncio.wait_for(self._ended, seconds)
        except asyncio.TimeoutError:
            raise PeersLate(self._places.keys() - self._met.keys()) from None
        finally:
            for descriptor in sum(self._near.values(), []):
                loop.remove_reader(descriptor)
            for met in self._met.values():
                loop.remove_reader(met.socket)
            for task in (*tasks, *self._guests.values()):
                task.cancel()
            await asyncio.gather(*tasks, *self._guests.values(), return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _fail_with(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _keep(self, rank: int, met: Met) -> None:
        """Record an authenticated rank, and watch its connection until all have met."""
        self._met[rank] = met
        self._guests.pop(met.socket, None)

        def look() -> None:
            try:
                if not met.socket.recv(1, socket.MSG_PEEK):
                    self._fail(PeerGone(rank))
            except BlockingIOError:
                return
            except OSError:
                self._fail(PeerGone(rank))
            loop.remove_reader(met.socket)  # readable with data: it has met all ranks and continues

        loop = asyncio.get_running_loop()
        loop.add_reader(met.socket, look)
        if len(self._met) == len(self._places) and not self._ended.done():
            self._ended.set_result(None)

    async def _knock(self, place: Place) -> None:
        """Connect to a rank."""
        loop = asyncio.get_running_loop()
        until = loop.time() + CONNECT_SECONDS
        while True:
            connection = make_connection(place.address)
            self._knocking.add(connection)
            try:
                await asyncio.wait_for(loop.sock_connect(connection, (place.address, place.port)), CONNECT_SECONDS)
                until = loop.time() + CONNECT_SECONDS  # it is reachable
                met = await self._greet(connection, place.rank)
            except (OSError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
                connection.close()
                if isinstance(error, ConnectionRefusedError):
                    raise PeerGone(place.rank, _refusal(place)) from None
                if loop.time() > until:
                    raise DeepEPError(
                        f"rank {self._rank}: rank {place.rank} cannot be reached at {place.address}, port "
                        f"{place.port} ({str(error) or 'no answer'}): expected the addresses at which machines reach "
                        f"each other; {ADDRESS} names this machine's"
                    ) from None
                await asyncio.sleep(_RETRY_SECONDS)
            except BaseException:
                connection.close()
                raise
            else:
                self._keep(place.rank, met)
                return
            finally:
                self._knocking.discard(connection)

    async def _look_for(self, place: Place) -> None:
        """Raise if a rank that should connect to this one has ended, in which case nothing listens at its port."""
        loop = asyncio.get_running_loop()
        while place.rank not in self._met:
            await asyncio.sleep(_LOOK_SECONDS)
            with make_connection(place.address) as probe:
                try:
                    await asyncio.wait_for(loop.sock_connect(probe, (place.address, place.port)), PROOF_SECONDS)
                except ConnectionRefusedError:
                    if place.rank not in self._met:  # otherwise it has met all ranks and stopped listening
                        raise PeerGone(place.rank, _refusal(place)) from None
                except (OSError, TimeoutError, asyncio.TimeoutError):
                    pass  # it may become reachable later

    async def _greet(self, connection: socket.socket, peer: int) -> Met:
        loop = asyncio.get_running_loop()
        session = Session(self._secret, self._rank, peer, secrets.token_bytes(NONCE_BYTES))
        await loop.sock_sendall(connection, _HELLO.pack(_MAGIC, self._rank, session.connector_nonce))
        session.listener_nonce, proof = ANSWER.unpack(await _receive(connection, ANSWER.size))
        if not session.proves(LISTENER, proof):
            raise DeepEPError(f"rank {self._rank}: rank {peer} does not know the ranks' secret: {_secret_hint()}")
        await loop.sock_sendall(connection, session.proof(CONNECTOR))
        await _receive(connection, len(WELCOME))
        return Met(connection, _key(session, CONNECTOR), _key(session, LISTENER))

    async def _accept(self) -> None:
        """Serve all incoming connections until the caller has met all ranks."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if not self._guests:
                        raise
                    self._drop_oldest()
                elif error.errno not in _OF_A_GUEST:
                    raise
                continue
            connection.setblocking(False)
            guest = asyncio.create_task(self._hear(connection, str(address[0])))
            self._guests[connection] = guest
            guest.add_done_callback(partial(self._forget, connection))
            if len(self._guests) > MAX_GUESTS:
                self._drop_oldest()
            await asyncio.sleep(0)  # so that earlier connections are served before many more arrive

    def _forget(self, connection: socket.socket, _: asyncio.Task[None]) -> None:
        self._guests.pop(connection, None)

    def _drop_oldest(self) -> None:
        connection = next(iter(self._guests))
        self._guests.pop(connection).cancel()
        connection.close()  # at once, to make room for the next one

    async def _hear(self, connection: socket.socket, address: str) -> None:
        try:
            bound_silence(connection)
            await asyncio.wait_for(self._answer(connection), PROOF_SECONDS)
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, _Refused) as error:
            connection.close()
            if not isinstance(error, _NothingSaid):
                self._log_refusal(address, str(error) or "it did not prove in time that it is a rank")
        except BaseException:
            connection.close()
            raise

    def _log_refusal(self, address: str, why: str) -> None:
        self._refused += 1
        if self._refused <= _MAX_LOGGED:
            more = "; more are not logged" if self._refused == _MAX_LOGGED else ""
            _log.warning("rank %d: a connection from %s is refused: %s%s", self._rank, address, why, more)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        magic, rank, nonce = _HELLO.unpack(await _receive(connection, _HELLO.size))
        if magic != _MAGIC:
            raise _Refused("it does not start as a rank does")
        if rank not in self._places or rank > self._rank or rank in self._met:
            raise _Refused(f"it claims to be rank {rank}, which is not expected")
        session = Session(self._secret, rank, self._rank, nonce, secrets.token_bytes(NONCE_BYTES))
        await loop.sock_sendall(connection, ANSWER.pack(session.listener_nonce, session.proof(LISTENER)))
        if not session.proves(CONNECTOR, await _receive(connection, _PROOF_BYTES)):
            raise _Refused(f"it claims to be rank {rank}, but does not know the ranks' secret: {_secret_hint()}")
        if rank in self._met:
            raise _Refused(f"rank {rank} is already connected")
        # Recorded before the rank is notified: it may then have met all others, and stop listening.
        self._keep(rank, Met(connection, _key(session, LISTENER), _key(session, CONNECTOR)))
        try:
            connection.send(WELCOME)  # there is room, since little has been sent
        except OSError:
            self._fail(PeerGone(rank))


def _secret_hint() -> str:
    return f"expected the same file's content on all ranks where {SECRET} is set"


def _key(session: Session, sender: bytes) -> bytes:
    return session.digest(b"key of " + sender)[:_KEY_BYTES]


async def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = await asyncio.get_running_loop().sock_recv(connection, count - len(received))
        if not more:
            raise EOFError("it has closed the connection") if received else _NothingSaid()
        received += more
    return received


def _refusal(place: Place) -> str:
    return (
        f"does not listen at {place.address}, port {place.port}: it has given up, as its own error says, or that is "
        f"not the address of its machine (set {ADDRESS} there)"
    )


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in a thread of its own: the caller's thread may already run a loop, and keeps it.

    An interrupt in the caller cancels the coroutine.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except BaseException as error:  # raised in the caller, whatever it is
            errors.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="deep_ep_py meets other machines", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
    except BaseException:
        with suppress(RuntimeError):  # it has just ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    for error in errors:
        raise error
