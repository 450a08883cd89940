"""Runs under torchrun: a Buffer that one rank cannot finish, or must not begin; then one that all ranks make."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.session import engine
from deep_ep_py.transport.bootstrap import start
from harness import Trial, dispatch_arguments, round_trip


def make(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, 1 << 20, arena_bytes=1 << 20, timeout=20.0, **options)


def make_elastic(**options: Any) -> deep_ep.ElasticBuffer:
    return deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8, hidden=64, **options)


def check(buffer: deep_ep.Buffer) -> None:
    round_trip(buffer, buffer.rank, Trial.of(Case("half_made", 2, 20, hidden=264, topk=2, experts=4)), 1)


def no_thread_for_it(rank: int) -> None:
    """The last step of construction fails: the others have a Buffer, and learn from the first call that this rank
    left."""
    make_driver = engine.Driver

    def fails(*_: Any) -> Any:
        engine.Driver = make_driver  # type: ignore[misc]
        raise RuntimeError("can't start new thread")

    if rank == 1:
        engine.Driver = fails  # type: ignore[assignment, misc]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            make()
        return
    with pytest.raises(deep_ep.DeepEPError) as info:
        check(make())
    assert "has died" not in str(info.value) and "rank 1" in str(info.value), info.value


def another_version(rank: int) -> None:
    own = start.__version__
    if rank == 1:
        start.__version__ = "0.0.1"
    with pytest.raises(
        ValueError, match=r"version='\S+' on rank \d: expected the same on all ranks, it is '\S+' on rank"
    ):
        make()
    start.__version__ = own


def another_user(rank: int) -> None:
    own, user = start.user_number, start.user_number()
    if rank == 1:
        start.user_number = lambda: user + 1
    found = f"it is {user} on rank 0; {user + 1} on rank 1"
    with pytest.raises(
        ValueError, match=f"user={user + rank} on rank {rank}: expected the same on all ranks of a machine, {found}"
    ):
        make()
    start.user_number = own


def a_wrong_argument(rank: int) -> None:
    with pytest.raises(
        ValueError, match="num_nvl_bytes=100: expected a multiple of 128" if rank else "rank 1: num_nvl"
    ):
        deep_ep.Buffer(dist.group.WORLD, 100 if rank == 1 else 1 << 20)


def no_memory_for_it(rank: int) -> None:
    """The system refuses this rank's heap, after the others have begun to wait for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # also of a file in memory
    try:
        refused = r"a heap of \d+ bytes .* cannot be allocated"
        with pytest.raises(deep_ep.DeepEPError, match=refused if rank else f"^rank 1: {refused}"):
            make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def a_keyword_that_nothing_has(rank: int) -> None:
    """Python itself would raise on this rank alone."""
    said = "num_rdma_byte=0: expected no argument of this name"
    given = {"num_rdma_byte": 0} if rank == 1 else {}
    for make_one in (make, make_elastic):
        with pytest.raises(TypeError if rank else ValueError, match=said if rank else f"^rank 1: {said}"):
            make_one(**given)


def different_calls(rank: int) -> None:
    """Both ranks' errors say what differs, and an exchange that one of them has begun early is not lost."""
    case = Case("different", 2, 20, hidden=128 if rank else 264, topk=2, experts=4)
    with make() as buffer:
        for _ in range(2):
            with pytest.raises(deep_ep.DeepEPError, match=r"bytes per row of x \(528 on rank 0; 256 on rank 1\)"):
                buffer.dispatch(**dispatch_arguments(Trial.of(case).work, rank))
            buffer.recover()
            check(buffer)


def many_recoveries(rank: int) -> None:
    """What ranks tell each other then does not fill the sockets that later exchanges use."""
    del rank
    with make() as buffer:
        for _ in range(300):
            buffer.recover()
            dist.barrier()
        buffer.warmup(264, 2)
        check(buffer)


def main() -> None:
    dist.init_process_group("gloo")
    for fail in (
        a_wrong_argument,
        a_keyword_that_nothing_has,
        another_user,
        another_version,
        no_memory_for_it,
        different_calls,
        many_recoveries,
        no_thread_for_it,
    ):
        fail(dist.get_rank())
        dist.barrier()
        with make() as buffer:
            check(buffer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
