"""P12: producers publish their rows, the owner reads them; the producer's call ends only when every owner has."""

from __future__ import annotations

from typing import Any

import pytest

import oracle
from builds import FABRICS
from cases import BY_NAME, Case
from deep_ep_py.core import choices
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

# Two ranks have no tokens, so they have nothing to sum and could leave before the others have read their rows.
UNEVEN = Case("uneven", ranks=4, tokens=(0, 40, 0, 40), topk=4)


@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_may_be_rewritten_after_combine(fabric: str) -> None:
    """The producer overwrites its rows the moment combine returns. Had combine ended with the producer's own sums, a
    slow owner would read the new values."""
    trial = Trial.of(UNEVEN)
    expected = oracle.combine(
        trial.received,
        [len(x) for x in trial.work.x],
        [part.x for part in trial.received],
        [part.topk_weights for part in trial.received],
    )

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        for _ in range(3):
            # Rows in the arena, which the owners read in place; and then the caller's own memory, which they cannot.
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            for rows in (results[0], results[0].clone()):
                weights = results[2].clone()
                combined = buffer.combine(rows, results[4], topk_weights=weights)
                rows.fill_(float("nan"))
                weights.fill_(float("nan"))
                oracle.check_combined(combined[0], combined[1], expected[rank])
                results[0].copy_(trial.received[rank].x)

    under_schedules(trial.case.ranks, on_each_rank, freeze=16)


@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_may_be_rewritten_after_the_event(fabric: str) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        rows = trial.expert.x[rank].clone()
        combined = buffer.combine(rows, handle, async_finish=True)
        combined[2].current_stream_wait()
        rows.fill_(float("nan"))
        trial.check_combine(rank, combined, weights=False)

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_may_be_dropped_while_they_are_read(fabric: str) -> None:
    """A queued combine's rows are dropped and their memory is wanted by the next dispatch: the producer has to keep
    them until all owners have read."""
    trial = Trial.of(BY_NAME["uniform"])
    expected = oracle.combine(
        trial.received,
        [len(x) for x in trial.work.x],
        [part.x for part in trial.received],
        [part.topk_weights for part in trial.received],
    )

    def on_each_rank(group: Any) -> None:
        # Room for little more than one output, so the next one would take the place of these rows.
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=10 << 10)
        rank = buffer.rank
        for _ in range(4):
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            combined = buffer.combine(results[0], results[4], topk_weights=results[2], async_finish=True)
            del results
            buffer.dispatch(**dispatch_arguments(trial.work, rank))
            combined[2].current_stream_wait()
            oracle.check_combined(combined[0], combined[1], expected[rank])

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_owners_without_rows_still_answer(fabric: str) -> None:
    """An owner that has nothing to read from a producer is waited for all the same."""
    trials = [Trial.of(BY_NAME[name]) for name in ("all_to_one_rank", "ranks_that_send_nothing", "nothing_routed")]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trials[0].case, fabric)
        handles = [buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4] for trial in trials]
        for _ in range(2):
            for trial, handle in zip(trials, handles):
                trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, handle, biases=1), biases=1)

    under_schedules(4, on_each_rank)


@pytest.mark.parametrize("pulled", [(), (1, 2)], ids=["all push", "some push"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_may_be_pushed_instead(fabric: str, pulled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank chooses for its own rows; the sums have the same bits."""
    monkeypatch.setenv(choices.COMBINE, "push")
    trial = Trial.of(BY_NAME["uneven_tokens"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        assert not buffer._engine.pulls
        buffer._engine.pulls = rank in pulled
        for _ in range(2):
            results = buffer.dispatch(**dispatch_arguments(trial.work, rank))
            before = buffer.stats()
            for biases in (0, 2):
                trial.check_combine(rank, trial.combine(buffer, rank, results[4], biases=biases), biases=biases)
            after = buffer.stats()
            grown = {name for name in ("direct", "rounds", "copied") if after[name] != before[name]}
            if fabric == "peer":
                assert grown == ({"direct", "copied"} if rank in pulled else {"rounds"})

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.once
def test_a_choice_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choices.COMBINE, "carry")
    with pytest.raises(ValueError, match="DEEP_EP_COMBINE='carry': expected 'pull' or 'push'"):
        run_ranks(1, lambda group: make_buffer(group, BY_NAME["one_rank_alone"], "peer"))
