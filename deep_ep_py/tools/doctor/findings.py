"""Findings on a machine, each with a verdict, in sections."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(enum.Enum):
    """The meaning of a finding for the library."""

    GOOD = "good"
    """As it should be."""
    INFO = "info"
    """Neither good nor bad by itself."""
    ABSENT = "absent"
    """Not on this machine: features that need it cannot be used, but nothing is wrong."""
    WARNING = "warning"
    """It works less well than it could, or whether it works cannot be determined here."""
    ERROR = "error"
    """Something that is present does not work as it is configured."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Parameters
    ----------
    name : str
        The subject.
    verdict : Verdict
        What the finding means.
    value : str
        What was read.
    reason : str
        Why it matters; empty if the value is self-explanatory.
    note : str
        What to do about it, in words; empty if nothing needs to be done.
    command : str
        The shell command for that; empty if there is none.
    """

    name: str
    verdict: Verdict
    value: str
    reason: str = ""
    note: str = ""
    command: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the finding for the JSON report."""
        return {**asdict(self), "verdict": self.verdict.value}


@dataclass(frozen=True)
class Section:
    """A group of related findings."""

    title: str
    findings: tuple[Finding, ...]

    @staticmethod
    def of(title: str, findings: Iterable[Finding]) -> Section:
        """Collect findings, in their order."""
        return Section(title, tuple(findings))

    def as_json(self) -> dict[str, Any]:
        """Return the section for the JSON report."""
        return {"title": self.title, "findings": [finding.as_json() for finding in self.findings]}


def not_read(name: str) -> Finding:
    """Return the finding for facts that cannot be read from a copy of a machine's files."""
    return Finding(name, Verdict.INFO, "not read: --root")


def count(number: int, of: str) -> str:
    """Return a count in words: "1 GPU", "2 GPUs", "no GPUs"."""
    return f"{number or 'no'} {of}{'' if number == 1 else 's'}"


def worst(sections: Iterable[Section]) -> Verdict:
    """Return the most severe verdict of all; `Verdict.GOOD` if there is none."""
    order = list(Verdict)
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    return max(verdicts, key=order.index, default=Verdict.GOOD)
