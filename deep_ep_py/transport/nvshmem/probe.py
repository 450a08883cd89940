"""NVSHMEM's device state, read from the symbols of a module that is loaded only for this purpose.

The library fills in the symbols that a module defines, by name. The layout of their fields is decided by the library's
version, never by that of a header (csrc/wire/nvshmem.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.transport.nvshmem.library import Library

_VERSION, _DEVICE, _IBGDA = (
    f"nvshmemi_{name}_d" for name in ("device_lib_version", "device_state", "ibgda_device_state")
)
_OLDEST = (3, 4, 5)
"""The release whose layout the states have; every later release of that major version fills in the same."""


@dataclass(frozen=True)
class States:
    """The bytes of both states at the time they were read."""

    device: bytes
    ibgda: bytes

    @property
    def heap(self) -> int:
        """The address of this PE's symmetric heap."""
        return C.nvshmem.heap_of(self.device)


def read_states(library: Library, context: Any) -> States:
    """Read the device state of the library. Call this after the last allocation, so that it has the new memory's keys.

    Waits for everything that runs on the GPU, as the library does.

    Parameters
    ----------
    library : Library
        The library, initialized with a device.
    context : native.C.cuda.Context
        The context of that device, current on this thread.

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
        # Even after an interrupt during the library's wait: it must not keep a module that no longer exists.
        library.forget(module.handle)


@cache
def _cubin(architecture: str) -> bytes:
    from deep_ep_py.device.jit.compiler import compile_text

    sizes = {_DEVICE: C.nvshmem.STATE_BYTES, _IBGDA: C.nvshmem.IBGDA_STATE_BYTES}
    states = "".join(
        f'extern "C" __constant__ __align__(8) unsigned char {name}[{size}] = {{0}};\n' for name, size in sizes.items()
    )
    numbers = ", ".join(map(str, _OLDEST))
    version = f'extern "C" __constant__ int {_VERSION}[3] = {{{numbers}}};\n'
    return compile_text("nvshmem_probe", version + states, architecture)
