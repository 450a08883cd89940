"""How the processes of a Buffer start together: they meet and obtain each other's heaps."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deep_ep_py._version import __version__
from deep_ep_py.base import arguments
from deep_ep_py.base.environment import SECRET
from deep_ep_py.base.native import BUILD
from deep_ep_py.errors import CudaError, DeepEPError
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.bootstrap.handshake import SECRET_BYTES, listen, secret_of
from deep_ep_py.transport.bootstrap.machine_rendezvous import Place
from deep_ep_py.transport.bootstrap.machines import listen_at, machine_name, own_address
from deep_ep_py.transport.bootstrap.together import raise_together, told_of


def user_number() -> int:
    """Return the user whose rights this process has, as the kernel tells it to the other end of a socket."""
    return os.geteuid()


def connect(bootstrap: Bootstrap, failed: Exception | None = None) -> Bootstrap:
    """Connect the processes of a Buffer to each other.

    This takes one exchange over the bootstrap, or two if the processes are on several machines; later exchanges do not
    need the bootstrap.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    failed : Exception, optional
        An error that this rank has already met: the others must not wait for it.

    Returns
    -------
    Bootstrap
        `Connections`; inside one process the bootstrap itself.

    Raises
    ------
    Exception
        `failed`; on the other ranks a ValueError or DeepEPError with its text.
    DeepEPError
        A rank's process ends meanwhile, or machines do not reach each other.
    ValueError
        An environment variable is invalid, which the message names; or ranks have different versions or builds of this
        library, or ranks on one machine have different users.
    """
    if bootstrap.in_process:
        if failed is not None:
            raise failed
        return bootstrap
    listener, name = listen()
    with listener:
        # The secret travels only here: a process that connects is a rank if it knows the secret.
        numbers = os.readlink("/proc/self/ns/pid")  # the namespace in which a pid is valid
        part = secrets.token_bytes(SECRET_BYTES)
        mine = (machine_name(), name, os.getpid(), part, numbers, user_number())
        everyones = bootstrap.all_gather([{"version": __version__, "build": BUILD}, told_of(failed), mine])
        arguments.same_on_all_ranks(bootstrap.rank, [one[0] for one in everyones])
        raise_together(bootstrap.rank, failed, [told for _, told, _ in everyones])
        machines, names, pids, parts, namespaces, users = zip(*(theirs for *_, theirs in everyones), strict=True)
        _same_user_on_each_machine(bootstrap.rank, machines, users)
        near = [rank for rank, machine in enumerate(machines) if machine == machines[bootstrap.rank]]
        alike = [rank for rank in near if namespaces[rank] == numbers]
        connections = Connections(bootstrap.rank, bootstrap.size, list(pids), alike)
        order = list(dict.fromkeys(machines))
        connections.machines = [order.index(machine) for machine in machines]
        secret = secret_of(parts)
        try:
            if len(order) == 1:
                connections.meet(listener, dict(enumerate(names)), secret)
            else:
                _connect_machines(bootstrap, connections, listener, {rank: names[rank] for rank in near}, secret)
        except BaseException as error:
            connections.leave(error)
            raise
    return connections


def _same_user_on_each_machine(rank: int, machines: Sequence[str], users: Sequence[int]) -> None:
    """Check that ranks on one machine have the same user; otherwise they would refuse each other's connections.

    All machines are checked, so that all ranks raise: the ranks on other machines would wait for those that raised.
    """
    for machine in dict.fromkeys((machines[rank], *machines)):
        near = {peer: users[peer] for peer, where in enumerate(machines) if where == machine}
        if found := arguments.difference(near):
            named = rank if rank in near else min(near)
            raise ValueError(
                f"user={users[named]} on rank {named}: expected the same on all ranks of a machine, it is {found}"
            )


def _connect_machines(
    bootstrap: Bootstrap, connections: Connections, listener: socket.socket, names: dict[int, str], secret: bytes
) -> None:
    """Meet the ranks on this machine, then those on others. A port is open only as long as that takes."""
    with ExitStack() as stack:
        address, port, kept, failed = "", 0, b"", ""
        try:
            kept = _kept_secret()
            address = own_address()
            far_listener, port = listen_at(address)
            stack.enter_context(far_listener)
        except (OSError, ValueError) as error:
            failed = str(error)
        # Even if this rank has failed: the others wait for its message.
        told = bootstrap.all_gather((address, port, failed))
        for rank, (_, _, why) in enumerate(told):
            if why:
                raise ValueError(why if rank == connections.rank else f"rank {rank}: {why}")
        connections.address = address
        connections.meet(listener, names, secret)
        far = [Place(rank, where, at) for rank, (where, at, _) in enumerate(told) if connections.is_far(rank)]
        connections.meet_far(far_listener, far, secret_of((secret, kept)))


def _kept_secret() -> bytes:
    """Return the content of the file that DEEP_EP_SECRET names; empty if it is not set."""
    name = os.environ.get(SECRET)
    if not name:
        return b""
    try:
        kept = Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"{SECRET}={name!r}: expected a readable file ({error})") from None
    if not kept:
        raise ValueError(f"{SECRET}={name!r}: expected a file that is not empty")
    return kept


def exchange_heaps(
    bootstrap: Bootstrap,
    heap: Any,
    map_heap: Callable[[int, int, int], Any],
    make_copy: Callable[[], Any],
    reached: Sequence[bool] | None = None,
) -> list[Any]:
    """Give every rank access to every rank's heap, or to a copy of its control pages.

    Inside one process the heaps themselves are passed. Between processes of one machine the descriptors of the heaps'
    anonymous memory travel over private sockets: nothing has a name on disk, so a crash leaves nothing behind. For a
    rank on another machine there is a copy of its control pages, kept up to date by its messages.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as returned by `connect`.
    heap : native.C.Heap
        This rank's heap; the same size on all ranks.
    map_heap : callable
        Maps a peer's heap from its descriptor, its size, and the number of bytes that exist.
    make_copy : callable
        Allocates memory for a copy of a rank's control pages.
    reached : sequence of bool, optional
        Ranks whose heaps are mapped between processes of one machine; the others get copies. None means all.

    Returns
    -------
    list of native.C.Heap
        By rank, this rank's own included.

    Raises
    ------
    DeepEPError, CudaError
        A rank's process ends meanwhile, or its memory cannot be mapped here.
    """
    if not isinstance(bootstrap, Connections):
        return bootstrap.all_gather(heap)
    heaps: list[Any] = [heap] * bootstrap.size
    for rank in range(bootstrap.size):
        if bootstrap.is_far(rank) or not (reached is None or reached[rank] or rank == bootstrap.rank):
            heaps[rank] = make_copy()
    with open(os.devnull) as nothing:  # for a heap that no other process maps
        descriptors = bootstrap.exchange_descriptors(nothing.fileno() if heap.descriptor < 0 else heap.descriptor)
    try:
        for rank, descriptor in descriptors.items():
            if reached is not None and not reached[rank]:
                continue
            try:
                heaps[rank] = map_heap(descriptor, heap.bytes, heap.mapped)
            except RuntimeError as error:
                kind = CudaError if isinstance(error, CudaError) else DeepEPError
                raise kind(f"rank {bootstrap.rank}: memory of rank {rank} cannot be mapped: {error}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    bootstrap.all_gather(None)  # every rank has mapped every heap
    heap.close_descriptor()
    return heaps
