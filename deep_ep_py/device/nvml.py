"""What NVML says of two GPUs of this machine, even if CUDA_VISIBLE_DEVICES hides one of them from the CUDA driver.

It is called by ctypes, since not all releases of cuda-bindings that are in use have bindings of it: they came in 12.9.6
and 13.2, and the wheels of torch 2.10 require an older one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from deep_ep_py.base.gpus import NVML, GpuAnswer, answer_of, name_of_gpu

LIBRARY = "libnvidia-ml.so.1"

_CAPS = _READ, _WRITE, _ATOMICS = 0, 1, 3  # nvmlGpuP2PCapsIndex_t
_STATUS_OK = 0  # nvmlGpuP2PStatus_t


class NvmlError(RuntimeError):
    """NVML is missing, or does not answer; the message says why."""


class Nvml:
    """NVML, which stays initialized as long as the process lives.

    Parameters
    ----------
    library : str
        Name or path of its library.

    Raises
    ------
    NvmlError
        There is no such library, or it fails to initialize.
    """

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(str(error)) from None  # its message names the library
        self._call("nvmlInit_v2")

    def answer(self, one: str, other: str) -> GpuAnswer:
        """Answer about two GPUs by their UUIDs, of 32 hexadecimal digits.

        Raises
        ------
        NvmlError
            It does not show one of them, as in a container without it, or does not know.
        """
        handles = []
        for gpu in (one, other):
            try:
                handles.append(self._find(name_of_gpu(gpu)))
            except NvmlError as error:
                if self._shows(name_of_gpu(gpu, "MIG")):
                    return GpuAnswer(NVML, f"{name_of_gpu(gpu, 'MIG')} is an instance (MIG), which has no peers", False)
                raise NvmlError(f"NVML shows no {name_of_gpu(gpu)}: {error}") from None
        return answer_of(NVML, one, other, *self.reach(*handles))

    def reach(self, one: int, other: int) -> tuple[bool, bool]:
        """Return whether two GPUs load from and store to each other's memory, and whether they modify it atomically."""
        can = {which: all(self._has(which, *way) for way in ((one, other), (other, one))) for which in _CAPS}
        return can[_READ] and can[_WRITE], can[_ATOMICS]

    def gpus(self) -> list[int]:
        """Return the handles of all GPUs that it shows, as `nvidia-smi` numbers them."""
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return [self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)) for index in range(number.value)]

    def _find(self, name: str) -> int:
        return self._handle("nvmlDeviceGetHandleByUUID", name.encode())

    def _shows(self, name: str) -> bool:
        try:
            self._find(name)
        except NvmlError:
            return False
        return True

    def _handle(self, function: str, which: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(function, which, ctypes.byref(handle))
        return handle.value or 0

    def _has(self, which: int, source: int, target: int) -> bool:
        status = ctypes.c_int()
        pair = ctypes.c_void_p(source), ctypes.c_void_p(target)
        self._call("nvmlDeviceGetP2PStatus", *pair, ctypes.c_int(which), ctypes.byref(status))
        return status.value == _STATUS_OK

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise NvmlError(f"it has no {name}")
        if result := function(*arguments):
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise NvmlError(f"{name}: {describe(ctypes.c_int(result)).decode(errors='replace')}")


@cache
def library() -> Nvml:
    """Return NVML; tried again by the next call if that fails."""
    return Nvml(LIBRARY)
