"""What ranks find out about two GPUs: whether each uses the memory of the other as kernels need it, and from where."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

SAME_GPU, DRIVER, NVML = "the GPU that they share", "the CUDA driver", "NVML"

NO_ACCESS = "their GPUs cannot map each other's memory"
NO_ATOMICS = "atomics between their GPUs are not native, as over PCIe, and signals need them"


class GpuAnswer(NamedTuple):
    """The answer to whether two GPUs use each other's memory as kernels need it.

    Attributes
    ----------
    source : str
        Where the answer comes from: `SAME_GPU`, `DRIVER` or `NVML`. Empty if it is not known; `refusal` then says why.
    refusal : str
        Why they do not; empty if they do.
    access : bool
        Whether at least loads and stores reach, and only atomics do not.
    """

    source: str
    refusal: str = ""
    access: bool = True


def name_of_gpu(gpu: str, kind: str = "GPU") -> str:
    """Return the name that `nvidia-smi -L` lists for a UUID of 32 hexadecimal digits."""
    return f"{kind}-{UUID(hex=gpu)}"


def answer_of(source: str, one: str, other: str, access: bool, atomics: bool) -> GpuAnswer:
    """Return what follows from what two GPUs can do: load and store, and modify atomically, each in both directions."""
    if access and atomics:
        return GpuAnswer(source)
    why, cap = (NO_ATOMICS, "a") if access else (NO_ACCESS, "r")
    names = f"{name_of_gpu(one)} and {name_of_gpu(other)}"
    return GpuAnswer(source, f"{why} ({names}, according to {source}; nvidia-smi topo -p2p {cap})", access)
