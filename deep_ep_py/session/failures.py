"""Translation of the failure that a call's kernels have recorded into an exception."""

from __future__ import annotations

from collections.abc import Callable

from deep_ep_py.base.native import C
from deep_ep_py.errors import DeepEPError, DeepEPTimeout
from deep_ep_py.transport.bootstrap.silence import silent_text, unheard_text


def error_of(
    call: C.Call,
    rank: int,
    runtime: C.Runtime,
    process_of: Callable[[int], str],
    differences: Callable[[C.Call], str],
    reason_of: Callable[[int, int], str],
) -> DeepEPError:
    """Return the exception for a call that failed on this rank.

    Parameters
    ----------
    call : native.C.Call
        The call, whose `failure` has a reason.
    rank : int
        This rank.
    runtime : native.C.Runtime
        The runtime, which knows what NICs have refused and which peers are compiling.
    process_of : callable
        Returns the name of a rank's process.
    differences : callable
        Returns the text of a failure because ranks' calls differ; "" if they do not say how.
    reason_of : callable
        Returns why another rank has given up in a generation; "" if it has not said.
    """
    failure = call.failure
    if failure.reason == C.TIMEOUT:
        # Signal words count in units, so that a put may be split into pieces; the message counts signals.
        unit = C.SIGNAL_UNIT if failure.expected % C.SIGNAL_UNIT == 0 else 1
        expected, seen = failure.expected // unit, failure.seen // unit
        compiling = runtime.compiling_peers()
        return DeepEPTimeout(rank, call.kind, failure.phase, failure.peer, expected, seen, call.waited, compiling)
    text = differences(call) if _is_mismatch(failure) else ""
    text = text or _text(call, failure, rank, runtime, process_of)
    if failure.reason == C.ABORTED and failure.cause_reason == C.EXCEPTION and failure.cause_rank >= 0:
        said = reason_of(failure.cause_rank, call.generation)
        text += f". Rank {failure.cause_rank} said: {said}" if said else ""
    error = DeepEPError(f"rank {rank}: {text}")
    if failure.reason == C.ABORTED:
        error.told_by = failure.peer
    return error


def _is_mismatch(failure: C.Failure) -> bool:
    """Return whether ranks have made different calls, as this rank or another has found."""
    reason = failure.cause_reason if failure.reason == C.ABORTED else failure.reason
    return reason == C.MISMATCH and failure.phase not in (C.MASK_PHASE, C.BOUNDS_PHASE)


def _text(call: C.Call, failure: C.Failure, rank: int, runtime: C.Runtime, process_of: Callable[[int], str]) -> str:
    if failure.reason == C.OVERFLOW and failure.phase == C.BOUNDS_PHASE:
        return (
            f"topk_idx: {failure.seen} rows in the expanded layout of rank {failure.peer}, expected at most "
            f"{failure.expected}: without a host wait, the experts of a token must be distinct"
        )
    if failure.reason == C.OTHER_IDS:
        return (
            f"{call.kind}: {_other_ids_text(failure)}, since the layout must have been counted from the ids that are "
            "sent"
        )
    if failure.reason == C.OVERFLOW:
        return (
            f"num_worst_tokens={failure.expected}: expected at least {failure.seen}, the rows that rank {failure.peer} "
            "receives"
        )
    if failure.reason == C.ELSEWHERE:
        return (
            f"{call.kind} was queued behind an operation of another Buffer of this rank, which has failed: this call "
            "may have read its invalid results"
        )
    if failure.reason == C.OUTDATED:
        return f"{call.kind}: the handle or the graph is from before rank {failure.peer} was left out"
    if failure.reason == C.NETWORK:
        return f"{call.kind}: {_network_text(failure, runtime)}"
    if call.mismatch[0] >= 0:
        peer, kind = call.mismatch
        return (
            f"{call.kind} does not match rank {peer}, which is in {kind} as its operation {call.operation}, or has "
            "other sizes"
        )
    if failure.reason == C.ABORTED:
        whose = f" of rank {failure.peer}" if failure.peer >= 0 else ""
        waiting = f"; rank {rank} was waiting for: {failure.phase}{whose}" if failure.phase else ""
        return f"{call.kind} ended because {_cause(failure, process_of)}{waiting}"
    if failure.phase == C.MASK_PHASE:
        left_out = f"rank {failure.expected} is left out {'there, not here' if failure.seen else 'here, not there'}"
        return f"{call.kind} does not match rank {failure.peer} ({failure.phase}): {left_out}"
    if failure.phase == C.BOUNDS_PHASE:
        return (
            f"{call.kind} does not match rank {failure.peer}: a size or offset of its rows, or of rows for it, is "
            f"{failure.seen:#x}, expected at most {failure.expected:#x}"
        )
    return (
        f"{call.kind} does not match rank {failure.peer}, which has another operation, experts, hidden size, top-k, "
        f"maximum tokens, scales or types ({failure.phase}: {failure.expected:#x} here, {failure.seen:#x} there)"
    )


def _other_ids_text(failure: C.Failure) -> str:
    """Return what the layout and the ids differ in; its encoding is at `kOtherIds`."""
    high, low = failure.seen >> 32, failure.seen & 0xFFFFFFFF
    if failure.phase == C.DATA_PHASE:
        return (
            f"is_token_in_rank[{failure.expected}, {high}] is False: expected True for topk_idx={low}, an expert of "
            f"rank {high}"
        )
    announced = high - 2**32 if high >= 2**31 else high  # the caller's int32
    return f"num_tokens_per_expert[{failure.expected}] is {announced}: expected {low}, as many as in topk_idx"


def _cause(failure: C.Failure, process_of: Callable[[int], str]) -> str:
    """Return the cause in the abort word: a failure of the rank that wrote it, or the loss of another rank."""
    if failure.cause_reason == C.DIED:
        return f"rank {failure.cause_peer}'s process ({process_of(failure.cause_peer)}) has died"
    if failure.cause_reason == C.SILENT:
        return silent_text(failure.cause_peer, process_of(failure.cause_peer))
    if failure.cause_reason == C.UNHEARD:
        return unheard_text(failure.cause_peer, process_of(failure.cause_peer), failure.cause_rank)
    if failure.cause_reason == C.LEFT:
        return f"rank {failure.cause_peer} has destroyed or dropped its Buffer"
    blamed = f" rank {failure.cause_peer}" if failure.cause_peer >= 0 else ""
    return f"rank {failure.cause_rank} {failure.cause}{blamed}"


_FLUSHED = 0x05
"""The syndrome of requests behind the one that has failed. All completions of a queue pair are written to one place."""


def _network_text(failure: C.Failure, runtime: C.Runtime) -> str:
    if refusal := runtime.network_refusal:
        return f"a NIC refused a request that a kernel had written: {refusal}"
    syndrome, vendor = failure.seen & 0xFF, failure.seen >> 8
    waiting = f", while it waited for: {failure.phase}" if failure.phase else ""
    if fault := runtime.network_fault:
        return f"{fault}{waiting}"
    if syndrome == _FLUSHED:
        return (
            f"the NIC has flushed work request {failure.expected} to rank {failure.peer} after an earlier error, which "
            "its completion no longer shows. Most often the peer or the path to it does not answer (a ConnectX tries "
            f"for up to a minute), or the peer's NIC refuses a key or an address{waiting}"
        )
    return (
        f"the NIC reports an error of work request {failure.expected} to rank {failure.peer}: "
        f"{C.syndrome_name(syndrome)} (syndrome {syndrome:#04x}, vendor {vendor:#04x}){waiting}"
    )
