"""Environment variables that stand in the place of a Buffer's arguments, or of some that it does not have."""

from __future__ import annotations

RANKS_PER_NODE = "DEEP_EP_RANKS_PER_NODE"
"""Of `ranks_per_node`."""
FABRIC = "DEEP_EP_FABRIC"
"""Of `fabric`."""
PROVIDER = "DEEP_EP_PROXY_PROVIDER"
"""The provider of libfabric that the proxy takes, the same on all ranks."""
