"""P12, P14, P15: a rank stalls beyond the timeout, at any point, with operations in flight on every rank: each result
is right or an exception, the exceptions lead to the rank at fault, and all ranks continue in the same processes.

DEEP_EP_STALLS says how often: 10 by default, 300 in `make test-long`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from builds import LONG
from worker_runs import lines_of, show

pytestmark = [pytest.mark.thorough, pytest.mark.timed, pytest.mark.once, pytest.mark.long]

STALLS = int(os.environ.get("DEEP_EP_STALLS", 300 if LONG else 10))
SECONDS = 1.0


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Return the output lines of rounds, and of worlds that have ended."""
    found = lines_of("stalled_ranks.py", f"--rounds={STALLS}", seconds=120 + 35 * STALLS)
    rounds = [line for line in found if line["kind"] == "round"]
    late = sorted(one["others_after_timeout"] for one in rounds if one["others_after_timeout"] is not None)
    show(
        f"{len(rounds)} stalls",
        of_them_stopped_inside=sum(one["how"] == "stopped" for one in rounds),
        rounds_that_failed=sum(bool(one["failed"]) for one in rounds),
        exceptions=sum(one["failures"] for one in rounds),
        results_checked=sum(one["checked"] for one in rounds),
        wrong_results=sum(len(one["wrong"]) for one in rounds),
        cause_named=dict(Counter(how for one in rounds for how in one["named"].values())),
        seconds_from_timeout_to_the_others_last_exception={"median": late[len(late) // 2], "most": late[-1]},
        ends=[line["error"] for line in found if line["kind"] == "end" and line["error"]] or "no hang, no crash",
    )
    return found


@pytest.fixture(scope="module")
def rounds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "round"]


def test_nothing_hangs_and_all_go_on(lines: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    """Each round of a world but the first few follows a recovery, or a round whose results were all right."""
    assert not [line for line in lines if line["kind"] == "end" and line["error"]]
    assert len(rounds) == STALLS


def test_no_result_is_wrong_without_an_exception(rounds: list[dict[str, Any]]) -> None:
    """Both after its event has been waited for, and later, when the Buffer has recovered and been used again."""
    assert not [one for one in rounds if one["wrong"]]
    # The time of a stop depends on the machine: both outcomes must be frequent enough that neither check is empty.
    assert sum(one["checked"] for one in rounds) > STALLS / 5
    assert sum(bool(one["failed"]) for one in rounds) > STALLS / 5


def test_the_exceptions_lead_to_the_rank_that_stalled(rounds: list[dict[str, Any]]) -> None:
    """Each names that rank, or a rank whose exception does. The stalled rank is told which rank has given up."""
    for one in rounds:
        assert "no" not in one["named"].values(), (one["shape"], one["stalled"], one["how"], one["named"], one["texts"])


def test_each_failure_begins_with_a_timeout(rounds: list[dict[str, Any]]) -> None:
    """The rank that gave up first says what it waited for, what it expected and what it saw."""
    for one in rounds:
        assert not one["failed"] or any(text.startswith("DeepEPTimeout") for text in one["texts"].values()), one


def test_all_hear_soon_after_the_timeout(rounds: list[dict[str, Any]]) -> None:
    for one in rounds:
        assert one["others_after_timeout"] is None or one["others_after_timeout"] < SECONDS, one
        assert one["own_after_stall"] is None or one["own_after_stall"] < SECONDS, one


def test_nothing_is_left_behind(lines: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    """The number of descriptors and threads does not grow, and nothing of a dropped Buffer remains."""
    for line in lines:
        if line["kind"] == "end":
            assert line["left"] == [] and not any(line["kept"].values()) and not any(line["statuses"]), line
    for world in {one["world"] for one in rounds}:
        held = [one["states"] for one in rounds if one["world"] == world]
        for rank in held[0]:
            assert len({(state[rank]["descriptors"], state[rank]["threads"]) for state in held}) == 1, held
