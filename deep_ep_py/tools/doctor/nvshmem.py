"""Settings of NVSHMEM's queue pairs on ConnectX NICs, and whether they suit the NICs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from shlex import quote

from deep_ep_py.tools.doctor.findings import Finding, Verdict, not_read
from deep_ep_py.tools.doctor.nics import Link, Nic, Port
from deep_ep_py.transport.nvshmem.settings import RELAXED_ORDERING, is_on, nics_prefix, refusal_of_order

TRAFFIC_CLASS, SERVICE_LEVEL = "NVSHMEM_IB_TRAFFIC_CLASS", "NVSHMEM_IB_SL"
HCA_LIST, HCA_PE_MAPPING, HCA_PREFIX = "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_HCA_PREFIX"
_FILTERS = HCA_PREFIX, HCA_LIST, HCA_PE_MAPPING
_ANY_PORT = -1
NICS_IN_TURN = "NVSHMEM_ENABLE_NIC_PE_MAPPING"
"""With it each PE takes the next NIC, whichever is near its GPU."""
_NAME = "NVSHMEM's settings"
_Places = Sequence[tuple[Nic, Port]]


@dataclass(frozen=True)
class Process:
    """Facts about this process and its packages, for the report on its own machine.

    Attributes
    ----------
    environment : mapping
        The environment variables.
    nvshmem : str or None
        The installed NVSHMEM package, for example "nvidia-nvshmem-cu13 3.4.5"; None if there is none.
    """

    environment: Mapping[str, str]
    nvshmem: str | None


def settings(nics: Sequence[Nic], process: Process | None) -> Iterator[Finding]:
    """Judge NVSHMEM's settings, if its kernels could post to NICs of this machine (IBGDA).

    NVSHMEM sets up its queue pairs without the kernel driver, so the system's traffic class for RoCE does not apply to
    them. NVSHMEM has a single traffic class for all NICs: RoCE needs it, but on InfiniBand NVSHMEM refuses to start
    with it.
    """
    places = [(nic, port) for nic in nics if nic.is_connectx for port in nic.active]
    if not places:
        return
    if process is None:
        yield not_read(_NAME)
        return
    if process.nvshmem is None:
        found = [
            f"{name}={value}" for name, value in sorted(process.environment.items()) if name.startswith("NVSHMEM_")
        ]
        yield Finding(_NAME, Verdict.INFO, ", ".join(found) or "none", "without effect: NVSHMEM is not installed")
        return
    chosen = _chosen(places, process.environment)
    if not chosen:
        yield _none_chosen(places, process.environment)
        return
    by_link = {link: [place for place in chosen if place[1].link is link] for link in (Link.INFINIBAND, Link.ROCE)}
    given = process.environment.get(TRAFFIC_CLASS) or None
    if all(by_link.values()):
        yield _both(by_link, given)
    elif by_link[Link.INFINIBAND]:
        yield _on_infiniband(by_link[Link.INFINIBAND], given)
    elif by_link[Link.ROCE]:
        yield _on_roce(by_link[Link.ROCE], given)
    yield _order(process.environment)
    if is_on(process.environment, NICS_IN_TURN):
        yield Finding(
            "NICs of PEs",
            Verdict.WARNING,
            f"{NICS_IN_TURN}={process.environment[NICS_IN_TURN]}",
            f"each PE takes the next NIC, whichever is near its GPU; {HCA_LIST} has effect without it",
            "remove it from the environment:",
            f"unset {NICS_IN_TURN}",
        )
    yield from _service_level(process.environment.get(SERVICE_LEVEL) or None, bool(by_link[Link.INFINIBAND]))
    if by_link[Link.ROCE]:
        yield Finding(
            "UDP source ports",
            Verdict.INFO,
            "chosen by NVSHMEM",
            "its queue pairs may share one, so that switches that hash by port put them all on one link",
        )


def _names(places: _Places) -> str:
    return ", ".join(dict.fromkeys(nic.name for nic, _ in places))


def _use_only(places: _Places) -> str:
    """Return the command that restricts NVSHMEM to these NICs."""
    listed = ",".join(f"{nic.name}:{port.number}" for nic, port in places)
    return f"export {HCA_LIST}={quote(listed)}"


def _chosen(places: _Places, environment: Mapping[str, str]) -> list[tuple[Nic, Port]]:
    """Return the ports that NVSHMEM would use: those with its prefix and, if it has a list, in the list.

    It takes a list apart as NVSHMEM does: by commas and nothing else, with one ^ in front of all.
    """
    prefix = nics_prefix(environment)
    found = [place for place in places if prefix in place[0].name]
    given = environment.get(HCA_LIST) or environment.get(HCA_PE_MAPPING) or ""
    entries = set[tuple[str, int]]()
    for entry in given.removeprefix("^").split(","):
        name, _, rest = entry.partition(":")
        if name:
            port = rest.partition(":")[0]
            entries.add((name, int(port) if port.isdecimal() else _ANY_PORT))
    if not entries:
        return found

    def is_listed(place: tuple[Nic, Port]) -> bool:
        nic, port = place
        return not entries.isdisjoint({(nic.name, _ANY_PORT), (nic.name, port.number)})

    return [place for place in found if is_listed(place) != given.startswith("^")]


def _none_chosen(places: _Places, environment: Mapping[str, str]) -> Finding:
    set_here = [
        f"{name}={environment[name]}" for name in (HCA_PREFIX, HCA_LIST, HCA_PE_MAPPING) if environment.get(name)
    ]
    return Finding(
        "NVSHMEM's NICs",
        Verdict.WARNING,
        f"none, by {' '.join(set_here)}" if set_here else f"none: no name of {_names(places)} contains mlx5",
        "NVSHMEM uses NICs whose names contain this prefix and, of these, the listed ones; it finds none to post to",
        "set the prefix that these NICs have in common:",
        f"export {HCA_PREFIX}={quote(_common_prefix(places))}; unset {HCA_LIST} {HCA_PE_MAPPING}",
    )


def _common_prefix(places: _Places) -> str:
    """Return what the names of all NICs begin with; of a single one, its letters."""
    names = {nic.name for nic, _ in places}
    letters = re.match("[A-Za-z]*", next(iter(names)))
    return commonprefix([*names]) if len(names) > 1 or letters is None else letters[0]


def _number(text: str | None) -> int | None:
    """Return a setting as a number, decimal or 0x...; None if it is not a number."""
    try:
        return int(text or "", 0)
    except ValueError:
        return None


def _both(by_link: Mapping[Link, _Places], given: str | None) -> Finding:
    infiniband, roce = by_link[Link.INFINIBAND], by_link[Link.ROCE]
    value = f"InfiniBand on {_names(infiniband)}, RoCE on {_names(roce)}"
    name = "traffic class"
    if given is not None:
        return Finding(
            name,
            Verdict.ERROR,
            f"{TRAFFIC_CLASS}={given}; {value}",
            "NVSHMEM has one class for all NICs, and fails at startup if it is set and one is on InfiniBand",
            "a class is set, so let NVSHMEM use only the NICs on RoCE:",
            _use_only(roce),
        )
    return Finding(
        name,
        Verdict.WARNING,
        f"{TRAFFIC_CLASS} is not set; {value}",
        "NVSHMEM has one class for all NICs: RoCE needs it, and InfiniBand forbids it",
        "no class is set, so let NVSHMEM use only the NICs on InfiniBand:",
        _use_only(infiniband),
    )


def _on_infiniband(places: _Places, given: str | None) -> Finding:
    name = "traffic class"
    if given is None:
        return Finding(name, Verdict.GOOD, f"not set, as required by {_names(places)} on InfiniBand")
    return Finding(
        name,
        Verdict.ERROR,
        f"{TRAFFIC_CLASS}={given}; {_names(places)} on InfiniBand",
        "NVSHMEM fails at startup if it is set on InfiniBand, which has service levels instead",
        "remove it from the environment:",
        f"unset {TRAFFIC_CLASS}",
    )


def _on_roce(places: _Places, given: str | None) -> Finding:
    name = "traffic class"
    of_system = {nic.name: port.traffic_class for nic, port in places if port.traffic_class is not None}
    classes = sorted(set(of_system.values()))
    here = ", ".join(f"{name} has {value}" for name, value in of_system.items())
    if len(classes) == 1:
        note, command = "use the system's class:", f"export {TRAFFIC_CLASS}={classes[0]}"
    else:
        note = "use the class that your network treats as lossless, a number from 0 to 255:"
        command = f"export {TRAFFIC_CLASS}=CLASS"
    reason = "packets travel in a class that switches may not treat as lossless"
    if given is None:
        value = f"{TRAFFIC_CLASS} is not set" + (f"; in the system, {here}" if here else "")
        reason = f"NVSHMEM ignores the system's class: {reason}"
        return Finding(name, Verdict.WARNING, value, reason, note, command)
    number = _number(given)
    if number is None or not 0 <= number <= 255:
        return Finding(
            name, Verdict.ERROR, f"{TRAFFIC_CLASS}={given}", "it is not a number from 0 to 255", note, command
        )
    if classes and classes != [number]:
        value = f"{TRAFFIC_CLASS}={given}; in the system, {here}"
        return Finding(name, Verdict.WARNING, value, reason, note, command)
    return Finding(name, Verdict.GOOD, f"{TRAFFIC_CLASS}={given}")


def _order(environment: Mapping[str, str]) -> Finding:
    name, given = "order of atomics", environment.get(RELAXED_ORDERING)
    if given is None:
        return Finding(
            name,
            Verdict.INFO,
            f"{RELAXED_ORDERING} is not set",
            "a Buffer that initializes NVSHMEM sets it to 0",
            "for a program that initializes NVSHMEM itself:",
            f"export {RELAXED_ORDERING}=0",
        )
    if not refusal_of_order(environment):
        return Finding(name, Verdict.GOOD, f"{RELAXED_ORDERING}={given}")
    return Finding(
        name,
        Verdict.ERROR,
        f"{RELAXED_ORDERING}={given}",
        "a NIC's atomics may overtake writes, so signals may overtake rows: NVSHMEM's queue pairs are refused",
        "let NICs keep the order:",
        f"export {RELAXED_ORDERING}=0",
    )


def _service_level(given: str | None, infiniband: bool) -> Iterator[Finding]:
    name = "service level"
    if given is None:
        if infiniband:
            yield Finding(name, Verdict.GOOD, "0, the default")
        return
    number = _number(given)
    if number is None or not 0 <= number <= 15:
        reason, command = "it is not a number from 0 to 15", f"unset {SERVICE_LEVEL}"
        yield Finding(
            name, Verdict.ERROR, f"{SERVICE_LEVEL}={given}", reason, "remove it from the environment:", command
        )
    else:
        yield Finding(name, Verdict.INFO, f"{SERVICE_LEVEL}={given}")
