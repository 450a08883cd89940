"""Runs under torchrun, over the stand-ins for the driver and for NVSHMEM: refused configurations, joining an
initialized NVSHMEM, and what is left behind. Runs the case named; the environment configures NVSHMEM.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from nvshmem_buffers import QUEUES, pretend

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.base.native import C
from deep_ep_py.errors import CudaError
from deep_ep_py.transport.bootstrap import start
from deep_ep_py.transport.nvshmem import choice, job, library, memory, reserve, settings
from deep_ep_py.transport.nvshmem.library import NvshmemError
from deep_ep_py.transport.nvshmem.pool import pool
from harness import Trial, dispatch_arguments, round_trip

BYTES = {"num_nvl_bytes": 1 << 20, "arena_bytes": 1 << 20}


def make(group: Any = None, **options: Any) -> deep_ep.Buffer:
    given = {"ranks_per_node": 1, "heap": "nvshmem", "num_qps_per_rank": QUEUES, "timeout": 20.0, **BYTES, **options}
    return deep_ep.Buffer(group or dist.group.WORLD, **given)


def refusal(kind: type[Exception], **options: Any) -> str:
    with pytest.raises(kind) as info:
        make(**options)
    return str(info.value)


def check(buffer: deep_ep.Buffer, ranks: int) -> None:
    case = Case("nvshmem", ranks, 20, hidden=264, topk=2, experts=2 * ranks, ranks_per_node=1)
    round_trip(buffer, buffer.rank, Trial.of(case), 2)


# --- NVSHMEM's configuration ----------------------------------------------------------------------------------------


def ibgda_off() -> None:
    said = refusal(ValueError)
    assert "expected a path between every two of the 2 ranks" in said
    assert "ibgda: NVSHMEM's IBGDA is not initialized: set NVSHMEM_IB_ENABLE_IBGDA=1" in said, said
    # Loads and stores need no IBGDA.
    with make(ranks_per_node=2) as buffer:
        assert buffer._engine.topology.networks == ()


def cpu_doorbells() -> None:
    assert "NVSHMEM_IBGDA_NIC_HANDLER=gpu" in refusal(ValueError)


def no_loads_and_stores() -> None:
    said = refusal(NvshmemError)
    assert "does not map the memory of rank" in said and "NVSHMEM_DISABLE_P2P unset" in said, said


def heap_too_small() -> None:
    said = refusal(NvshmemError)
    assert "symmetric heap has no room for" in said and "NVSHMEM_SYMMETRIC_SIZE" in said, said


def initialisation_fails() -> None:
    said = refusal(NvshmemError)
    assert "initializing it as PE" in said and "status 7" in said and "NVSHMEM_DEBUG=INFO" in said, said
    assert "NVSHMEM_IB_ENABLE_IBGDA" not in os.environ, "a Buffer with other options may try again"


def states_are_not_filled_in() -> None:
    assert "filling in its state fails (status 7" in refusal(NvshmemError)


def interrupted_while_states_are_filled_in() -> None:
    """The library must not remember an unloaded module, because it updates all modules whenever memory is allocated."""
    with make() as buffer:
        check(buffer, 2)
    del buffer
    gc.collect()
    bindings = library.library().bindings
    fill_in = bindings.cumodule_init

    def interrupted(module: int) -> None:
        bindings.cumodule_init = fill_in
        fill_in(module)
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        bindings.cumodule_init = interrupted
    with pytest.raises((KeyboardInterrupt, deep_ep.DeepEPError)):
        make()
    dist.barrier()
    for arena_bytes in (1 << 20, 2 << 20):
        with make(arena_bytes=arena_bytes) as buffer:
            check(buffer, 2)


def no_queue_pairs_of_ones_own() -> None:
    """The library lacks the function, although it may report a version that has it."""
    with pytest.raises(NvshmemError, match=r"NVSHMEM 3\.4\.5: it has no nvshmemx_qp_create"):
        library.library().make_queue_pairs(1)


def unknown_version() -> None:
    known = library.library()
    for release in ((3, 3, 24), (4, 0, 0)):
        other = replace(known, release=release)
        job.library = lambda other=other: other  # type: ignore[assignment]
        said = refusal(ValueError)
        assert f"NVSHMEM {'.'.join(map(str, release))} is loaded" in said, said
        assert "install nvidia-nvshmem 3.4.5 or a newer one of version 3" in said, said


def rows_do_not_wait_for_writes() -> None:
    """On such a GPU a signal may become visible before the rows ahead of it."""
    assert "GPU_DIRECT_RDMA_WRITES_ORDERING" in refusal(ValueError)


def atomics_that_pass_data() -> None:
    """The NICs use atomic operations of PCIe: harmless on memory without relaxed ordering, wrong rows with it."""
    with make() as buffer:
        check(buffer, 2)
    assert os.environ[settings.RELAXED_ORDERING] == "0" and os.environ["NVSHMEM_DISABLE_NVLS"] == "1"
    with C.cuda.Context(0).current():
        library.library().bindings.hostlib_finalize()
    os.environ[settings.RELAXED_ORDERING] = ""  # as NVSHMEM reads it, this is on
    dist.barrier()
    assert "ibgda: NVSHMEM lets NICs reorder writes" in refusal(ValueError)
    memory.refusal_of_order = lambda _: ""  # type: ignore[assignment]
    buffer = make(timeout=3.0)
    # One rank finds wrong rows; the other finds some too, or times out waiting for it.
    with pytest.raises((AssertionError, deep_ep.DeepEPError)):
        for _ in range(50):
            check(buffer, 2)


def joined_with_relaxed_ordering() -> None:
    """The program has initialized NVSHMEM, which then has it by default."""
    os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    initialize(dist.get_rank(), dist.get_world_size())
    said = refusal(ValueError)
    assert f"set {settings.RELAXED_ORDERING}=0 on every PE before NVSHMEM is initialized" in said, said
    with make(ranks_per_node=2) as buffer:  # loads and stores keep their order
        check(buffer, 2)


def a_queue_pair_that_fails() -> None:
    """As with a software NIC, except that such a Buffer does not recover."""
    buffer = make(timeout=30.0)
    case = Case("nvshmem", 2, 20, hidden=264, topk=2, experts=4, ranks_per_node=1)
    given = dispatch_arguments(Trial.of(case).work, buffer.rank)
    with pytest.raises(deep_ep.DeepEPError) as info:
        for _ in range(20):
            buffer.dispatch(**given)
            buffer.check()  # before checking for failures
    said = str(info.value)
    if buffer.rank == 0:
        assert "the NIC reports an error of work request" in said and "retries exceeded" in said, said
    else:
        assert "rank 0" in said, said
    with pytest.raises(deep_ep.DeepEPError, match="a Buffer with heap='nvshmem' does not recover"):
        buffer.recover()


# --- the caller's arguments -----------------------------------------------------------------------------------------


def wrong_arguments() -> None:
    assert "heap='symmetric': expected 'own' or 'nvshmem'" in refusal(ValueError, heap="symmetric")
    assert "enable_shrink=True: expected heap='own'" in refusal(ValueError, enable_shrink=True, low_latency_mode=True)
    assert "fabric='proxy': expected one of peer, ibgda with heap='nvshmem'" in refusal(ValueError, fabric="proxy")
    on_one = dist.get_rank() == 0
    said = refusal(ValueError, heap="nvshmem" if on_one else None)
    assert said.startswith("heap='nvshmem' on rank 0" if on_one else "heap=None on rank 1"), said
    # Also before the ranks have met.
    said = refusal(ValueError, num_nvl_bytes=100 if on_one else 1 << 20)
    assert said.startswith(f"{'' if on_one else 'rank 0: '}num_nvl_bytes=100: expected a multiple of 128"), said
    for wrong, why in (
        ({"heap": "symmetric"}, "heap='symmetric': expected"),
        ({"enable_shrink": True, "low_latency_mode": True}, "enable_shrink=True: expected heap='own'"),
    ):
        said = refusal(ValueError, **(wrong if on_one else {}))
        assert said.startswith(why if on_one else f"rank 0: {why}"), said
    said = refusal(NvshmemError, num_qps_per_rank=2 + dist.get_rank())
    assert "num_qps_per_rank: expected the same on all ranks, there are [2, 3]" in said, said


def use(count: int = 1, **options: Any) -> list[Any]:
    """Make so many Buffers, use and destroy them. Returns the results of the last one's dispatch."""
    buffers = [make(**options) for _ in range(count)]
    for buffer in buffers:
        check(buffer, 2)
    case = Case("nvshmem", 2, 20, hidden=264, topk=2, experts=4, ranks_per_node=1)
    outputs = [buffer.dispatch(**dispatch_arguments(Trial.of(case).work, buffer.rank)) for buffer in buffers]
    for buffer in buffers:
        buffer.destroy()
    return [*outputs[-1]]


def blocks_after(count: int = 1, **options: Any) -> int:
    """Return the number of blocks of NVSHMEM's memory after so many Buffers have been made and destroyed."""
    use(count, **options)
    gc.collect()  # the pretend GPU keeps its Buffer's runtime
    return len(pool().blocks)


def memory_is_taken_again() -> None:
    """Buffers of the same size reuse it once earlier ones have been destroyed and no output is in it any more."""
    assert [blocks_after() for _ in range(3)] == [1, 1, 1]
    assert [blocks_after(2), blocks_after(2)] == [2, 2]
    kept = use(2)
    gc.collect()
    assert blocks_after(2) == 3, "an output is in one"
    kept.clear()
    gc.collect()
    assert blocks_after(3) == 3
    assert blocks_after(arena_bytes=2 << 20) == 4, "more than any block has"
    assert blocks_after(arena_bytes=1 << 19) == 4, "less"


def memory_of_a_failed_buffer_is_not() -> None:
    buffer = make()
    if buffer.rank == 0:
        buffer.abort()
    with pytest.raises(deep_ep.DeepEPError):
        check(buffer, 2)
    buffer.destroy()
    del buffer
    dist.barrier()
    assert blocks_after() == 2


def memory_of_one_that_could_not_be_made_is() -> None:
    """One rank fails after memory has been taken."""
    lease = C.nvshmem.lease

    def fails(*given: Any) -> Any:
        C.nvshmem.lease = lease
        raise CudaError("no more")

    if dist.get_rank() == 1:
        C.nvshmem.lease = fails  # type: ignore[misc, assignment]
    assert "no more" in refusal(CudaError if dist.get_rank() == 1 else NvshmemError)
    assert blocks_after() == 1


def queue_pairs_differ() -> None:
    os.environ["NVSHMEM_IBGDA_NUM_RC_PER_PE"] = str(QUEUES + dist.get_rank())
    said = refusal(NvshmemError)
    assert "expected equal numbers of NICs and queue pairs" in said, said
    assert "[(1, 3), (1, 4)] by rank" in said, said


def no_memory_on_one() -> None:
    """The GPU has none for counts: the others must not wait in nvshmemx_qp_create, which returns only on all PEs."""

    def none(*_: Any, **__: Any) -> None:
        raise CudaError("out of memory")

    if dist.get_rank() == 1:
        C.nvshmem.Counts = none  # type: ignore[misc, assignment]
        assert refusal(CudaError) == "out of memory"
    else:
        assert refusal(NvshmemError) == "rank 1: CudaError: out of memory"


def reserved_differently() -> None:
    """Calls that would block in NVSHMEM, or act differently on each PE."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    with pytest.raises(ValueError, match=r"num_bytes=\d+ on rank \d: expected the same on all ranks"):
        reserve(dist.group.WORLD, (1 + rank) << 20, num_qps_per_rank=QUEUES, device="cuda:0")
    with pytest.raises(ValueError, match=r"buffers=\d on rank \d: expected the same on all ranks"):
        reserve(dist.group.WORLD, 1 << 20, num_qps_per_rank=QUEUES, buffers=1 + rank, device="cuda:0")
    reserve(dist.group.WORLD, 1 << 20, num_qps_per_rank=QUEUES, device="cuda:0")
    with pytest.raises(NvshmemError, match=f"group: expected all of NVSHMEM's {ranks} PEs"):
        reserve(pairs[rank // 2], 1 << 20, num_qps_per_rank=QUEUES, device="cuda:0")


def allocated_in_another_order() -> None:
    """As with two threads per PE: memory at an offset that differs between ranks is refused before any rank stores
    there."""
    allocate = library.Library.allocate
    shift = 4096 * dist.get_rank()
    library.Library.allocate = lambda *given: allocate(*given) + shift  # type: ignore[method-assign]
    said = refusal(NvshmemError)
    assert "this Buffer's memory begins at bytes [" in said and "expected the same place on all" in said, said


# --- other programs that use NVSHMEM --------------------------------------------------------------------------------


def initialize(pe: int, pes: int, gpu: int | None = 0) -> None:
    """Initialize NVSHMEM as a program does, with queue pairs for kernels."""
    os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    loaded = library.library()
    told: list[bytes] = [b""] * pes
    dist.all_gather_object(told, loaded.unique_id() if pe == 0 else b"")
    with nullcontext() if gpu is None else C.cuda.Context(gpu).current():
        loaded.initialize(max(told), pe, pes)


def joined() -> None:
    """The program has initialized NVSHMEM, with its PEs in another order."""
    os.environ[settings.RELAXED_ORDERING] = "0"
    ranks = dist.get_world_size()
    initialize(ranks - 1 - dist.get_rank(), ranks)
    with make() as buffer:
        assert buffer._engine._symmetric.job.pes == tuple(reversed(range(ranks)))
        check(buffer, ranks)


def joined_without_a_gpu() -> None:
    """The program has initialized NVSHMEM before it had a GPU: the Buffer gives it one."""
    os.environ[settings.RELAXED_ORDERING] = "0"
    ranks = dist.get_world_size()
    initialize(dist.get_rank(), ranks, gpu=None)
    assert library.library().status() == 1
    with make() as buffer:
        assert library.library().status() >= C.nvshmem.INITIALIZED
        check(buffer, ranks)


def joined_with_another_gpu() -> None:
    os.environ[settings.RELAXED_ORDERING] = "0"
    initialize(dist.get_rank(), dist.get_world_size(), gpu=1)
    said = refusal(NvshmemError)
    assert "NVSHMEM was initialized with another GPU than this Buffer's, cuda:0" in said, said


def joined_by_some() -> None:
    rank = dist.get_rank()
    if rank == 0:
        loaded, context = library.library(), C.cuda.Context(0)
        with context.current():
            loaded.initialize(loaded.unique_id(), 0, 1)
    said = refusal(NvshmemError)
    assert "rank 0's process has initialized it, rank 1's has not; expected all or none" in said, said


def groups_of_some() -> None:
    """Two halves at the same time, each with a Buffer; memory that all have reserved serves them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group([*range(ranks // 2)]), dist.new_group([*range(ranks // 2, ranks)])]
    mine = halves[rank // (ranks // 2)]
    with make() as whole:  # NVSHMEM's PEs are all ranks
        check(whole, ranks)
    said = refusal(NvshmemError, group=mine, arena_bytes=8 << 20)
    assert f"these ranks are {ranks // 2} of NVSHMEM's {ranks} PEs" in said, said
    wanted = int(said.partition("reserve(group, ")[2].partition(",")[0])
    reserve(dist.group.WORLD, wanted, num_qps_per_rank=QUEUES, device="cuda:0")
    for _ in range(2):
        with make(mine, arena_bytes=8 << 20) as buffer:
            check(buffer, ranks // 2)
        del buffer
        gc.collect()  # its memory serves the next one


def ranks_of_two_jobs() -> None:
    """Each pair's Buffer has initialized NVSHMEM for the pair: PE 1 of one pair is not PE 1 of the other."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 3]), dist.new_group([2, 1])]
    with make(pairs[rank // 2]) as buffer:
        check(buffer, 2)
    said = refusal(NvshmemError, group=across[rank in (1, 2)])
    assert "expected all to be PEs of one job: give the first Buffer" in said, said


def initialised_anew() -> None:
    """The program has finalized the NVSHMEM that a Buffer had initialized: none of its memory is reused."""
    for _ in range(2):
        assert blocks_after() == 1
        dist.barrier()
        with C.cuda.Context(0).current():
            library.library().bindings.hostlib_finalize()
        assert library.library().status() == 0
        dist.barrier()


# --- without an explicit request ------------------------------------------------------------------------------------


def by_itself() -> None:
    """On two machines, which share no memory, with ConnectX NICs; unless a rank lacks a prerequisite."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = be_on_two_machines()
    case = Case("nvshmem", ranks, 20, hidden=264, topk=2, experts=2 * ranks, ranks_per_node=2)
    os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    with make(**options) as buffer:
        near = tuple("peer" if peer // 2 == rank // 2 else "ibgda" for peer in range(ranks))
        assert buffer._engine.is_symmetric and buffer._engine.topology.routes == near
        round_trip(buffer, rank, Trial.of(case), 2)
    if rank == 3:
        os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "0"
    for lacking in ({**options}, {**options, "heap": "own"}):
        with make(**lacking) as buffer:
            assert not buffer._engine.is_symmetric and "proxy" in buffer._engine.topology.routes
            round_trip(buffer, rank, Trial.of(case), 2)


def be_on_two_machines() -> dict[str, Any]:
    """Set up two machines with ConnectX NICs. Returns the options of a Buffer that chooses for itself."""
    start.machine_name = lambda: f"machine {dist.get_rank() // 2}"  # type: ignore[assignment]
    choice._NICS = Path(os.environ["NICS"])
    return {"heap": None, "ranks_per_node": None}


def not_by_itself_where_writes_are_not_ordered() -> None:
    options = be_on_two_machines()
    os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    with make(**options) as buffer:
        assert not buffer._engine.is_symmetric and "proxy" in buffer._engine.topology.routes


def take_the_proxy(reason: str) -> dict[str, Any]:
    """Make a Buffer that did not ask for NVSHMEM: it takes the proxy and says why. Returns its options."""
    options, said = be_on_two_machines(), warnings()
    os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    with make(**options) as buffer:
        assert not buffer._engine.is_symmetric and "proxy" in buffer._engine.topology.routes
    assert reason in said[-1] and "in memory of their own" in said[-1], said
    return options


def not_by_itself_where_a_cpu_rings() -> None:
    options = take_the_proxy("a thread of NVSHMEM rings the doorbells")
    assert "NVSHMEM_IBGDA_NIC_HANDLER=gpu" in refusal(ValueError, **{**options, "heap": "nvshmem"})


def not_by_itself_where_it_does_not_start() -> None:
    take_the_proxy("initializing it as PE")


def warnings() -> list[str]:
    """Return a list that receives what is logged from now on."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("deep_ep_py").addHandler(Handler())
    return said


def not_by_itself_where_gpus_are_apart() -> None:
    options = be_on_two_machines()
    near = dist.get_rank() % 2
    os.environ.update(NVSHMEM_IB_ENABLE_IBGDA="1", DOUBLE_DEVICES="2", DOUBLE_FIRST_GPU=str(near))
    os.environ["DOUBLE_HOST"] = f"host {dist.get_rank() // 2}"
    with make(**options) as buffer:
        assert not buffer._engine.is_symmetric and {*buffer._engine.topology.routes} == {"peer", "proxy"}
        assert buffer._engine.topology.mapped.count(True) == 1


def not_by_itself_after_one_that_was_told() -> None:
    """A variable that a Buffer sets for NVSHMEM does not count as set by the user."""
    options = be_on_two_machines()
    with make(**{**options, "heap": "nvshmem"}) as buffer:
        assert buffer._engine.is_symmetric and os.environ["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    with make(**options) as buffer:
        assert not buffer._engine.is_symmetric


def by_itself_beside_others() -> None:
    """Each half has its own NVSHMEM, so a Buffer of all ranks without an explicit request works without it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = be_on_two_machines()
    os.environ["NVSHMEM_IB_ENABLE_IBGDA"] = "1"
    halves = [dist.new_group([*range(half, ranks, 2)]) for half in range(2)]
    with make(halves[rank % 2], **options) as buffer:
        assert buffer._engine.is_symmetric
    with make(**options) as buffer:
        assert not buffer._engine.is_symmetric
        case = Case("nvshmem", ranks, 20, hidden=264, topk=2, experts=2 * ranks, ranks_per_node=2)
        round_trip(buffer, rank, Trial.of(case), 2)
    assert "rank" in refusal(NvshmemError)


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        ibgda_off,
        cpu_doorbells,
        no_loads_and_stores,
        heap_too_small,
        initialisation_fails,
        states_are_not_filled_in,
        interrupted_while_states_are_filled_in,
        no_queue_pairs_of_ones_own,
        unknown_version,
        rows_do_not_wait_for_writes,
        atomics_that_pass_data,
        joined_with_relaxed_ordering,
        a_queue_pair_that_fails,
        wrong_arguments,
        memory_is_taken_again,
        memory_of_a_failed_buffer_is_not,
        memory_of_one_that_could_not_be_made_is,
        queue_pairs_differ,
        no_memory_on_one,
        reserved_differently,
        allocated_in_another_order,
        joined,
        joined_without_a_gpu,
        joined_with_another_gpu,
        joined_by_some,
        groups_of_some,
        ranks_of_two_jobs,
        initialised_anew,
        by_itself,
        not_by_itself_where_writes_are_not_ordered,
        not_by_itself_where_a_cpu_rings,
        not_by_itself_where_it_does_not_start,
        not_by_itself_where_gpus_are_apart,
        not_by_itself_after_one_that_was_told,
        by_itself_beside_others,
    )
}


def main() -> None:
    pretend()
    dist.init_process_group("gloo")
    CASES[sys.argv[1]]()
    os._exit(0)  # skips NVSHMEM's exit handlers, which may follow a failure


if __name__ == "__main__":
    main()
