"""The GPUs of this machine, their kernel driver, and the prerequisites for NICs and GPUs to reach each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, count
from deep_ep_py.tools.doctor.host import kernel_version
from deep_ep_py.tools.doctor.nics import Nic, read_nics
from deep_ep_py.tools.doctor.nvshmem import Process
from deep_ep_py.tools.doctor.pci import PciDevice, read_gpus

_DRIVER = "/proc/driver/nvidia"
_DMA_BUF_KERNEL = (5, 12)
"""The first Linux version in which a NIC's driver can access memory by dma-buf."""
_OVERRIDE = "PeerMappingOverride"


def gpus(files: Files, process: Process | None) -> Section:
    """Describe GPUs, driver and the access to GPU memory.

    Parameters
    ----------
    files
        The files of the machine.
    process
        This process; None if the files belong to another machine.
    """
    return Section.of("GPUs", _gpus(files, process))


def _driver_version(files: Files) -> str | None:
    """Return the version of NVIDIA's kernel driver, for example "570.86.15"; None if it is not loaded."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", files.text(f"{_DRIVER}/version") or "")
    return found[1] if found else None


def _has_open_driver(files: Files) -> bool:
    """Return whether NVIDIA's kernel driver is the open one, which exports memory as dma-buf."""
    return "Open Kernel Module" in (files.text(f"{_DRIVER}/version") or "")


def _gpus(files: Files, process: Process | None) -> Iterator[Finding]:
    found, version = read_gpus(files), _driver_version(files)
    if not found:
        yield Finding("GPUs", Verdict.ABSENT, "none by NVIDIA", "kernels run on the CPU, in the same protocol")
        return
    if version is None:
        yield Finding(
            "kernel driver",
            Verdict.ERROR,
            f"not loaded, and there {'is' if len(found) == 1 else 'are'} {count(len(found), 'GPU')}",
            "no GPU can be used without it",
            "load it, and check whether it finds them:",
            "sudo modprobe nvidia && nvidia-smi",
        )
    else:
        kind = "open kernel modules" if _has_open_driver(files) else "proprietary kernel modules"
        yield Finding("kernel driver", Verdict.GOOD, f"{version}, {kind}")
    for gpu in found:
        yield Finding(f"GPU {gpu.address}", Verdict.INFO, _describe(files, gpu))
    yield _nvlink_domain(files)
    nics = [nic for nic in read_nics(files) if nic.device]
    if any(nic.is_connectx for nic in nics):
        yield connectx_to_memory(files)
        yield doorbells(files, judged=process is not None and process.nvshmem is not None)
    yield from (_efa_to_memory(files, nic) for nic in nics if nic.driver == "efa")
    yield _gdrcopy(files)


def _describe(files: Files, gpu: PciDevice) -> str:
    information = files.text(f"{_DRIVER}/gpus/{gpu.address}/information") or ""
    model = re.search(r"^Model:\s*(.+)$", information, re.MULTILINE)
    numa = f", NUMA node {gpu.numa_node}" if gpu.numa_node >= 0 else ""
    return f"{model[1].strip() if model else 'unknown model'}{numa}"


def _nvlink_domain(files: Files) -> Finding:
    name = "multi-node NVLink"
    channels = [one for one in files.names("/dev/nvidia-caps-imex-channels") if one.startswith("channel")]
    if channels:
        return Finding(name, Verdict.GOOD, f"IMEX has {count(len(channels), 'channel')} here")
    if files.exists("/etc/nvidia-imex/nodes_config.cfg"):
        return Finding(
            name,
            Verdict.WARNING,
            "IMEX is configured but has no channel here",
            "GPUs of other nodes of the domain cannot be mapped",
            "IMEX's guide says how to create /dev/nvidia-caps-imex-channels/channel0; this shows whether IMEX runs:",
            "systemctl status nvidia-imex",
        )
    return Finding(name, Verdict.ABSENT, "no IMEX channels", "NVLink, if there is any, ends at this node")


def _dma_buf(files: Files) -> tuple[bool, str]:
    """Return whether NICs can access GPU memory by dma-buf, and how or why not."""
    kernel = kernel_version(files)
    if not _has_open_driver(files):
        return False, "no dma-buf, which requires NVIDIA's open kernel modules"
    if kernel is not None and kernel < _DMA_BUF_KERNEL:
        return False, f"no dma-buf for NICs, which requires Linux {'.'.join(map(str, _DMA_BUF_KERNEL))} or newer"
    return True, "dma-buf, by the open kernel modules"


def connectx_to_memory(files: Files) -> Finding:
    """Describe how a ConnectX can access GPU memory."""
    name = "ConnectX to GPU memory"
    if files.exists("/sys/module/nvidia_peermem"):
        return Finding(name, Verdict.GOOD, "nvidia_peermem is loaded")
    works, how = _dma_buf(files)
    if works:
        return Finding(name, Verdict.GOOD, how)
    return Finding(
        name,
        Verdict.INFO,
        f"nvidia_peermem is not loaded; {how}",
        "these NICs cannot register GPU memory; the proxy does not need that, since its rows go through host memory",
        "load the module:",
        "sudo modprobe nvidia_peermem",
    )


def _efa_to_memory(files: Files, nic: Nic) -> Finding:
    """Describe how EFA can access GPU memory. EFA's own driver names the provider in a file; the kernel's has none."""
    name, provider = f"{nic.name} to GPU memory", files.text(f"/sys/class/infiniband/{nic.name}/device/p2p")
    if provider:
        return Finding(name, Verdict.GOOD, f"by {provider}, as its driver says")
    works, how = _dma_buf(files)
    if works:
        return Finding(name, Verdict.GOOD, how)
    driver = how if provider is None else f"its driver knows no GPU driver; {how}"
    reason = "it cannot register GPU memory; the proxy does not need that, since its rows go through host memory"
    return Finding(name, Verdict.INFO, driver, reason)


def doorbells(files: Files, judged: bool) -> Finding:
    """Describe whether a GPU can ring a NIC's doorbell, which requires the driver to map the NIC's registers for it."""
    name, unset = "doorbells from GPUs", Verdict.WARNING if judged else Verdict.INFO
    parameters = files.text(f"{_DRIVER}/params")
    if parameters is None:
        return Finding(name, unset, "unknown", f"{_DRIVER}/params cannot be read")
    words = re.search(r'^RegistryDwords:\s*"([^"]*)"', parameters, re.MULTILINE)
    settings = dict(word.strip().split("=", 1) for word in (words[1] if words else "").split(";") if "=" in word)
    value = settings.get(_OVERRIDE, "").strip()
    if value.isdecimal() and int(value) == 1:
        return Finding(name, Verdict.GOOD, f"{_OVERRIDE}=1")
    reason = "NVSHMEM cannot map the doorbells of NICs for GPUs, and falls back to a CPU thread that rings them"
    if not judged:
        reason = "it matters only to NVSHMEM, whose kernels need it to ring NICs themselves"
    if settings:  # a second line would replace the first, wherever that is
        return Finding(
            name,
            unset,
            f"{_OVERRIDE} is {value or 'not set'}, but other RegistryDwords are",
            reason,
            f"add {_OVERRIDE}=1; to NVreg_RegistryDwords in the file that this finds, and reboot:",
            "grep -r NVreg_RegistryDwords /etc/modprobe.d",
        )
    return Finding(
        name,
        unset,
        f"{_OVERRIDE} is not set",
        reason,
        "set it, and reboot:",
        f"""echo 'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="{_OVERRIDE}=1;"' | """
        "sudo tee /etc/modprobe.d/nvidia-peer-mapping.conf",
    )


def _gdrcopy(files: Files) -> Finding:
    if files.exists("/dev/gdrdrv"):
        return Finding("GDRCopy", Verdict.GOOD, "gdrdrv is loaded", "nothing here needs it")
    return Finding("GDRCopy", Verdict.ABSENT, "gdrdrv is not loaded", "nothing here needs it")
