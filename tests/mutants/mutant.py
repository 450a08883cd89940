"""The definition of a planted bug, and the scenarios of tests/native/protocol that may catch one."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL = ("peer", "peer rounds", "one region", "weak", "ibgda", "proxy")
FAILING = ("failing", "failing rounds", "failing weak", "failing ibgda", "failing proxy")
# Here rows are overwritten while others read them, and the results must not count: an intentional race.
RACING = (*FAILING, "failing, watched", "two hops failing")
ORDERED = ("failing, ordered", "two buffers", "two buffers weak")
REPLAYS = ("replays", "replays ibgda", "replays proxy")
EXPANDED = ("expanded", "expanded rounds", "expanded ibgda")
BOUNDS = ("bounds", "bounds rounds", "bounds weak", "bounds ibgda")
MASKS = ("masks", "masks weak", "masks ibgda", "masks mixed", "masks proxy")
LOW_LATENCY = ("low latency", "low latency weak", "low latency ibgda", "low latency mixed", "low latency proxy")
PROXY = ("posters proxy", "proxy", "low latency proxy")
ONCE_PER_NODE = ("once per node weak", "once per node ibgda", "once per node proxy")
TWO_HOPS = (
    "two hops peer",
    "two hops weak",
    "two hops wide",
    "two hops ibgda",
    "two hops proxy",
    "two hops without",
    "two hops crossed",
)


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Parameters
    ----------
    name
        The bug.
    file
        The file, below csrc/.
    changes
        Texts and their replacements.
    build
        The variant that catches it.
    scenarios
        The scenarios that catch it, in the order of trying.
    silent
        Whether all scenarios of the fast build pass in spite of it, which is checked: only a memory order is wrong.
    endless
        Whether it shows up as a run that never ends.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    build: str
    scenarios: tuple[str, ...]
    silent: bool = False
    endless: bool = False


def one(name: str, file: str, text: str, replacement: str, build: str, *scenarios: str, silent: bool = False) -> Mutant:
    return Mutant(name, file, ((text, replacement),), build, scenarios, silent)


def silent(name: str, file: str, text: str, replacement: str, *scenarios: str) -> Mutant:
    return one(name, file, text, replacement, "tsan", *scenarios, silent=True)
