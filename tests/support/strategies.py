"""The strategies of hypothesis: workloads, Buffers, programs of operations, schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from builds import BLOCK_COUNTS
from cases import ROUTINGS, Case

MAX_RANKS = 6
MAX_RANKS_ON_NODES = 8


@dataclass(frozen=True)
class Step:
    """One operation of a program. `pick` chooses among the existing handles, `keep` retains the output."""

    kind: str  # "dispatch", "cached" or "combine"
    pick: int
    blocks: int
    keep: bool
    biases: int
    weights: bool


@dataclass(frozen=True)
class Scenario:
    """A Buffer, its workloads, and their order."""

    fabric: str
    regions: int
    arena_bytes: int | None
    cases: tuple[Case, ...]
    seed: int  # of the workloads' contents
    program: tuple[Step, ...]
    schedule: int
    room: float | None = None  # num_nvl_bytes in units of the minimum; None: ample


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    """Draw a workload's shape for a given number of ranks."""
    routing = draw(st.sampled_from(sorted(ROUTINGS)))
    per_rank = draw(st.integers(1, 4))
    # Routings that stay within some of the experts need `topk` experts there.
    limit = {
        "one_rank": per_rank,
        "own_rank": per_rank,
        "two_ranks": min(2, ranks) * per_rank,
        "first_half": per_rank * ranks // 2,
        "everywhere": ranks,
    }.get(routing, per_rank * ranks)
    return Case(
        "drawn",
        ranks=ranks,
        tokens=tuple(draw(st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks))),
        hidden=8 * draw(st.sampled_from([1, 2, 3, 5, 8, 17, 33])),
        topk=draw(st.integers(1, max(1, min(8, limit)))),
        experts=per_rank * ranks,
        routing=routing if limit else "uniform",
        expert_alignment=draw(st.sampled_from([1, 1, 8])),
    )


steps = st.builds(
    Step,
    kind=st.sampled_from(["dispatch", "cached", "combine", "combine"]),
    pick=st.integers(0, 7),
    blocks=st.sampled_from(BLOCK_COUNTS),
    keep=st.booleans(),
    biases=st.integers(0, 2),
    weights=st.booleans(),
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw one to three workloads of one Buffer and a program over them, with the schedule it runs under."""
    ranks = draw(st.integers(1, MAX_RANKS))
    return Scenario(
        fabric=draw(st.sampled_from(["peer", "weak", "mixed"])),
        regions=draw(st.integers(2, 3)),
        # By default all outputs fit; without an arena all dispatches work in rounds; with a small one, some do.
        arena_bytes=draw(st.sampled_from([None, 0, 1 << 13, 1 << 15])),
        cases=tuple(draw(st.lists(cases(ranks), min_size=1, max_size=3))),
        seed=draw(st.integers(0, 2**16)),
        program=tuple(draw(st.lists(steps, min_size=1, max_size=10))),
        schedule=draw(st.integers(1, 2**31)),
    )


@st.composite
def scenarios_on_nodes(draw: st.DrawFn) -> Scenario:
    """The same where rows go in two hops, also between nodes of a single rank, and with chunks of a few rows."""
    nodes = draw(st.integers(2, 4))
    per_node = draw(st.integers(1, MAX_RANKS_ON_NODES // nodes))
    drawn = draw(st.lists(cases(nodes * per_node), min_size=1, max_size=3))
    return Scenario(
        fabric=draw(st.sampled_from(["weak", "ibgda"])),
        regions=draw(st.integers(2, 3)),
        arena_bytes=draw(st.sampled_from([None, 0, 1 << 13, 1 << 15])),
        cases=tuple(replace(case, ranks_per_node=per_node, hops=2) for case in drawn),
        seed=draw(st.integers(0, 2**16)),
        program=tuple(draw(st.lists(steps, min_size=1, max_size=8))),
        schedule=draw(st.integers(1, 2**31)),
        room=draw(st.sampled_from([None, 1.0, 1.5, 3.0])),
    )
