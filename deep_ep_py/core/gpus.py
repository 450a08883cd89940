"""Reasons why two GPUs do not use each other's memory: devices report them, and paths distinguish them."""

NO_ACCESS = "its GPU's memory cannot be mapped here (nvidia-smi topo -p2p r)"
NO_ATOMICS = "atomics between their GPUs are not native, as over PCIe, and signals need them (nvidia-smi topo -p2p a)"
