"""What a session must know of the modes whose calls it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """Of a mode.

    Parameters
    ----------
    call_words
        Of 4 bytes, in which a call's kernels tell the mode's host something.
    stats
        Names of what it counts in `Engine.stats`.
    explain
        Makes the exception for what a launch that is no operation's has left (`Runtime.take_remark`).
    """

    call_words: int
    stats: tuple[str, ...]
    explain: Callable[[int], Exception]

    def beside(self, other: Needs) -> Needs:
        """Return what both modes need together; what a launch has left means the same in both."""
        return Needs(max(self.call_words, other.call_words), (*self.stats, *other.stats), self.explain)
