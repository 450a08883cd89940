"""Environment variables that stand in the place of a Buffer's arguments, or of some that it does not have."""

from __future__ import annotations

RANKS_PER_NODE = "DEEP_EP_RANKS_PER_NODE"
"""Of `ranks_per_node`."""
FABRIC = "DEEP_EP_FABRIC"
"""Of `fabric`."""
PROVIDER = "DEEP_EP_PROXY_PROVIDER"
"""The provider of libfabric that the proxy takes, the same on all ranks."""
ADDRESS = "DEEP_EP_ADDRESS"
"""The IP address at which ranks of other machines find this one."""
SECRET = "DEEP_EP_SECRET"
"""A file that the machines of a job have in common: its content is a part of the secret by which their ranks know each
other."""
PROXY_CPUS = "DEEP_EP_PROXY_CPUS"
"""The CPUs that the proxy's thread may run on, as 0-3,8."""
