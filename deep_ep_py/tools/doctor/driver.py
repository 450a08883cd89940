"""Facts that the CUDA driver reports about this process's GPUs, read through libcuda without creating a context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"

NO_ORDERING, OWNER_ORDERING, ALL_ORDERING = 0, 100, 200
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE, _OWNER and _ALL_DEVICES."""

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_RDMA_SUPPORTED, _RDMA_WRITES_ORDERING, _DMA_BUF_SUPPORTED, _FABRIC_HANDLES = 116, 118, 124, 128  # CUdevice_attribute
_NATIVE_ATOMICS = 3  # CUdevice_P2PAttribute
_NAME_BYTES = 128


class DriverUnavailableError(RuntimeError):
    """Failure to query the driver; the message says why."""


class NoGpuError(DriverUnavailableError):
    """A driver that shows this process no GPU."""


@dataclass(frozen=True)
class DriverGpu:
    """The driver's facts about a GPU.

    Attributes
    ----------
    name, address : str
        The model and the PCI address.
    rdma : bool
        Whether NICs can access its memory (GPUDirect RDMA).
    ordering : int
        Which GPUs see the writes of NICs in order: `NO_ORDERING`, `OWNER_ORDERING` or `ALL_ORDERING`.
    dma_buf, fabric_handles : bool
        Whether its memory can be exported as dma-buf, and to GPUs of other nodes.
    """

    name: str
    address: str
    rdma: bool
    ordering: int
    dma_buf: bool
    fabric_handles: bool


@dataclass(frozen=True)
class DriverFacts:
    """All facts that the driver reports.

    Attributes
    ----------
    version : str
        The newest CUDA version that it supports, for example "13.0".
    gpus : tuple of DriverGpu
        The GPUs, in the order of their numbers in this process.
    access, atomics : frozenset of (int, int)
        Pairs of GPUs of which the first can load from and store to the memory of the second, and modify it atomically.
    """

    version: str
    gpus: tuple[DriverGpu, ...]
    access: frozenset[tuple[int, int]]
    atomics: frozenset[tuple[int, int]]


def read_driver(library: str = LIBRARY) -> DriverFacts:
    """Query the driver.

    Parameters
    ----------
    library
        Name or path of its library.

    Raises
    ------
    NoGpuError
        The driver shows this process no GPU.
    DriverUnavailableError
        The driver is missing, or a call fails.
    """
    try:
        driver = _Driver(ctypes.CDLL(library))
    except OSError as error:
        raise DriverUnavailableError(str(error)) from None  # its message names the library
    driver.call("cuInit", ctypes.c_uint(0))
    version = driver.integer("cuDriverGetVersion")
    number = driver.integer("cuDeviceGetCount")
    if number == 0:
        raise NoGpuError("the driver shows this process no GPU")
    devices = [ctypes.c_int(driver.integer("cuDeviceGet", ctypes.c_int(ordinal))) for ordinal in range(number)]
    pairs = [(one, other) for one in range(number) for other in range(number) if one != other]
    access = {pair for pair in pairs if driver.integer("cuDeviceCanAccessPeer", devices[pair[0]], devices[pair[1]])}
    atomics = {
        pair
        for pair in access
        if driver.integer("cuDeviceGetP2PAttribute", ctypes.c_int(_NATIVE_ATOMICS), devices[pair[0]], devices[pair[1]])
    }
    return DriverFacts(
        version=f"{version // 1000}.{version % 1000 // 10}",
        gpus=tuple(_gpu(driver, device) for device in devices),
        access=frozenset(access),
        atomics=frozenset(atomics),
    )


class _Driver:
    """A wrapper that calls functions of the library and raises exceptions for their errors."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverUnavailableError(f"the driver is too old: it has no {name}")
        result = function(*arguments)
        if result == _NO_DEVICE:
            raise NoGpuError("the driver shows this process no GPU")
        if result:
            raise DriverUnavailableError(f"{name} fails: {self._text(result)}")

    def integer(self, name: str, *arguments: Any) -> int:
        """Return the value that a function stores through its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def text(self, name: str, device: ctypes.c_int) -> str:
        """Return the text that a function writes into a buffer."""
        buffer = ctypes.create_string_buffer(_NAME_BYTES)
        self.call(name, buffer, ctypes.c_int(_NAME_BYTES), device)
        return buffer.value.decode(errors="replace")

    def attribute(self, which: int, device: ctypes.c_int) -> int:
        """Return an attribute of a device; 0 if this driver does not know it."""
        try:
            return self.integer("cuDeviceGetAttribute", ctypes.c_int(which), device)
        except DriverUnavailableError:
            return 0

    def _text(self, result: int) -> str:
        found = ctypes.c_char_p()
        describe = getattr(self._library, "cuGetErrorString", None)
        if describe is None or describe(ctypes.c_int(result), ctypes.byref(found)) or found.value is None:
            return f"error {result}"
        return f"{found.value.decode(errors='replace')} (error {result})"


def _gpu(driver: _Driver, device: ctypes.c_int) -> DriverGpu:
    return DriverGpu(
        name=driver.text("cuDeviceGetName", device),
        address=driver.text("cuDeviceGetPCIBusId", device).lower(),
        rdma=bool(driver.attribute(_RDMA_SUPPORTED, device)),
        ordering=driver.attribute(_RDMA_WRITES_ORDERING, device),
        dma_buf=bool(driver.attribute(_DMA_BUF_SUPPORTED, device)),
        fabric_handles=bool(driver.attribute(_FABRIC_HANDLES, device)),
    )
