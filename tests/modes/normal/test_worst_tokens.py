"""num_worst_tokens: the size of outputs is known in advance, so the host waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
import oracle
from builds import FABRICS
from cases import BY_NAME
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

TRIALS = {name: Trial.of(BY_NAME[name]) for name in ("uneven_tokens", "all_to_one_rank", "nothing_routed")}


@pytest.mark.parametrize("arena_bytes", [None, 0], ids=["direct", "rounds"])
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("name", TRIALS)
def test_round_trip(name: str, fabric: str, arena_bytes: int | None) -> None:
    trial = TRIALS[name]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric, arena_bytes=arena_bytes)
        rank = buffer.rank
        for extra in (0, 5):
            rows = max(trial.max_rows + extra, 1)
            arguments = dispatch_arguments(trial.work, rank, num_worst_tokens=rows, config=deep_ep.Config(num_sms=2))
            results = buffer.dispatch(**arguments)
            trial.check_worst(rank, results, rows)
            handle = results[4]
            combined = buffer.combine(handle=handle, **trial.padded(rank, rows))
            trial.check_combine(rank, combined)
            again = buffer.dispatch(trial.work.x[rank], handle=handle)[0]
            assert oracle.same_bits(again[: len(trial.received[rank].x)], trial.received[rank].x)

    under_schedules(trial.case.ranks, on_each_rank)


@pytest.mark.parametrize("fabric", FABRICS)
def test_too_few_rows_fail_on_every_rank(fabric: str) -> None:
    """They fail before a row is sent; each rank names the rank that needs more."""
    trial = TRIALS["all_to_one_rank"]
    rows = trial.max_rows - 1
    full = next(rank for rank, part in enumerate(trial.received) if len(part.x) == trial.max_rows)

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, trial.case, fabric)
        with pytest.raises(deep_ep.DeepEPError) as info:
            buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, num_worst_tokens=rows))
        return str(info.value)

    for said in under_schedules(trial.case.ranks, on_each_rank):
        for rank, message in enumerate(said):
            own = f"expected at least {rows + 1}, the rows that rank {full} receives"
            told = f"rank {rank}: dispatch ended because rank "
            assert message == f"rank {rank}: num_worst_tokens={rows}: {own}" or message.startswith(told), message
        assert any("expected at least" in message for message in said)


def test_different_sizes_are_refused() -> None:
    """The value must be the same on all ranks."""
    trial = TRIALS["uneven_tokens"]

    def on_each_rank(group: Any) -> str:
        buffer = make_buffer(group, trial.case, "peer")
        rows = trial.max_rows + buffer.rank
        with pytest.raises(deep_ep.DeepEPError) as info:
            buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, num_worst_tokens=rows))
        return str(info.value)

    for said in under_schedules(trial.case.ranks, on_each_rank):
        assert any("does not match" in message for message in said), said
