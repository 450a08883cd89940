"""The number of dependent steps of a low-latency call; docs/latency.md describes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import deep_ep_py as deep_ep
from deep_ep_py.device.jit import NvrtcUnavailableError, Shape, require_nvrtc
from deep_ep_py.testing import run_ranks
from low_latency import Sizes, Work, combine, dispatch, make_buffer
from ptx import Program, paths_to_first_vote, ptx_of

pytestmark = pytest.mark.once

ENTRY, SENT, TAIL = 2, 1, 1
LEFT = 1  # for each launch: all threads of a block are done
ROUTED = 2  # the tokens of each expert are counted; the routings are written
ROUTINGS, RESULTS = 1, 1  # a round of routings, in the worst case one per source; all results
WINDOW = 2  # for each source, up to 128 of its tokens: their choices are marked; the places of their rows are found
PUT = 1  # for each of them, if ranks are not mapped

SHAPE = Shape(ranks=8, row_bytes=2 * 7168, topk=8, experts=256)

Calls = Callable[[deep_ep.Buffer, Work], Any]


def barriers_of(ranks: int, fabric: str, calls: Calls, before: Calls | None = None, **options: Any) -> float:
    """Return the number of barriers of a block in `calls`: the difference of a world that makes them twice."""
    sizes = Sizes("small", ranks, (8,) * ranks, 8, 128, 2, 2 * ranks)
    work = Work.of(sizes)

    def on_each_rank(group: Any, times: int) -> None:
        with make_buffer(group, sizes, fabric, **options) as buffer:
            buffer._engine.device.blocks = 1
            prepared = before(buffer, work) if before else None
            for _ in range(times):
                calls(buffer, work) if prepared is None else calls(buffer, work, prepared)
            buffer.runtime.drain()

    once, twice = (run_ranks(ranks, on_each_rank, times).stats["barriers"] for times in (1, 2))
    return (twice - once) / ranks


def test_barriers_of_a_dispatch() -> None:
    """One joins what a block has checked, two its routings, one what it has stored, one those that it has received, two
    each source's choices, one what it has placed, one that it is done."""
    alone = ENTRY + ROUTED + SENT + ROUTINGS + TAIL + LEFT
    assert barriers_of(1, "peer", dispatch) == alone + WINDOW
    assert alone + 4 * WINDOW <= barriers_of(4, "peer", dispatch) <= alone + 4 * WINDOW + 3 * ROUTINGS


def test_barriers_of_a_dispatch_in_two_halves() -> None:
    """A receiving half that is launched by itself also has an entry barrier."""

    def halves(buffer: deep_ep.Buffer, work: Work) -> None:
        dispatch(buffer, work, return_recv_hook=True)[4]()

    sending, receiving = ENTRY + ROUTED + SENT + LEFT, ENTRY + ROUTINGS + WINDOW + TAIL + LEFT
    assert barriers_of(1, "peer", halves) == sending + receiving


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("hooks", [False, True])
def test_barriers_of_a_combine(ranks: int, hooks: bool) -> None:
    def repeated(buffer: deep_ep.Buffer, work: Work, results: Any) -> None:
        hook = combine(buffer, work, results[2], return_recv_hook=hooks)[2]
        if hooks:
            hook()

    counted = barriers_of(ranks, "peer", repeated, before=dispatch)
    assert counted == ENTRY + SENT + hooks * (LEFT + ENTRY) + RESULTS + TAIL + LEFT


def test_barriers_for_puts() -> None:
    """If ranks are not mapped, a block has one more barrier per put, which joins the rows."""

    def repeated(buffer: deep_ep.Buffer, work: Work, results: Any) -> None:
        combine(buffer, work, results[2])

    counted = barriers_of(3, "weak", repeated, before=dispatch)
    assert counted == ENTRY + 2 * PUT + SENT + RESULTS + TAIL + LEFT


def require_compiler() -> None:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("kernel", ["low_latency_dispatch", "low_latency_combine"])
def test_loads_before_the_first_vote(kernel: str, architecture: str) -> None:
    """Two dependent loads: that of the environment, and those of everything that a block checks, at addresses in it.
    Each thread loads at most one word with an acquire, unless the block is so small that one thread has two roles.
    """
    require_compiler()
    program = Program.of(ptx_of(kernel, SHAPE, architecture))
    paths = list(paths_to_first_vote(program))
    chains = [path.chain for path in paths if path.acquires <= 1]
    assert any(path.acquires == 1 for path in paths)
    assert max(chains) == 2, chains


def test_no_thread_copies_the_arguments() -> None:
    """Passing them to a function by reference must not cost each thread a copy before the first step."""
    require_compiler()
    entry = ptx_of("low_latency_dispatch", SHAPE, "sm_90a")
    arguments = re.search(r"_param_0\[(\d+)\]", entry)
    own = re.search(r"\.local .*__local_depot\d+\[(\d+)\]", entry)
    assert arguments and (not own or int(own[1]) < int(arguments[1])), "local memory must have no room for them"
