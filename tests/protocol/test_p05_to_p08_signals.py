"""P5 to P8: a signal only vouches for its own put; words only grow, have one writer, and are waited for as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from builds import FABRICS
from cases import Case, tight
from harness import Trial, dispatch_arguments, make_buffer, under_schedules


@pytest.mark.parametrize("fabric", FABRICS)
def test_p05_puts_overtake_each_other(fabric: str) -> None:
    """Small puts follow large ones: counts of the next operation arrive while rows of this one are in flight. A
    receiver that took the signal of a later put as proof of an earlier one would read rows of two operations ago, which
    differ here."""
    wide = Case("wide", ranks=3, tokens=7, hidden=1096, topk=3, experts=6)
    trials = [Trial.of(wide, seed=seed) for seed in (1, 2, 3)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, wide, fabric)
        rank = buffer.rank
        first = buffer._begin_dispatch(**dispatch_arguments(trials[0].work, rank), finish_later=True)
        for n in range(1, 6):
            second = buffer._begin_dispatch(**dispatch_arguments(trials[n % 3].work, rank), finish_later=True)
            trials[(n - 1) % 3].check_dispatch(rank, first.finish())
            first = second
        trials[5 % 3].check_dispatch(rank, first.finish())

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_p06_a_slot_has_one_use_at_a_time(fabric: str) -> None:
    """More chunks than slots: a slot is only rewritten after its reader has returned it."""
    room = tight(2, 8, 1, 2)
    many = Case("many", ranks=2, tokens=(90, 0), hidden=8, topk=1, experts=2, num_nvl_bytes=room, arena_bytes=0)
    trial = Trial.of(many)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, many, fabric)
        results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        trial.check_dispatch(buffer.rank, results)
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4]))

    under_schedules(2, on_each_rank)


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_p07_the_base_moves_by_what_was_expected(fabric: str, arena_bytes: int | None) -> None:
    """Thirty consecutive operations with different numbers of chunks. A base that advanced to the observed value would
    swallow what a fast peer has already added for the next use, and hang; one that did not advance would let the next
    use begin too early."""
    shapes = [
        Case("few", ranks=3, tokens=4, hidden=16, topk=2, experts=6),
        Case("many", ranks=3, tokens=(90, 0, 40), hidden=16, topk=2, experts=6),
        Case("none", ranks=3, tokens=0, hidden=16, topk=2, experts=6),
    ]
    trials = [Trial.of(case) for case in shapes]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, shapes[0], fabric, num_nvl_bytes=tight(3, 16, 2, 6), arena_bytes=arena_bytes)
        rank = buffer.rank
        for n in range(10):
            trial = trials[(n * n + n // 3) % 3]
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            trial.check_dispatch(rank, results)
            trial.check_combine(rank, trial.combine(buffer, rank, results[4]))
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=results[4]))

    under_schedules(3, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_p07_expected_does_not_depend_on_the_sender(fabric: str) -> None:
    """Each rank launches a different number of blocks and has a different number of tokens: the receiver knows neither,
    so the values it waits for depend on neither."""
    import deep_ep_py as deep_ep

    trial = Trial.of(Case("uneven", ranks=4, tokens=(0, 3, 19, 1), topk=3, experts=8))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        for turn in range(3):
            config = deep_ep.Config(num_sms=1 + (buffer.rank + turn) % 4)
            results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, config=config))
            trial.check_dispatch(buffer.rank, results)
            trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4], config=config))

    under_schedules(4, on_each_rank)


def test_p08_pieces_add_up_to_one_unit() -> None:
    """Rows are larger than what the agent sends in one piece: the signal is only complete with the last piece."""
    large = Case("large", ranks=2, tokens=24, hidden=4096, topk=1, experts=2, arena_bytes=0, num_nvl_bytes=1 << 23)
    trials = [Trial.of(large, seed=seed) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, large, "weak")
        for turn in range(4):
            trial = trials[turn % 2]
            trial.check_dispatch(buffer.rank, buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank)))

    under_schedules(2, on_each_rank)
