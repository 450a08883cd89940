"""The environment variables that the library reads: which are set, and whether their values will do."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from deep_ep_py.bootstrap.machines import own_address
from deep_ep_py.compat.buffer import DEVICE_VARIABLE
from deep_ep_py.core import arguments
from deep_ep_py.core.choices import COMBINE, COPIES, LAUNCH, chosen
from deep_ep_py.core.cpus import cpus_of, proxy_cpus
from deep_ep_py.core.environment import ADDRESS, FABRIC, PROVIDER, PROXY_CPUS, RANKS_PER_NODE, SECRET
from deep_ep_py.core.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.doctor.findings import Finding, Section, Verdict
from deep_ep_py.jit.cache import FOLDER_VARIABLE, refuse_if_others_may_write
from deep_ep_py.topology.fabrics import check_fabric, in_words

BUILD = "DEEP_EP_BUILD"
NEAR_PROVIDER = "shm"
"""The one of libfabric's providers that reaches this machine alone."""

_PREFIX = "DEEP_EP_"
_OTHERS = ("DEEP_EP_BUILDS", "DEEP_EP_JOBS", "DEEP_EP_SEED")
"""What building and tests read, and look so much like the library's that they must not be taken for misspelt ones."""


class _Unsuitable(Exception):
    """A value that is valid, and not what a job on several machines wants; the message says why."""


def variables() -> Section:
    """Describe the library's variables in the environment of this process."""
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
        return Finding(name, Verdict.WARNING, value, str(error), "take it out of the environment:", f"unset {name}")
    except (ValueError, OSError) as error:
        return Finding(name, Verdict.ERROR, value, str(error), "take it out of the environment:", f"unset {name}")


def _unknown(name: str, value: str) -> Finding:
    alike = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.85)
    if alike and name not in _OTHERS:
        reason = f"the library does not read it; it reads {alike[0]}"
        return Finding(name, Verdict.WARNING, value, reason, "take it out of the environment:", f"unset {name}")
    return Finding(name, Verdict.INFO, value, "the library itself does not read it")


def _ranks_per_node(value: str) -> str:
    if not value.isdecimal() or not 1 <= int(value) <= arguments.MAX_RANKS:
        raise ValueError(f"expected a number from 1 to {arguments.MAX_RANKS}")
    return "neighbouring ranks make nodes of so many, between which rows pass a network"


def _fabric(value: str) -> str:
    offered = CudaDevice.fabrics if torch.cuda.is_available() else CpuDevice.fabrics
    check_fabric(FABRIC, in_words(value), offered, "here")
    return "how ranks reach each other, where a Buffer is not told otherwise"


def _provider(value: str) -> str:
    offered = [provider.name for provider in C.libfabric_here().providers]
    if value not in offered:
        raise ValueError(f"expected one that libfabric offers here: {', '.join(offered) or 'there is none'}")
    if value == NEAR_PROVIDER:
        raise _Unsuitable("it reaches ranks of this machine alone, and is refused for ranks of several machines")
    return "what the proxy sends by; it must be the same on all ranks"


def _address(value: str) -> str:
    own_address()
    if ipaddress.ip_address(value).is_loopback:
        raise _Unsuitable("no other machine reaches this one there")
    return "where ranks of other machines find this one"


def _secret(value: str) -> str:
    try:
        kept = Path(value).read_bytes()
    except OSError as error:
        raise ValueError(f"expected a file that can be read: {error.strerror}") from None
    if not kept:
        raise ValueError("expected a file that is not empty")
    return "a file whose content must be the same on all machines"


def _proxy_cpus(value: str) -> str:
    usable, named = proxy_cpus(), cpus_of(value)
    if len(usable) < len(named):
        raise _Unsuitable(f"this process may use {len(usable)} of these {len(named)} CPUs: {usable[0]} and so on")
    return "where the thread that drives the network may run"


def _build(value: str) -> str:
    return "for use" if value == "fast" else "for tests of this library: slow"


def _device(value: str) -> str:
    try:
        kind = torch.device(value).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError("expected cpu or cuda")
    return "where tensors of programs for DeepEP live"


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
    PROVIDER: _provider,
    ADDRESS: _address,
    SECRET: _secret,
    PROXY_CPUS: _proxy_cpus,
    BUILD: _build,
    DEVICE_VARIABLE: _device,
    FOLDER_VARIABLE: _folder,
    COPIES: _choice(COPIES),
    COMBINE: _choice(COMBINE),
    LAUNCH: _choice(LAUNCH),
}
