"""What can be run on this machine and, for what cannot, what is in the way, concluded from the other findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict
from deep_ep_py.tools.doctor.posting import NAME as POSTING

TITLE = "What can be run here"


def runnable(sections: Sequence[Section]) -> Section:
    """Conclude what can be run.

    Parameters
    ----------
    sections
        All other sections of the report on this machine.
    """
    found = {finding.name: finding for section in sections for finding in section.findings}
    driver = found["CUDA driver"]
    cuda = [driver, found["torch"], found["NVRTC"]]
    if driver.verdict is not Verdict.GOOD:  # then what it lacks explains more than that it does not answer
        cuda.insert(0, found.get("GPUs") or found["kernel driver"])
    posting = [finding for name, finding in found.items() if name.startswith(f"{POSTING} needs ")]
    libfabric = [found[name] for name in ("libfabric", "providers, best first") if name in found]
    return Section.of(
        TITLE,
        (
            _runs("CPU tensors", [found["peer"]]),
            _runs("CUDA tensors", cuda),
            _runs("several machines, by proxy", [*libfabric, found["proxy"], found["address for other machines"]]),
            _runs("NICs that kernels post to", [*cuda, *posting, found[POSTING]]),
        ),
    )


def _runs(name: str, needed: Sequence[Finding]) -> Finding:
    """Return yes, or no with the first finding that is in the way; it has been counted where it was found."""
    for one in needed:
        if one.verdict is not Verdict.GOOD:
            reason = one.reason if one.command else ""  # one line, but a command says what it is for
            return replace(one, name=name, verdict=Verdict.ABSENT, value=f"no: {one.name}: {one.value}", reason=reason)
    return Finding(name, Verdict.GOOD, "yes")
