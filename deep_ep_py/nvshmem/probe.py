"""What NVSHMEM's library tells kernels: read from the symbols of a module that is loaded for that alone.

The library fills in, by name, what a module defines; how its fields lie the library's version decides, never a header's
(csrc/wire/nvshmem.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from deep_ep_py.core.native import C
from deep_ep_py.nvshmem.library import Library

_VERSION, _DEVICE, _IBGDA = (
    f"nvshmemi_{name}_d" for name in ("device_lib_version", "device_state", "ibgda_device_state")
)
_OLDEST = (3, 4, 5)
"""Whose layout the states have: any later release of that major version fills in the same."""


@dataclass(frozen=True)
class States:
    """The bytes of both states, as they were when they were read."""

    device: bytes
    ibgda: bytes

    @property
    def heap(self) -> int:
        """Address of this PE's symmetric heap."""
        return C.nvshmem.heap_of(self.device)


def read_states(library: Library, context: Any) -> States:
    """Read what the library has told kernels so far. After the last allocation, that is: it tells of new memory's keys.

    Waits for all that runs on the GPU, as the library does.

    Parameters
    ----------
    library : Library
        Initialised with a device.
    context : native.C.cuda.Context
        Of that device; current on this thread.

    Raises
    ------
    NvshmemError
        The library refuses the module.
    """
    module = C.nvshmem.LoadedModule(context, _cubin(context.architecture))
    try:
        library.fill_in(module.handle)
        return States(module.read(_DEVICE), module.read(_IBGDA))
    finally:
        # Also where an interrupt has come while the library waited: it must not come to know a module that is gone.
        library.forget(module.handle)


@cache
def _cubin(architecture: str) -> bytes:
    from deep_ep_py.jit.compiler import compile_text

    sizes = {_DEVICE: C.nvshmem.STATE_BYTES, _IBGDA: C.nvshmem.IBGDA_STATE_BYTES}
    states = "".join(
        f'extern "C" __constant__ __align__(8) unsigned char {name}[{size}] = {{0}};\n' for name, size in sizes.items()
    )
    numbers = ", ".join(map(str, _OLDEST))
    version = f'extern "C" __constant__ int {_VERSION}[3] = {{{numbers}}};\n'
    return compile_text("nvshmem_probe", version + states, architecture)
