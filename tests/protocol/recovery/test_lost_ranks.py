"""A process is killed or stopped at any point of low-latency calls with `enable_shrink`: the others continue without
it, and their results are right for the remaining ranks; one that is resumed finds that it is masked.

DEEP_EP_LOSSES says how often: 10 by default, 100 in `make test-long`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from builds import LONG
from worker_runs import lines_of, show

pytestmark = [pytest.mark.thorough, pytest.mark.timed, pytest.mark.once, pytest.mark.long]

LOSSES = int(os.environ.get("DEEP_EP_LOSSES", 100 if LONG else 10))
STOP_TIMEOUT = 2.0
SLACK_SECONDS = 5.0


@pytest.fixture(scope="module")
def trials() -> list[dict[str, Any]]:
    found = lines_of("lost_ranks.py", f"--trials={LOSSES}", seconds=60 + 45 * LOSSES)
    assert len(found) == LOSSES
    hit = [trial for trial in found if trial["hit"]]
    seconds = {
        how: sorted(most(trial) for trial in hit if trial["stops"] == stops)
        for how, stops in (("killed", False), ("stopped", True))
    }
    show(
        f"{LOSSES} lost ranks",
        hit=len(hit),
        hung=sum(bool(trial["hung"]) for trial in found),
        fabrics=dict(Counter(trial["fabric"] for trial in hit)),
        rounds_with_zeros=sum(seen["zeros"] for trial in hit for seen in trial["seen"].values()),
        seconds_until_all_finished={how: {"median": s[len(s) // 2], "most": s[-1]} for how, s in seconds.items() if s},
    )
    return found


def most(trial: dict[str, Any]) -> float:
    return max((seconds for rank, seconds in trial["seconds"].items() if int(rank) != trial["victim"]), default=0.0)


def test_no_rank_hangs(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        assert not trial["hung"], trial
    assert sum(trial["hit"] for trial in trials) > LOSSES // 4


def test_the_others_finish_without_it(trials: list[dict[str, Any]]) -> None:
    """They check received and combined data themselves in every round."""
    for trial in trials:
        others = {str(rank) for rank in range(trial["ranks"])} - {str(trial["victim"])}
        assert others <= set(trial["finished_by"]), trial
        for rank in others if trial["hit"] else ():
            assert trial["masked"][rank] in ([trial["victim"]], []), trial


def test_they_finish_within_the_timeout(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        if trial["hit"]:
            assert most(trial) < (2 * STOP_TIMEOUT if trial["stops"] else 0) + SLACK_SECONDS, trial


def test_one_that_goes_on_finds_that_it_is_masked(trials: list[dict[str, Any]]) -> None:
    stopped = [trial for trial in trials if trial["hit"] and trial["stops"]]
    assert stopped
    for trial in stopped:
        victim = trial["victim"]
        assert f"has masked rank {victim}" in trial["failed"][str(victim)], trial
