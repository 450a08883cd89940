"""The optional packages and libraries that the library uses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator

from deep_ep_py.base.native import C
from deep_ep_py.compat import shim
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict
from deep_ep_py.transport.nvshmem.settings import INSTALL


def software() -> Section:
    """Describe the software that is installed for this Python."""
    return Section.of("Software", _software())


def _version_of(pattern: str) -> str | None:
    """Return "name version" of the installed packages with matching names; None if there is none."""
    found = {
        f"{one.name} {one.version}"
        for one in importlib.metadata.distributions()
        if re.fullmatch(pattern, one.name or "")  # remains of a broken package have no name
    }
    return ", ".join(sorted(found)) or None


def _software() -> Iterator[Finding]:
    import torch

    from deep_ep_py._version import __version__

    yield Finding("deep_ep_py", Verdict.GOOD, __version__)
    yield _torch(torch.__version__, torch.version.cuda, torch.cuda.is_available())
    yield _nvrtc()
    triton = _version_of("triton")
    if triton:
        yield Finding("Triton", Verdict.GOOD, triton)
    else:
        reason = "grouped GEMMs of the MoE layers run on torch"
        yield Finding("Triton", Verdict.ABSENT, "not installed", reason, "install it:", "pip install triton")
    yield _nvshmem()
    yield from _libfabric()
    yield _shim()


def _torch(version: str, cuda: str | None, available: bool) -> Finding:
    if cuda and available:
        return Finding("torch", Verdict.GOOD, f"{version}, for CUDA {cuda}")
    if cuda:  # without a GPU, or where the driver is too old for it
        return Finding("torch", Verdict.INFO, f"{version}, for CUDA {cuda}", "torch.cuda.is_available() is False here")
    return Finding("torch", Verdict.INFO, f"{version}, a build for CPUs only", "GPUs need a build of torch for CUDA")


def _nvrtc() -> Finding:
    from deep_ep_py.device.jit.compiler import INSTALL, NvrtcUnavailableError, nvrtc_version

    try:
        return Finding("NVRTC", Verdict.GOOD, nvrtc_version())
    except NvrtcUnavailableError as error:
        return Finding(
            "NVRTC",
            Verdict.ABSENT,
            "cannot be used",
            f"it compiles the kernels for a GPU; {error.reason}",
            "install it, and its Python bindings:",
            INSTALL,
        )


def has_nvshmem4py() -> bool:
    """Return whether NVSHMEM's Python package is installed."""
    return importlib.util.find_spec("nvshmem") is not None


def nvshmem_version() -> str | None:
    """Return name and version of the installed package of NVSHMEM's host library; None if there is none."""
    return _version_of(r"nvidia[-_]nvshmem[-_]cu\d+")


def _nvshmem() -> Finding:
    host, python = nvshmem_version(), _version_of(r"nvshmem4py[-_]cu\d+")
    value = ", ".join(one for one in (host, python) if one) or "not installed"
    if host and python:
        reason = 'with heap="nvshmem", heaps of GPUs are in its memory and kernels post to its queue pairs'
        return Finding("NVSHMEM", Verdict.GOOD, value, reason)
    if host or python:
        value += f"; without {'nvshmem4py' if host else 'NVSHMEM itself'}"
    reason = 'heap="nvshmem", by which kernels of GPUs post to NICs, needs NVSHMEM and nvshmem4py'
    return Finding(
        "NVSHMEM",
        Verdict.INFO if host or python else Verdict.ABSENT,
        value,
        reason,
        "install them, for CUDA 13:",
        INSTALL,
    )


def _libfabric() -> Iterator[Finding]:
    here = C.libfabric_here()
    if not here.version:
        yield Finding(
            "libfabric",
            Verdict.ABSENT,
            "cannot be used",
            here.refusal,
            "install it, then reinstall this library from its sources:",
            "sudo apt-get install libfabric-dev",
        )
        return
    yield Finding("libfabric", Verdict.GOOD, here.version)
    offered = ", ".join(f"{provider.name} {provider.version}" for provider in here.providers)
    yield Finding(
        "providers, best first",
        Verdict.GOOD if offered else Verdict.WARNING,
        offered or "none that the proxy can use",
        "" if offered else "it needs writes with immediate data, and reliable messages",
        "" if offered else "this lists suitable ones:",
        "" if offered else "fi_info -t FI_EP_RDM -c FI_RMA",
    )


def _shim() -> Finding:
    found = shim.status(shim.site_folder())
    return Finding("import deep_ep", Verdict.INFO, found)
