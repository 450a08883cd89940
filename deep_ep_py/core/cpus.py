"""Which CPUs a thread may run on, as people and Linux write it."""

from __future__ import annotations

import os

from deep_ep_py.core.environment import PROXY_CPUS

_MAX_CPUS = 1024
"""As many as the C library's sets of CPUs hold."""


def cpus_of(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0-3,8", in order.

    The format is that of the kernel's `cpulist` files, and of taskset.

    Raises
    ------
    ValueError
        It is no such list.
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
    """Return the CPUs that DEEP_EP_PROXY_CPUS names for the proxy's thread; none: it is left to the system.

    Raises
    ------
    ValueError
        It is no list of CPUs, or names none that this process may use.
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
