"""Environment variables that replace arguments of a Buffer, or provide settings that it has no argument for."""

from __future__ import annotations

RANKS_PER_NODE = "DEEP_EP_RANKS_PER_NODE"
"""Stands in for `ranks_per_node`."""
FABRIC = "DEEP_EP_FABRIC"
"""Stands in for `fabric`."""
TIMEOUT = "DEEP_EP_TIMEOUT"
"""Stands in for `timeout`, in seconds, the same on all ranks."""
PROVIDER = "DEEP_EP_PROXY_PROVIDER"
"""The libfabric provider that the proxy uses, the same on all ranks."""
ADDRESS = "DEEP_EP_ADDRESS"
"""The IP address at which ranks on other machines reach this one."""
SECRET = "DEEP_EP_SECRET"
"""A file shared by the machines of a job: its content is part of the secret by which their ranks authenticate each
other."""
PROXY_CPUS = "DEEP_EP_PROXY_CPUS"
"""The CPUs that the proxy's thread may run on, as 0-3,8."""
TRACE = "DEEP_EP_TRACE"
"""The file into which every Buffer of a process records a timeline."""
