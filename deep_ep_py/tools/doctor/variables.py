"""The environment variables that the library reads: those that are set, and whether their values are valid."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from deep_ep_py.base import arguments, logs
from deep_ep_py.base.choices import COMBINE, COPIES, EXPAND, LAUNCH, STAGES, chosen
from deep_ep_py.base.cpus import cpus_of, proxy_cpus
from deep_ep_py.base.environment import ADDRESS, FABRIC, PROVIDER, PROXY_CPUS, RANKS_PER_NODE, SECRET, TIMEOUT, TRACE
from deep_ep_py.base.native import C
from deep_ep_py.compat.buffer import DEVICE_VARIABLE
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.device.jit.cache import FOLDER_VARIABLE, refuse_if_others_may_write
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict
from deep_ep_py.transport.bootstrap.machines import own_address
from deep_ep_py.transport.topology.fabrics import check_fabric, in_words

BUILD = "DEEP_EP_BUILD"
NEAR_PROVIDER = "shm"
"""The libfabric provider that reaches only this machine."""

_PREFIX = "DEEP_EP_"
_OTHERS = ("DEEP_EP_BUILDS", "DEEP_EP_JOBS", "DEEP_EP_SEED")
"""Variables of the build and the tests, which must not be taken for misspelled ones of the library."""


class _Unsuitable(Exception):
    """A value that is valid but unsuitable for a job on several machines; the message says why."""


def variables() -> Section:
    """Describe the library's environment variables of this process."""
    return Section.of("Environment", _variables())


def _variables() -> Iterator[Finding]:
    found = sorted(name for name, value in os.environ.items() if name.startswith(_PREFIX) and value)
    if not found:
        yield Finding(f"{_PREFIX}*", Verdict.INFO, "none is set")
    for name in found:
        yield _judge(name, os.environ[name])


def _judge(name: str, value: str) -> Finding:
    check = _CHECKS.get(name)
    if check is None:
        return _unknown(name, value)
    try:
        return Finding(name, Verdict.INFO, value, check(value))
    except _Unsuitable as error:
        return Finding(name, Verdict.WARNING, value, str(error), "remove it from the environment:", f"unset {name}")
    except (ValueError, OSError) as error:
        return Finding(name, Verdict.ERROR, value, str(error), "remove it from the environment:", f"unset {name}")


def _unknown(name: str, value: str) -> Finding:
    alike = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.85)
    if alike and name not in _OTHERS:
        reason = f"the library does not read it; it reads {alike[0]}"
        return Finding(name, Verdict.WARNING, value, reason, "remove it from the environment:", f"unset {name}")
    return Finding(name, Verdict.INFO, value, "the library itself does not read it")


def _ranks_per_node(value: str) -> str:
    if not value.isdecimal() or not 1 <= int(value) <= arguments.MAX_RANKS:
        raise ValueError(f"expected a number from 1 to {arguments.MAX_RANKS}")
    return "nodes consist of this many consecutive ranks, and rows between nodes cross a network"


def _timeout(value: str) -> str:
    arguments.timeout("timeout", None)
    return "seconds after which a wait ends with an error, unless a Buffer specifies it; the same on all ranks"


def _fabric(value: str) -> str:
    offered = CudaDevice.fabrics if torch.cuda.is_available() else CpuDevice.fabrics
    check_fabric(FABRIC, in_words(value), offered, "here")
    return "how ranks reach each other, unless a Buffer specifies it"


def _provider(value: str) -> str:
    offered = [provider.name for provider in C.libfabric_here().providers]
    if value not in offered:
        raise ValueError(f"expected one that libfabric offers here: {', '.join(offered) or 'there is none'}")
    if value == NEAR_PROVIDER:
        raise _Unsuitable("it reaches only ranks of this machine, and is refused for ranks of several machines")
    return "the proxy's provider; it must be the same on all ranks"


def _address(value: str) -> str:
    own_address()
    if ipaddress.ip_address(value).is_loopback:
        raise _Unsuitable("other machines cannot reach this one there")
    return "where ranks of other machines find this one"


def _secret(value: str) -> str:
    try:
        kept = Path(value).read_bytes()
    except OSError as error:
        raise ValueError(f"expected a file that can be read: {error.strerror}") from None
    if not kept:
        raise ValueError("expected a non-empty file")
    return "a file whose content must be the same on all machines"


def _proxy_cpus(value: str) -> str:
    usable, named = proxy_cpus(), cpus_of(value)
    if len(usable) < len(named):
        raise _Unsuitable(f"this process may use only {len(usable)} of these {len(named)} CPUs, from {usable[0]} on")
    return "where the thread that drives the network may run"


def _build(value: str) -> str:
    return "for production" if value == "fast" else "for tests of this library; slow"


def _log_level(value: str) -> str:
    if value not in logs.LEVELS:
        raise ValueError(f"expected {' or '.join(logs.LEVELS)}")
    return "which log lines are written to standard error"


def _device(value: str) -> str:
    try:
        kind = torch.device(value).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError("expected cpu or cuda")
    return "where tensors of programs written for DeepEP live"


def _folder(value: str) -> str:
    folder = Path(value)
    if folder.exists():
        refuse_if_others_may_write(folder)
    return "where compiled kernels are kept"


def _choice(name: str) -> Callable[[str], str]:
    def check(_: str) -> str:
        chosen(name)
        return "for measuring"

    return check


_CHECKS: dict[str, Callable[[str], str]] = {
    RANKS_PER_NODE: _ranks_per_node,
    FABRIC: _fabric,
    TIMEOUT: _timeout,
    PROVIDER: _provider,
    ADDRESS: _address,
    SECRET: _secret,
    PROXY_CPUS: _proxy_cpus,
    BUILD: _build,
    DEVICE_VARIABLE: _device,
    FOLDER_VARIABLE: _folder,
    COPIES: _choice(COPIES),
    COMBINE: _choice(COMBINE),
    EXPAND: _choice(EXPAND),
    LAUNCH: _choice(LAUNCH),
    STAGES: _choice(STAGES),
    logs.VARIABLE: _log_level,
    TRACE: lambda _: "the file into which every Buffer of this process records a timeline",
}
