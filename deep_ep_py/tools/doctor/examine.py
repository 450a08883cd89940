"""All sections of the report on a machine."""

from __future__ import annotations

import os

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.doctor.findings import Section, not_read
from deep_ep_py.tools.doctor.gpus import gpus
from deep_ep_py.tools.doctor.host import host
from deep_ep_py.tools.doctor.limits import limits
from deep_ep_py.tools.doctor.network import network
from deep_ep_py.tools.doctor.nvshmem import Process
from deep_ep_py.tools.doctor.paths import paths
from deep_ep_py.tools.doctor.pci import read_gpus
from deep_ep_py.tools.doctor.runnable import TITLE, runnable
from deep_ep_py.tools.doctor.software import nvshmem_version, software
from deep_ep_py.tools.doctor.variables import variables
from deep_ep_py.tools.doctor.visible import visible

_OF_A_PROCESS = ("GPUs of this process", "Software", "Environment", "Paths", TITLE)


def examine(files: Files) -> list[Section]:
    """Return all sections on the machine that the files describe.

    For a copy of another machine's files, facts about this process and this machine are not read.
    """
    process = Process(os.environ, nvshmem_version()) if files.live else None
    sections = [host(files), limits(files), gpus(files, process), network(files, process)]
    if not files.live:
        return [*sections, Section.of("This process", (not_read(title) for title in _OF_A_PROCESS))]
    sections.insert(3, visible(len(read_gpus(files))))
    sections += [software(), variables(), paths(files)]
    return [*sections, runnable(sections)]
