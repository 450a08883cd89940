"""Messages about machines from which nothing arrives."""

from __future__ import annotations

from deep_ep_py.base.native import C


def silent_text(rank: int, process: str) -> str:
    """Return the message that nothing has come from the machine of a rank, whose process is named."""
    return (
        f"nothing has come for {C.SILENT_SECONDS:g} s from the machine of rank {rank} ({process}): it is cut off or "
        "stopped, or has failed"
    )


def unheard_text(rank: int, process: str, unheard: int) -> str:
    """Return the message that a rank, whose process is named, has found this of another rank's machine."""
    return (
        f"rank {rank} ({process}) continues without rank {unheard}, from whose machine nothing had come for "
        f"{C.SILENT_SECONDS:g} s: it was cut off or stopped"
    )
