"""Tests for ranks on several nodes: each process that torchrun starts is a rank, and all run the same tests in order.

    torchrun --nnodes N --nproc-per-node M --node-rank R --master-addr HOST --master-port PORT \\
        -m pytest tests/transport/multinode

A node consists of the LOCAL_WORLD_SIZE processes of a launcher. Either each node is a machine and the host proxy joins
them, or several launchers on one machine play several nodes, joined by software NICs. DEEP_EP_RANKS_PER_NODE makes
nodes smaller: software NICs then join the nodes of a machine, and the proxy joins machines.

A test may fail on some ranks only, and the next one must not find them out of step. Therefore all ranks exchange the
outcome at the end of each test; if the test has failed on any rank, it fails on all, and all Buffers recover. The
exchange uses the process group and could be confused with other uses of it, so tests only call Buffers, and fixtures
create these.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.base.environment import RANKS_PER_NODE
from deep_ep_py.tools.bench.rank_process import be_killed_with_parent
from harness import Trial
from low_latency import Sizes, Work
from places import TESTS

COMMAND = "torchrun --nnodes N --nproc-per-node M ... -m pytest tests/transport/multinode"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets for each process."""

BUFFER_SECONDS = 30.0
"""Bound of a wait in a call; ample even if several ranks share a core."""
GROUP_SECONDS = 180.0
"""Bound of an exchange over the group, to which a rank may be late by several such waits."""

# By name: a routing, and the number of tokens of a rank.
CASES: dict[str, tuple[str, Callable[[int], int]]] = {
    "uniform": ("uniform", lambda rank: 24),
    "ranks_without_tokens": ("skewed", lambda rank: 7 * rank % 40 * (rank % 3 != 1)),
    "unrouted_selections": ("holes", lambda rank: 24),
    "to_one_rank": ("one_rank", lambda rank: 11),
}

_failed = pytest.StashKey[bool]()
_buffers: list[deep_ep.Buffer] = []


@dataclass(frozen=True)
class World:
    """All ranks that torchrun has started, and the rank of this process."""

    rank: int
    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def case(self, name: str) -> Case:
        """Return one of the cases among all ranks."""
        routing, tokens = CASES[name]
        each, experts = tuple(tokens(rank) for rank in range(self.ranks)), 4 * self.ranks
        return Case(name, self.ranks, each, 128, 4, experts, routing, ranks_per_node=self.ranks_per_node)

    @functools.cache  # noqa: B019 - there is one world
    def trial(self, name: str) -> Trial:
        """Return the same with the expected results."""
        return Trial.of(self.case(name))


def started_by_torchrun() -> bool:
    return all(name in os.environ for name in VARIABLES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    several = started_by_torchrun() and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    for item in items:
        if item.path.is_relative_to(TESTS / "transport" / "multinode"):
            item.add_marker("once")
            if not several:
                item.add_marker(pytest.mark.skip(reason=f"each process is a rank, on several nodes: {COMMAND}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """End the test on all ranks together."""
    failed = item.stash.get(_failed, False)
    ranks = ranks_that_fail(item.nodeid, failed) if dist.is_initialized() else []
    yield
    if ranks and not failed:
        pytest.fail(f"the test has failed on ranks {ranks}", pytrace=False)


def ranks_that_fail(test: str, failed: bool) -> list[int]:
    """Tell all ranks whether a test has failed on this one; return the ranks where it has, after recovering if any."""
    try:
        if failed:
            for buffer in _buffers:
                buffer.abort()  # ranks that wait for this one in a call raise at once
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (test, failed))
        ranks = [rank for rank, outcome in enumerate(told) if outcome != (test, False)]
        if others := [rank for rank in ranks if told[rank] != (test, True)]:
            raise RuntimeError(f"ranks {others} are not in {test}")
        if ranks:
            for buffer in _buffers:
                buffer.recover()
    except RuntimeError as error:  # including those of gloo or a Buffer
        pytest.exit(f"the ranks cannot continue together: {error}", returncode=1)
    return ranks


@pytest.fixture(scope="session")
def world() -> World:
    rank, size, of_launcher = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return World(rank, size, int(os.environ.get(RANKS_PER_NODE) or of_launcher))


@pytest.fixture(scope="session")
def group() -> Iterator[Any]:
    """Make the gloo group of all ranks, for Buffers and to end tests together."""
    be_killed_with_parent()
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    yield dist.group.WORLD
    dist.destroy_process_group()


@contextmanager
def made(group: Any, world: World, **options: Any) -> Iterator[deep_ep.Buffer]:
    """Make a Buffer on all ranks. From the number of ranks per node it chooses fabric and hops."""
    sizes = {"num_nvl_bytes": 1 << 22, "arena_bytes": 1 << 24, **options}
    with deep_ep.Buffer(group, ranks_per_node=world.ranks_per_node, timeout=BUFFER_SECONDS, **sizes) as buffer:
        _buffers.append(buffer)
        try:
            yield buffer
        finally:
            _buffers.remove(buffer)


# The software NICs of an idle Buffer still poll for work, and its memory stays allocated, so a Buffer lives no longer
# than a module.


@pytest.fixture(scope="module")
def buffer(group: Any, world: World) -> Iterator[deep_ep.Buffer]:
    """Make a Buffer for normal mode that chooses the number of hops itself."""
    with made(group, world) as buffer:
        yield buffer


@pytest.fixture
def one_hop(group: Any, world: World) -> Iterator[deep_ep.Buffer]:
    """Make a Buffer for normal mode whose rows go straight to each rank."""
    with made(group, world, hops=1) as buffer:
        yield buffer


@pytest.fixture(scope="session")
def work(world: World) -> Work:
    """Return the data that low-latency calls exchange."""
    tokens = tuple(5 * rank % 17 for rank in range(world.ranks))
    return Work.of(Sizes("several nodes", world.ranks, tokens, max(tokens), 256, 4, 2 * world.ranks))


@pytest.fixture(scope="module")
def both_modes(group: Any, world: World, work: Work) -> Iterator[deep_ep.Buffer]:
    """Make a Buffer for both modes, with room for `work`."""
    sizes = work.sizes
    needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        sizes.max_tokens, sizes.hidden, sizes.ranks, sizes.experts, num_topk=sizes.topk
    )
    with made(group, world, num_rdma_bytes=needed, low_latency_mode=True) as buffer:
        yield buffer
