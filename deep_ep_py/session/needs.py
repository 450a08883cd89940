"""What a session must know about the modes whose calls it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Needs:
    """The needs of a mode.

    Parameters
    ----------
    call_words
        Number of 4-byte words in which a call's kernels report to the host code of the mode.
    stats
        Names of its counters in `Engine.stats`.
    explain
        Returns the exception for a remark left by a launch that belongs to no operation (`Runtime.take_remark`).
    words
        Functions that return the text of a value that ranks compare, by the value's name.
    """

    call_words: int
    stats: tuple[str, ...]
    explain: Callable[[int], Exception]
    words: dict[str, Callable[[int], str]] = field(default_factory=dict)

    def beside(self, other: Needs) -> Needs:
        """Return the combined needs of two modes; remarks of launches mean the same in both."""
        words = {**self.words, **other.words}
        return Needs(max(self.call_words, other.call_words), (*self.stats, *other.stats), self.explain, words)
