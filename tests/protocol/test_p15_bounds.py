"""P15: no store relies on unchecked values read from memory. An overwritten handle fails every rank and damages no
other tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import FABRICS
from cases import BY_NAME
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import run_ranks
from harness import Trial, barrier, dispatch_arguments, make_buffer

TRIAL = Trial.of(BY_NAME["uniform"])
RANKS = TRIAL.case.ranks
TAMPERED, PEER = RANKS - 1, 0

HUGE = 0x7FFFFFFF


def _prefix(value: int) -> Callable[[Any], None]:
    def tamper(handle: Any) -> None:
        record_of(handle).plan.rank_prefix[TAMPERED, PEER] = value

    return tamper


def _decreasing(handle: Any) -> None:
    record_of(handle).plan.rank_prefix[TAMPERED, PEER] = record_of(handle).plan.rank_prefix[TAMPERED - 1, PEER] - 1


def _token_row(handle: Any) -> None:
    rows = record_of(handle).plan.token_row
    rows[rows[:, PEER] >= 0, PEER] = 1 << 20


def _row_token(handle: Any) -> None:
    record_of(handle).plan.row_token[PEER] = 1 << 20


def _source_tokens(handle: Any) -> None:
    record_of(handle).plan.source_tokens[PEER] = HUGE


def _own_tokens(handle: Any) -> None:
    record_of(handle).plan.source_tokens[TAMPERED] = 1


# Name, modification of one rank's handle, and the modes in which a cached dispatch and combine use it: with rows that
# go straight to their places, or in chunks.
DIRECT, ROUNDS = "direct", "rounds"
BOTH = (DIRECT, ROUNDS)
TAMPERINGS = [
    ("negative prefix", _prefix(-1), BOTH, BOTH),
    ("lowest prefix", _prefix(-HUGE - 1), BOTH, BOTH),
    ("huge prefix", _prefix(HUGE), BOTH, BOTH),
    ("decreasing prefix", _decreasing, BOTH, BOTH),
    ("row of a token", _token_row, (DIRECT,), BOTH),
    ("token of a row", _row_token, (ROUNDS,), ()),
    ("tokens of a source", _source_tokens, (), BOTH),
    ("tokens of its own", _own_tokens, (), BOTH),
]


@pytest.mark.parametrize("place", BOTH)
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("combine", [False, True], ids=["cached dispatch", "combine"])
def test_a_handle_that_was_written_over(combine: bool, fabric: str, place: str) -> None:
    """The plan of one rank, in each way. That rank reports what is out of bounds. A peer that already has its rows may
    succeed, with the right ones; the next call raises on all ranks."""
    # Over a network, only the rows that a rank sends to itself go straight to their places.
    mode = place if fabric == "peer" else ROUNDS
    for seed, (name, tamper, in_dispatch, in_combine) in enumerate(TAMPERINGS, 1):
        if mode not in (in_combine if combine else in_dispatch):
            continue

        def on_each_rank(group: Any, tamper: Callable[[Any], None] = tamper) -> BaseException:
            arena_bytes = 0 if place == ROUNDS else TRIAL.case.arena_bytes
            buffer = make_buffer(group, TRIAL.case, fabric, arena_bytes=arena_bytes)
            rank = buffer.rank
            kept = [buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)) for _ in range(2)]
            handle = kept[0][4]
            barrier(group)
            if rank == TAMPERED:
                tamper(handle)
            try:
                if combine:
                    TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, handle))
                else:
                    TRIAL.check_cached(rank, buffer.dispatch(TRIAL.work.x[rank], handle=handle))
                assert rank != TAMPERED
            except deep_ep.DeepEPError:
                pass
            with pytest.raises(deep_ep.DeepEPError) as info:
                buffer.dispatch(TRIAL.work.x[rank], handle=kept[1][4])
            barrier(group)
            # The tensors of both dispatches are alive, and the second handle is intact.
            TRIAL.check_dispatch(rank, kept[1])
            TRIAL.check_cached(rank, (kept[0][0], None, None, None, None, None))
            return info.value

        errors = run_ranks(RANKS, on_each_rank, seed=seed)
        assert "a size or offset of its rows" in str(errors[TAMPERED]), (name, errors)
        assert not any(isinstance(error, deep_ep.DeepEPTimeout) for error in errors), (name, errors)
