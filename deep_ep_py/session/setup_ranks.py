"""Setup of a Buffer's shared memory: the ranks agree on sizes, allocate heaps, exchange and map them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from deep_ep_py.base import arguments, choices
from deep_ep_py.base.environment import TIMEOUT
from deep_ep_py.base.native import C
from deep_ep_py.device.device import Device
from deep_ep_py.errors import DeepEPError
from deep_ep_py.transport.bootstrap.connections import EXCHANGE_SECONDS, Connections
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.bootstrap.start import exchange_heaps
from deep_ep_py.transport.topology.membership import name_of
from deep_ep_py.transport.topology.topology import Topology

if TYPE_CHECKING:
    from deep_ep_py.transport.nvshmem.memory import NvshmemMemory

_log = logging.getLogger("deep_ep_py")

REGION_ALIGNMENT = 128
_PAGE = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """Layout of a rank's heap.

    Parameters
    ----------
    num_nvl_bytes
        Bytes for rows and counts in transit, divided among `regions`.
    regions
        Number of operations that may be open at once.
    named_arena_bytes
        Bytes for outputs that the caller asked for, or None.
    first_arena_bytes, arena_bytes
        Bytes for outputs: initially, and at most.
    """

    num_nvl_bytes: int
    regions: int
    named_arena_bytes: int | None
    first_arena_bytes: int
    arena_bytes: int

    @staticmethod
    def of(
        bootstrap: Bootstrap,
        device: Device,
        topology: Topology,
        num_nvl_bytes: int,
        regions: int,
        arena_bytes: int | None,
        first_arena_bytes: int,
        is_symmetric: bool,
    ) -> MemoryPlan:
        """Plan with whole pages for outputs. Collective.

        A size that the caller asked for is allocated at once; the default is the minimum of what suits each rank's
        device. Heaps in NVSHMEM's symmetric heap do not grow, so they get only the initial part of the default.

        Raises
        ------
        ValueError
            The ranks' regions, over which a pattern would be written, do not fit into the memory that is free.
        """
        sharers = topology.machines.count(0)
        sizes = (arena_bytes, arena_bytes)
        if arena_bytes is None:
            by_host = bool(topology.networks) and not is_symmetric
            sizes = device.default_arena_bytes(sharers, by_host)
            sizes = (
                (sizes[0], sizes[0]) if is_symmetric else (min(max(sizes[0], first_arena_bytes), sizes[1]), sizes[1])
            )
        # All ranks look before any of them writes.
        room = None if is_symmetric else device.room_for_regions(bootstrap.in_process)
        *proposed, rooms, wanted = zip(*bootstrap.all_gather((*sizes, room, num_nvl_bytes)), strict=True)
        least = min((room for room in rooms if room is not None), default=None)
        # Ranks that want different sizes are refused later, for that.
        if least is not None and len(set(wanted)) == 1 and num_nvl_bytes > least // sharers:
            raise ValueError(
                f"num_nvl_bytes or num_rdma_bytes={num_nvl_bytes}: expected at most {least // sharers}, the share of "
                f"each of {sharers} ranks in the memory that is free, since a pattern is written over all of it"
            )
        first, most = (min(of_each) // _PAGE * _PAGE for of_each in proposed)
        return MemoryPlan(num_nvl_bytes, regions, arena_bytes, first, most)

    @property
    def region_bytes(self) -> int:
        """Bytes of one region."""
        return self.num_nvl_bytes // self.regions // REGION_ALIGNMENT * REGION_ALIGNMENT


def make_runtime(
    bootstrap: Bootstrap,
    device: Device,
    topology: Topology,
    memory: MemoryPlan,
    timeout: float,
    call_words: int,
    masks_ranks: bool,
    symmetric: NvshmemMemory | None,
) -> tuple[C.Runtime, int]:
    """Make the runtime, which launches kernels and has every rank's heap mapped. Collective.

    Parameters
    ----------
    bootstrap
        The ranks, as returned by `connect`.
    device, topology, memory
        Where ranks compute, how they reach each other, and the layout of their heaps.
    timeout
        Seconds after which waits time out.
    call_words
        As in `Needs`.
    masks_ranks
        Whether a rank that lets others wait until they time out is masked, so that the others continue without it.
    symmetric
        Where heaps are allocated; None: in memory that this library allocates.

    Returns
    -------
    runtime : native.C.Runtime
    regions_offset : int
        Offset of the regions in a heap.

    Raises
    ------
    ValueError
        The ranks were started differently.
    """
    _agree(bootstrap, device, memory, masks_ranks, timeout)
    if masks_ranks and "proxy" in topology.networks and not bootstrap.in_process:
        raise ValueError(
            "enable_shrink=True: expected a fabric other than 'proxy' between processes: libfabric may still deliver "
            "what a rank sent before the others continued without it"
        )
    if masks_ranks and topology.networks and not bootstrap.in_process and not device.maps_all:
        raise ValueError(
            "enable_shrink=True: expected ranks on GPUs that all use each other's memory (fabric='peer'), since a "
            "rank's host must be able to notify the kernels of every rank it masks"
        )
    rank, by_nics = topology.rank, bool(topology.networks)
    options = C.BufferOptions(
        rank=rank,
        ranks=topology.ranks,
        regions=memory.regions,
        region_bytes=memory.region_bytes,
        arena_bytes=memory.arena_bytes,
        timeout=timeout,
        calls=max(memory.regions, device.calls),
        call_words=call_words,
        notes_stages=choices.chosen(choices.STAGES) == "on",
        masks_ranks=masks_ranks,
        poison=bootstrap.in_process and device.poison,
        has_remote=by_nics,
        routes=topology.routes,
        rank_key=_rank_key(bootstrap, device),
        ranks_per_node=topology.ranks_per_node,
        near_audience=topology.near_only,
        bytes_in_flight=topology.link.bytes_in_flight,
    )
    heap_bytes = C.heap_bytes(options)
    arena_offset = heap_bytes - memory.arena_bytes
    regions_offset = arena_offset - memory.regions * memory.region_bytes
    first = arena_offset + memory.first_arena_bytes
    copies, adopted, near = partial(device.make_copy, C.control_bytes(options)), None, list[C.Heap | None]()
    if symmetric is not None:
        heaps, adopted = symmetric.make_heaps(bootstrap, heap_bytes, regions_offset, by_nics, copies)
    else:
        near = _exchange_near_parts(bootstrap, device, topology, C.near_bytes(options)) if by_nics else []
        heap = device.make_heap(heap_bytes, first, regions_offset, bootstrap.in_process, by_nics)
        heaps = exchange_heaps(bootstrap, heap, partial(device.map_heap, by_nics=by_nics), copies)
    network = C.NetworkOptions(
        nic=topology.nic.native(),
        in_process=bootstrap.in_process,
        provider=topology.provider,
        address=bootstrap.address if isinstance(bootstrap, Connections) else "",
        cpus=list(topology.proxy_cpus),
        mesh=bootstrap.mesh if isinstance(bootstrap, Connections) else None,
        nvshmem=adopted,
    )
    runtime = device.make_runtime(options, heaps, near, network)
    waits = "rank %d waits in %s: rank %d is still compiling its kernels"
    runtime.on_compiling_peer(lambda call, peer: _log.warning(waits, rank, call.kind, peer))
    if isinstance(bootstrap, Connections):
        runtime.watch(*bootstrap.watched())
    bootstrap.all_gather(None)  # each rank has published its network endpoint
    if (missing := runtime.look_up_peers(EXCHANGE_SECONDS)) >= 0:
        raise DeepEPError(
            f"rank {rank}: rank {missing} did not publish its network endpoint within {EXCHANGE_SECONDS:g} s"
        )
    bootstrap.all_gather(None)  # no rank sends before all are ready to receive
    return runtime, regions_offset


def _exchange_near_parts(bootstrap: Bootstrap, device: Device, topology: Topology, size: int) -> list[C.Heap | None]:
    """Make this rank's near part, and map those of the ranks whose memory this one uses. Collective."""
    reached = [device.maps_all or mapped for mapped in topology.mapped]
    exported = not bootstrap.in_process and sum(reached) > 1  # GPUs that are apart may not be able to export memory
    near = device.make_heap(size, size, size, not exported, by_nics=False)
    return exchange_heaps(bootstrap, near, partial(device.map_heap, by_nics=False), lambda: None, reached)


def _rank_key(bootstrap: Bootstrap, device: Device) -> int:
    """Return a number that is shared by the Buffers of one rank on one device, and by no others in this process."""
    return hash((name_of(bootstrap), str(device.torch_device))) & (1 << 64) - 1


def _agree(
    bootstrap: Bootstrap,
    device: Device,
    memory: MemoryPlan,
    masks_ranks: bool,
    timeout: float,
) -> None:
    """Refuse ranks with different arguments before they share memory."""
    mine = {
        "device": device.torch_device.type,
        # With low-latency mode, the larger of the two.
        "num_nvl_bytes or num_rdma_bytes": memory.num_nvl_bytes,
        "arena_bytes": memory.named_arena_bytes,
        "regions": memory.regions,
        "enable_shrink": masks_ranks,
        # The progress of waits that ranks publish is counted in fractions of the timeout.
        "timeout with enable_shrink": timeout if masks_ranks else None,
        TIMEOUT: arguments.timeout(TIMEOUT, None) if os.environ.get(TIMEOUT) else None,
    }
    arguments.same_on_all_ranks(bootstrap.rank, bootstrap.all_gather(mine))
