"""Sets of CPUs that a thread may run on, in the notation of Linux."""

from __future__ import annotations

import os

from deep_ep_py.base.environment import PROXY_CPUS

_MAX_CPUS = 1024
"""The capacity of the C library's CPU sets."""


def cpus_of(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0-3,8", in ascending order.

    The format is that of the Linux kernel's `cpulist` files and of taskset.

    Raises
    ------
    ValueError
        The text is not such a list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[-1]):
            raise ValueError(f"expected CPUs as 0-3,8, not {part!r}")
        if int(ends[-1]) >= _MAX_CPUS:
            raise ValueError(f"expected CPUs below {_MAX_CPUS}, not {part!r}")
        cpus.update(range(int(ends[0]), int(ends[-1]) + 1))
    return tuple(sorted(cpus))


def proxy_cpus() -> tuple[int, ...]:
    """Return the CPUs that DEEP_EP_PROXY_CPUS names for the proxy's thread; empty leaves the choice to the system.

    Raises
    ------
    ValueError
        The value is not a list of CPUs, or names none that this process may use.
    """
    text = os.environ.get(PROXY_CPUS, "")
    if not text:
        return ()
    try:
        cpus = cpus_of(text)
    except ValueError as error:
        raise ValueError(f"{PROXY_CPUS}={text!r}: {error}") from None
    allowed = os.sched_getaffinity(0)
    usable = tuple(cpu for cpu in cpus if cpu in allowed)
    if not usable:
        raise ValueError(
            f"{PROXY_CPUS}={text!r}: expected some of the CPUs that this process may use, {sorted(allowed)}"
        )
    return usable
