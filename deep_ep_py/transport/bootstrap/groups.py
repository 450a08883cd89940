"""How the ranks of a Buffer find each other: the groups that can exchange small objects among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from deep_ep_py.base import arguments


class Bootstrap(Protocol):
    """The part of a process group that a Buffer needs. Collective; used when Buffers are made, never per call."""

    @property
    def rank(self) -> int:
        """The caller's rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def in_process(self) -> bool:
        """Whether all ranks are threads of this process."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""


@dataclass(frozen=True)
class TorchBootstrap:
    """A torch ProcessGroup with any backend that can gather objects."""

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
    """Wrap the group or communicator that the caller has.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or deep_ep_py.testing.ThreadGroup or None
        The ranks of the Buffer.
    comm : mpi4py.MPI.Comm, optional
        Used if `group` is None.

    Raises
    ------
    TypeError
        Neither can exchange objects.
    """
    if group is not None:
        if hasattr(group, "all_gather_object"):
            return ThreadBootstrap(group, group.rank(), group.size())
        if hasattr(group, "rank") and hasattr(group, "size"):
            return TorchBootstrap(group, group.rank(), group.size())
        raise TypeError(f"group={arguments.describe(group)}: expected a torch.distributed.ProcessGroup")
    if comm is None:
        raise TypeError("group=None: expected a torch.distributed.ProcessGroup, or an mpi4py communicator as comm=")
    return MpiBootstrap(comm, comm.Get_rank(), comm.Get_size())
