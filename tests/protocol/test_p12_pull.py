"""P12: producers publish their rows and owners read them; a producer's call only ends when every owner has."""

from __future__ import annotations

from typing import Any

import pytest

import oracle
from builds import FABRICS
from cases import BY_NAME, Case
from deep_ep_py.base import choices
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

# Two ranks have no tokens, hence nothing to sum, and could leave before the others have read their rows.
UNEVEN = Case("uneven", ranks=4, tokens=(0, 40, 0, 40), topk=4)


@pytest.mark.parametrize("fabric", FABRICS)
def test_rows_may_be_rewritten_after_combine(fabric: str) -> None:
    """The producer overwrites its rows as soon as combine returns. If combine ended with the producer's own sums, a
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
            # First rows in the arena, which the owners read in place, then rows in the caller's memory.
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
    """The rows of a queued combine are dropped and the next dispatch needs their memory: the producer must keep them
    until all owners have read them."""
    trial = Trial.of(BY_NAME["uniform"])
    expected = oracle.combine(
        trial.received,
        [len(x) for x in trial.work.x],
        [part.x for part in trial.received],
        [part.topk_weights for part in trial.received],
    )

    def on_each_rank(group: Any) -> None:
        # Room for little more than one output, so that the next one would overwrite these rows.
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
    """A producer also waits for an owner that has nothing to read from it."""
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
    """Each rank chooses between pull and push for its own rows; the sums have the same bits."""
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
