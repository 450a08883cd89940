"""NVSHMEM's host library, through nvshmem4py's bindings: the calls that are used, and the meaning of its errors."""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.errors import DeepEPError
from deep_ep_py.transport.nvshmem.settings import INSTALL

NAME = "libnvshmem_host.so.3"
"""Its SONAME: a process has one library of that name, whichever is loaded first."""
_UNIQUE_ID_BYTES = 128
_INIT_WITH_UNIQUE_ID = 1 << 3
_ATTRIBUTES = 1 << 16 | 144
"""Version word and size of the initialization attributes, as every known release takes them."""
_LIKELY = {
    7: "it found no GPU that it can use, or lost another PE",
}


class NvshmemError(DeepEPError):
    """NVSHMEM is missing or has failed; the message says what to change."""


@dataclass(frozen=True)
class Library:
    """The library that this process has loaded.

    Attributes
    ----------
    bindings : module
        The bindings of nvshmem4py.
    release : tuple of int
        Major, minor and patch version of the library itself, not of nvshmem4py or a header.
    """

    bindings: Any
    release: tuple[int, int, int]

    @property
    def version(self) -> int:
        """The release as a number that grows from each release to the next."""
        return C.nvshmem.version(*self.release)

    def status(self) -> int:
        """Return how far NVSHMEM is initialized; 0 means not at all."""
        return int(self.bindings.init_status())

    def unique_id(self) -> bytes:
        """Return the id that other processes need to join; this process must live to answer them."""
        unique = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
        self._call("making a unique id", self.bindings.get_uniqueid, ctypes.addressof(unique))
        return unique.raw

    def initialize(self, unique: bytes, pe: int, pes: int) -> None:
        """Join the PEs of a unique id. Collective among them, with a CUDA device current on this thread."""
        # The library keeps the address of the id, so the id must live as long as the call.
        kept = ctypes.create_string_buffer(unique, _UNIQUE_ID_BYTES)
        attributes = _attributes()
        at, doing = ctypes.addressof(attributes), f"initializing it as PE {pe} of {pes}"
        self._call(doing, self.bindings.set_attr_uniqueid_args, pe, pes, ctypes.addressof(kept), at)
        self._call(doing, self.bindings.hostlib_init_attr, _INIT_WITH_UNIQUE_ID, at)

    def take_device(self) -> None:
        """Make a library that was initialized without a GPU take this thread's current one. Collective among all PEs.

        An allocation would do so too, but NVSHMEM ends the process if that finds no GPU.
        """
        attributes = _attributes()
        self._call("taking a GPU", self.bindings.hostlib_init_attr, 0, ctypes.addressof(attributes))

    def pe(self) -> int:
        """Return the PE of this process."""
        return int(self.bindings.my_pe())

    def pes(self) -> int:
        """Return the number of PEs."""
        return int(self.bindings.n_pes())

    def allocate(self, alignment: int, size: int) -> int:
        """Allocate symmetric memory; return its address, or 0 if there is no room. Collective among all PEs."""
        return int(self.bindings.align(alignment, size))

    def mapped(self, address: int, pe: int) -> int:
        """Return the address at which a PE's symmetric memory is mapped for loads and stores; 0 if it is not."""
        return int(self.bindings.ptr(address, pe))

    def fill_in(self, module: int) -> None:
        """Make the library fill in its symbols in a CUDA module, and keep them up to date."""
        self._call("filling in its state", self.bindings.cumodule_init, module)

    def forget(self, module: int) -> None:
        """Stop filling in a module's symbols; call this before unloading the module. The library need not know it."""
        self.bindings.cumodule_finalize(module)

    def make_queue_pairs(self, count: int) -> list[int]:
        """Create `count` queue pairs to each PE that only their owner posts to; return their handles.

        Collective among all PEs.
        """
        create = getattr(ctypes.CDLL(NAME), "nvshmemx_qp_create", None)
        if create is None:
            raise NvshmemError(f"NVSHMEM {self}: it has no nvshmemx_qp_create, although it is version 3.5 or later")
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        made = ctypes.POINTER(ctypes.c_int)()
        status = int(create(count, ctypes.byref(made)))
        if status != 0 or not made:
            raise NvshmemError(f"NVSHMEM {self}: creating {count} queue pairs failed with status {status}")
        handles = made[:count]
        free(made)
        return handles

    def _call(self, doing: str, function: Any, *arguments: Any) -> None:
        try:
            status = function(*arguments)
        except Exception as error:  # nvshmem4py has its own types, even for missing functions
            raise self._failed(doing, getattr(error, "status", None), error) from error
        if status:  # some bindings return the status
            raise self._failed(doing, status)

    def _failed(self, doing: str, status: int | None, error: Exception | None = None) -> NvshmemError:
        likely = f": {_LIKELY[status]}" if status in _LIKELY else ""
        what = f"status {status}{likely}" if status is not None else f"{type(error).__name__}: {error}"
        hint = "" if os.environ.get("NVSHMEM_DEBUG") else "; NVSHMEM_DEBUG=INFO makes it say more"
        return NvshmemError(f"NVSHMEM {self}: {doing} fails ({what}){hint}")

    def __str__(self) -> str:
        return ".".join(map(str, self.release))


def _attributes() -> ctypes.Array[ctypes.c_char]:
    attributes = ctypes.create_string_buffer(_ATTRIBUTES & 0xFFFF)
    ctypes.c_int.from_buffer(attributes).value = _ATTRIBUTES
    return attributes


@cache
def library() -> Library:
    """Load NVSHMEM's host library, unless this process already has one.

    Raises
    ------
    NvshmemError
        The library is not installed.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")
        # nvshmem4py opens the library by name, so it must already be loaded.
        bindings: Any = importlib.import_module("nvshmem.bindings")
    except ImportError as error:
        raise NvshmemError(f"NVSHMEM cannot be used without nvshmem4py ({INSTALL}): {error}") from error
    except (OSError, RuntimeError) as error:  # raised by pathfinder
        raise NvshmemError(f"{NAME} cannot be loaded ({INSTALL}): {error}") from error
    numbers = [ctypes.c_int() for _ in range(3)]
    bindings.vendor_get_version_info(*map(ctypes.addressof, numbers))
    major, minor, patch = (number.value for number in numbers)
    return Library(bindings, (major, minor, patch))
