"""Recovery: how the remaining ranks continue with a Buffer after a failure."""

from __future__ import annotations

import time
from collections.abc import Iterable

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C
from deep_ep_py.errors import DeepEPError

_GONE_SECONDS = 5.0
"""How long a rank that is left out may take to exit or to destroy its Buffer."""
_LOOK_SECONDS = 0.1
_Result = C.Meeting.Result


def mask_of(ranks: Iterable[int], own: int, size: int) -> int:
    """Return ranks as a bit mask.

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """
    try:
        given = list(ranks)
    except TypeError:
        raise TypeError(f"mask={arguments.describe(ranks)}: expected the ranks to leave out, such as [3]") from None
    mask = 0
    for rank in given:
        if arguments.integer("a rank of mask", rank, 0, size - 1) == own:
            raise ValueError(f"mask={given}: expected ranks other than the caller's own, {own}")
        mask |= 1 << rank
    return mask


def ranks_of(mask: int) -> list[int]:
    """Return the ranks whose bits are set."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def recover(runtime: C.Runtime, rank: int, mask: int, attempt: int, seconds: float) -> int | None:
    """Agree with the remaining ranks on who they are, and start a new generation (P16).

    Return None, or the number of a later attempt that another rank has begun: this rank is to join that one.

    Parameters
    ----------
    runtime : native.C.Runtime
        A broken runtime whose kernels have ended.
    rank : int
        The calling rank.
    mask : int
        Ranks that are left out, as a bit mask.
    attempt : int
        Index of this attempt: the number of the new generation minus one.
    seconds : float
        How long to wait for the other ranks in each meeting.

    Raises
    ------
    DeepEPError
        The recovery failed; the Buffer stays broken.
    """
    prefix = f"rank {rank}: recover"
    # Publish the mask before any check, so that the others learn it even if this rank refuses it.
    left_out = ranks_of(mask)
    runtime.connect(left_out, attempt + 1)
    runtime.meet(left_out, attempt, False, 0.0)
    alive = runtime.wait_gone(left_out, min(seconds, _GONE_SECONDS))
    if alive >= 0:
        raise DeepEPError(
            f"{prefix}: rank {alive} is to be left out, but might still store into this rank's memory: expected its "
            "process to have ended or its Buffer to be destroyed"
        )
    if (later := _check(runtime.meet(left_out, attempt, False, seconds), left_out, prefix, seconds)) is not None:
        return later
    deadline = time.monotonic() + seconds
    while (missing := runtime.look_up_peers(min(seconds, _LOOK_SECONDS))) >= 0:
        # A rank that has given up this attempt has withdrawn its endpoint.
        if (later := _check(runtime.meet(left_out, attempt, False, 0.0), left_out, prefix, seconds)) is not None:
            return later
        if time.monotonic() > deadline:
            raise DeepEPError(f"{prefix}: rank {missing} did not publish its network endpoint within {seconds:g} s")
    runtime.clear_words(attempt + 1)
    begun = False
    try:
        later = _check(runtime.meet(left_out, attempt, True, seconds), left_out, prefix, seconds)
        if later is None:
            runtime.publish(attempt + 1, left_out)
            begun = True
        return later
    finally:  # also after an interrupt: some ranks may have continued, and their next wait must end at once
        if not begun:
            runtime.abort_generation(attempt + 1, C.EXCEPTION)


def _check(meeting: C.Meeting, left_out: list[int], prefix: str, seconds: float) -> int | None:
    """Return the later attempt that another rank has begun, if one has; raise DeepEPError unless all have come."""
    peer = meeting.peer
    if meeting.result == _Result.OTHER_MASK:
        raise DeepEPError(
            f"{prefix}: mask={left_out}, expected the same on all ranks, rank {peer} leaves out {meeting.left_out}"
        )
    if meeting.result == _Result.GONE:
        raise DeepEPError(f"{prefix}: rank {peer} is gone too: expected it among the ranks to leave out")
    if meeting.result == _Result.LATE:
        raise DeepEPError(f"{prefix}: rank {peer} did not come within {seconds:g} s")
    return meeting.attempt if meeting.result == _Result.LATER_ATTEMPT else None
