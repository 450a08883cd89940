"""How the ranks of a Buffer find each other: exchanging small objects, and each other's heaps."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import DeepEPError

EXCHANGE_SECONDS = 60.0
"""How long ranks wait for each other's heaps when a Buffer is made."""


class Bootstrap(Protocol):
    """What a Buffer needs of a process group. Collective; used when Buffers are made, never per call."""

    @property
    def rank(self) -> int:
        """Rank of the caller."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def in_process(self) -> bool:
        """Whether all ranks are threads of this process."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""


@dataclass(frozen=True)
class TorchBootstrap:
    """A torch ProcessGroup with any backend that gathers objects."""

    group: Any
    rank: int
    size: int
    in_process: bool = False

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass(frozen=True)
class ThreadBootstrap:
    """The group that `deep_ep_py.testing.run_ranks` hands to each rank's thread."""

    group: Any
    rank: int
    size: int
    in_process: bool = True

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank. Values are passed by reference."""
        return list(self.group.all_gather_object(value))


@dataclass(frozen=True)
class MpiBootstrap:
    """An mpi4py communicator."""

    comm: Any
    rank: int
    size: int
    in_process: bool = False

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        return list(self.comm.allgather(value))


def make_bootstrap(group: Any, comm: Any = None) -> Bootstrap:
    """Wrap whatever the caller has.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or deep_ep_py.testing.ThreadGroup or None
        The ranks of the Buffer.
    comm : mpi4py.MPI.Comm, optional
        Used where `group` is None.

    Raises
    ------
    TypeError
        If neither is something to exchange objects with.
    """
    if group is not None:
        if hasattr(group, "all_gather_object"):
            return ThreadBootstrap(group, group.rank(), group.size())
        if hasattr(group, "rank") and hasattr(group, "size"):
            return TorchBootstrap(group, group.rank(), group.size())
        raise TypeError(f"group={group!r}: expected a torch.distributed.ProcessGroup")
    if comm is None:
        raise TypeError("group=None: expected a torch.distributed.ProcessGroup, or an mpi4py communicator as comm=")
    return MpiBootstrap(comm, comm.Get_rank(), comm.Get_size())


def exchange_heaps(bootstrap: Bootstrap, heap: Any, map_heap: Callable[[int, int], Any]) -> list[Any]:
    """Give every rank every rank's heap.

    Inside one process the heaps themselves are passed. Between processes of one machine the descriptors of the heaps'
    nameless memory travel over private sockets in the abstract namespace: nothing has a name on disk, so a crash leaves
    nothing behind.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    heap : native.C.Heap
        This rank's heap; the same size on all ranks.
    map_heap : callable
        Makes a peer's heap of its descriptor and size.

    Returns
    -------
    list of native.C.Heap
        By rank, this rank's own included.

    Raises
    ------
    ValueError
        If the ranks are on several machines.
    """
    if bootstrap.in_process:
        return bootstrap.all_gather(heap)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with listener:
        name = f"\0deep_ep_py-{os.getpid()}-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(bootstrap.size)
        # boot_id: the same machine, whatever its containers call themselves.
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
        addresses = bootstrap.all_gather((machine, name))
        strangers = [rank for rank, (other, _) in enumerate(addresses) if other != machine]
        if strangers:
            raise ValueError(
                f"group: ranks {strangers} are on other machines than rank {bootstrap.rank}; expected one machine"
            )
        _send_descriptor(bootstrap, [address for _, address in addresses], heap.descriptor)
        heaps = _receive_descriptors(bootstrap, listener, heap, map_heap)
    bootstrap.all_gather(None)  # everybody has mapped everything
    heap.close_descriptor()
    return heaps


def _send_descriptor(bootstrap: Bootstrap, addresses: list[str], descriptor: int) -> None:
    """Connecting and sending need no partner that accepts yet: the backlog holds all ranks."""
    for peer, address in enumerate(addresses):
        if peer == bootstrap.rank:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.connect(address)
            socket.send_fds(connection, [struct.pack("i", bootstrap.rank)], [descriptor])


def _receive_descriptors(
    bootstrap: Bootstrap, listener: socket.socket, own: Any, map_heap: Callable[[int, int], Any]
) -> list[Any]:
    heaps: list[Any] = [None] * bootstrap.size
    heaps[bootstrap.rank] = own
    listener.settimeout(EXCHANGE_SECONDS)
    while None in heaps:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank, heap in enumerate(heaps) if heap is None]
            raise DeepEPError(
                f"rank {bootstrap.rank}: ranks {missing} did not send their heaps within {EXCHANGE_SECONDS:g} s"
            ) from None
        with connection:
            # Any process of the machine can reach an abstract name: only this user's are let in.
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] != os.getuid():
                continue
            connection.settimeout(EXCHANGE_SECONDS)
            message, descriptors, _, _ = socket.recv_fds(connection, struct.calcsize("i"), 1)
        try:
            peer = struct.unpack("i", message)[0] if len(message) == struct.calcsize("i") else -1
            if len(descriptors) == 1 and 0 <= peer < bootstrap.size and heaps[peer] is None:
                heaps[peer] = map_heap(descriptors[0], own.bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return heaps
