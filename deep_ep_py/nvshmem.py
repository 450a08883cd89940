"""NVSHMEM's symmetric heap: `reserve`."""

from deep_ep_py.transport.nvshmem import reserve as reserve
