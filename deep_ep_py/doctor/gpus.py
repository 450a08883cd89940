"""The GPUs of this machine, their driver, and what lets NICs reach their memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Finding, Section, Verdict
from deep_ep_py.doctor.nics import read_nics
from deep_ep_py.doctor.pci import PciDevice, read_gpus

_DRIVER = "/proc/driver/nvidia"
_IBGDA_OPTIONS = 'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'


def gpus(files: Files) -> Section:
    """Describe GPUs, driver and the ways to their memory."""
    return Section.of("GPUs", _gpus(files))


def _driver_version(files: Files) -> str | None:
    """Return the version of NVIDIA's kernel driver, as "570.86.15"; None where it is not loaded."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", files.text(f"{_DRIVER}/version") or "")
    return found[1] if found else None


def _has_open_driver(files: Files) -> bool:
    """Tell whether NVIDIA's kernel driver is the open one, which gives memory away as dma-buf."""
    return "Open Kernel Module" in (files.text(f"{_DRIVER}/version") or "")


def _gpus(files: Files) -> Iterator[Finding]:
    found, version = read_gpus(files), _driver_version(files)
    if not found:
        reason = "kernels run on the CPU, in the same protocol"
        yield Finding("GPUs", Verdict.ABSENT, "none of NVIDIA's", reason)
        return
    if version is None:
        yield Finding(
            "driver",
            Verdict.ERROR,
            f"{len(found)} GPUs, and NVIDIA's kernel driver is not loaded",
            "no GPU can be used without it",
            "sudo modprobe nvidia; nvidia-smi",
        )
    else:
        kind = "open kernel modules" if _has_open_driver(files) else "proprietary kernel modules"
        yield Finding("driver", Verdict.GOOD, f"{version}, {kind}")
    for index, gpu in enumerate(found):
        yield Finding(f"GPU {index}", Verdict.INFO, _describe(files, gpu))
    yield _nvlink_domain(files)
    if read_nics(files):
        yield _rdma_to_gpus(files)
        yield _doorbells(files)
    yield _gdrcopy(files)


def _describe(files: Files, gpu: PciDevice) -> str:
    information = files.text(f"{_DRIVER}/gpus/{gpu.address}/information") or ""
    model = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
    numa = f", NUMA node {gpu.numa_node}" if gpu.numa_node >= 0 else ""
    return f"{model[1].strip() if model else 'unknown model'}, PCI {gpu.address}{numa}"


def _nvlink_domain(files: Files) -> Finding:
    name = "multi-node NVLink"
    channels = [one for one in files.names("/dev/nvidia-caps-imex-channels") if one.startswith("channel")]
    if channels:
        return Finding(name, Verdict.GOOD, f"IMEX has {len(channels)} channels here")
    if files.exists("/etc/nvidia-imex/nodes_config.cfg"):
        return Finding(
            name,
            Verdict.WARNING,
            "IMEX is configured, and has no channel here",
            "GPUs of other nodes of the domain cannot be mapped",
            "systemctl status nvidia-imex; its guide says how to make /dev/nvidia-caps-imex-channels/channel0",
        )
    return Finding(name, Verdict.ABSENT, "no IMEX channels", "NVLink, where there is any, ends at this node")


def _rdma_to_gpus(files: Files) -> Finding:
    name = "NICs to GPU memory"
    if files.exists("/sys/module/nvidia_peermem"):
        return Finding(name, Verdict.GOOD, "nvidia_peermem is loaded")
    if _has_open_driver(files):
        return Finding(name, Verdict.GOOD, "dma-buf, by the open kernel modules")
    return Finding(
        name,
        Verdict.INFO,
        "neither nvidia_peermem nor the open kernel modules",
        "ConnectX NICs cannot register GPU memory; the proxy does not need that, its rows go through host memory",
        "sudo modprobe nvidia_peermem",
    )


def _doorbells(files: Files) -> Finding:
    """A GPU rings a NIC's doorbell only where the driver maps the NIC's registers for it."""
    name = "doorbells from GPUs"
    parameters = files.text(f"{_DRIVER}/params")
    if parameters is None:
        return Finding(
            name,
            Verdict.WARNING,
            "unknown",
            f"{_DRIVER}/params cannot be read",
            f"grep RegistryDwords {_DRIVER}/params",
        )
    overridden = re.search(r"PeerMappingOverride\s*=\s*1", parameters) is not None
    if overridden:
        return Finding(name, Verdict.GOOD, "PeerMappingOverride=1")
    return Finding(
        name,
        Verdict.WARNING,
        "PeerMappingOverride is not set",
        "NVSHMEM cannot map the doorbells of NICs for GPUs, and falls back to a CPU thread that rings them",
        f"add to a file in /etc/modprobe.d, keeping other RegistryDwords, and load the driver anew: {_IBGDA_OPTIONS}",
    )


def _gdrcopy(files: Files) -> Finding:
    if files.exists("/dev/gdrdrv"):
        return Finding("GDRCopy", Verdict.GOOD, "gdrdrv is loaded", "nothing here needs it")
    return Finding("GDRCopy", Verdict.ABSENT, "gdrdrv is not loaded", "nothing here needs it")
