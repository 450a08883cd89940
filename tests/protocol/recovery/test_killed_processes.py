"""A process is killed at any point in time: the others notice within a second, name its rank, and continue without it.

DEEP_EP_KILLS says how often: 10 by default, 300 in `make test-long`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from builds import LONG
from worker_runs import lines_of, show

pytestmark = [pytest.mark.timed, pytest.mark.once, pytest.mark.long]

KILLS = int(os.environ.get("DEEP_EP_KILLS", 300 if LONG else 10))
SECONDS = 1.0


@pytest.fixture(scope="module")
def trials() -> list[dict[str, Any]]:
    found = lines_of("killed_ranks.py", f"--trials={KILLS}", seconds=60 + 25 * KILLS)
    assert len(found) == KILLS
    heard = sorted(one["seconds"] for one, _ in survivors(found))
    recovered = sorted(one["recovered"] for one, _ in survivors(found) if one["recovered"] is not None)
    show(
        f"{KILLS} kills",
        ranks=sum(trial["ranks"] for trial in found),
        survivors=len(heard),
        named=sum(one["named"] for one, _ in survivors(found)),
        hung=sum(len(trial["hung"]) for trial in found),
        fabrics=dict(Counter(trial["fabric"] for trial in found)),
        seconds_until_all_heard={"median": heard[len(heard) // 2], "most": heard[-1]},
        seconds_to_recover={"median": recovered[len(recovered) // 2], "most": recovered[-1]},
        left_behind=sum(bool(trial["left_behind"]) for trial in found),
    )
    return found


def survivors(trials: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each rank that was not killed, with its trial."""
    return [(one, trial) for trial in trials for one in trial["survivors"].values()]


def test_no_rank_hangs(trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        assert not trial["hung"] and len(trial["survivors"]) == trial["ranks"] - 1, trial


def test_all_hear_within_a_second_whose_process_it_was(trials: list[dict[str, Any]]) -> None:
    """Unless it was killed before the ranks had met; the rendezvous reports that."""
    for one, trial in survivors(trials):
        assert one["seconds"] < SECONDS, (one, trial)
        assert one["named"] or "before all ranks had met" in one["texts"][0], (one, trial)
    assert sum(one["named"] for one, _ in survivors(trials)) > KILLS


def test_nothing_is_left_behind(trials: list[dict[str, Any]]) -> None:
    """No process, name in /dev/shm or abstract socket remains when all have ended. While the others are alive, they
    have no descriptor, thread or mapped heap that they did not have before they made the Buffer."""
    for trial in trials:
        assert not trial["left_behind"] and not trial["kept_by_parent"], trial
    for one, trial in survivors(trials):
        assert one["kept"] == {} and one["status"] == 0, (one, trial)


def test_those_left_go_on(trials: list[dict[str, Any]]) -> None:
    """They continue with their Buffer, and check the results themselves."""
    for one, trial in survivors(trials):
        if trial["made"] == trial["ranks"]:
            assert one["masked"] == [trial["victim"]] and len(one["texts"]) == 1, (one, trial)
    assert any(trial["made"] == trial["ranks"] for trial in trials)


@pytest.mark.thorough
def test_who_is_left_out_stays_gone() -> None:
    """P16: the descriptors that watched a rank that died earlier are closed, and other files have their numbers now."""
    lines_of("killed_one_by_one.py", seconds=60)
