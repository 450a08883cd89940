"""What is said of a machine: findings with a verdict each, in sections."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(enum.Enum):
    """What a finding means for the library."""

    GOOD = "good"
    """As it should be."""
    INFO = "info"
    """Neither good nor bad by itself."""
    ABSENT = "absent"
    """Not on this machine; what needs it cannot be used, and nothing is wrong."""
    WARNING = "warning"
    """It works, worse than it could; or whether it does cannot be read here."""
    ERROR = "error"
    """Something that is here does not work as it is set."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Parameters
    ----------
    name : str
        Of what.
    verdict : Verdict
        What it means.
    value : str
        What was read.
    reason : str
        Why it matters; empty where the value says it all.
    note : str
        What to do about it, in words; empty where nothing has to be done.
    command : str
        What to type for that, as a shell takes it; empty where there is no such command.
    """

    name: str
    verdict: Verdict
    value: str
    reason: str = ""
    note: str = ""
    command: str = ""

    def as_json(self) -> dict[str, str]:
        """Return it as the report's file has it."""
        return {**asdict(self), "verdict": self.verdict.value}


@dataclass(frozen=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]

    @staticmethod
    def of(title: str, findings: Iterable[Finding]) -> Section:
        """Collect findings, in their order."""
        return Section(title, tuple(findings))

    def as_json(self) -> dict[str, Any]:
        """Return it as the report's file has it."""
        return {"title": self.title, "findings": [finding.as_json() for finding in self.findings]}


def not_read(name: str) -> Finding:
    """Return the finding on what only a process on the machine itself can know, for a copy of its files."""
    return Finding(name, Verdict.INFO, "not read: --root")


def count(number: int, of: str) -> str:
    """Return a number of things as people write it: "1 GPU", "2 GPUs", "no GPUs"."""
    return f"{number or 'no'} {of}{'' if number == 1 else 's'}"


def worst(sections: Iterable[Section]) -> Verdict:
    """Return the gravest verdict of all; `Verdict.GOOD` where there is none."""
    order = list(Verdict)
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    return max(verdicts, key=order.index, default=Verdict.GOOD)
