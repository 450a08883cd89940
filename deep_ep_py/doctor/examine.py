"""All sections of the report on a machine."""

from __future__ import annotations

from deep_ep_py.doctor.files import Files
from deep_ep_py.doctor.findings import Section
from deep_ep_py.doctor.gpus import gpus
from deep_ep_py.doctor.host import host
from deep_ep_py.doctor.network import network
from deep_ep_py.doctor.paths import paths
from deep_ep_py.doctor.software import software


def examine(files: Files) -> list[Section]:
    """Return all that can be said of the machine that the files describe; software and paths of this one alone."""
    sections = [host(files), gpus(files), network(files)]
    return [*sections, software(), paths()] if files.live else sections
