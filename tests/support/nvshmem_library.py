"""NVSHMEM's host library and the CUDA driver through ctypes, and NVSHMEM's tables according to the golden files."""

from __future__ import annotations

import ctypes
import json
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from places import DATA

VERSION, DEVICE, IBGDA = (f"nvshmemi_{name}_d" for name in ("device_lib_version", "device_state", "ibgda_device_state"))
WITH_UNIQUE_ID = 1 << 3


def module_source(version: str, device_bytes: int = 776, ibgda_bytes: int = 8384) -> str:
    """Return the symbols that a kernel linked with NVSHMEM's device library defines."""
    numbers = ", ".join(version.split("."))
    return (
        'extern "C" {\n'
        f"__device__ int {VERSION}[3] = {{{numbers}}};\n"
        f"__constant__ unsigned char {DEVICE}[{device_bytes}];\n"
        f"__constant__ unsigned char {IBGDA}[{ibgda_bytes}];\n"
        "}\n"
    )


def compile_module(source: str) -> bytes:
    """Compile to a cubin."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"module.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, result
    _, count = nvrtc.nvrtcGetCUBINSize(program)
    image = bytes(count)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(program)
    return image


class Golden:
    """The layout of a release."""

    def __init__(self, version: str) -> None:
        self._entries = json.loads((DATA / "nvshmem" / f"{version}.json").read_text())
        self.minor = int(version.split(".")[1])

    @property
    def functions(self) -> set[str]:
        """The functions of the host library that this library calls."""
        return set(self._entries["functions"])

    def bytes_of(self, table: str) -> int:
        return int(self._entries[table])

    def offset_of(self, field: str) -> int:
        return int(self._entries[field][0])

    def has(self, name: str) -> bool:
        return name in self._entries

    def get(self, table: bytes, field: str, begin: int = 0) -> int:
        offset, size = self._entries[field]
        return int.from_bytes(table[begin + offset : begin + offset + size], "little")

    def put(self, table: Any, field: str, value: int) -> None:
        offset, size = self._entries[field]
        table[offset : offset + size] = value.to_bytes(size, "little")


class Driver:
    """The driver's functions that a test calls; each must succeed."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.context, self.stream = c_void_p(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), 0)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self.library, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    def make_current(self) -> None:
        self.call("cuCtxPushCurrent_v2", self.context)
        self.call("cuStreamCreateWithPriority", byref(self.stream), 1, 0)

    def load(self, image: Path) -> c_void_p:
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), image.read_bytes())
        return module

    def unload(self, module: c_void_p) -> None:
        self.call("cuModuleUnload", module)

    def read(self, address: int, count: int) -> bytes:
        found = ctypes.create_string_buffer(count)
        self.call("cuMemcpyDtoHAsync_v2", found, c_ulonglong(address), c_size_t(count), self.stream)
        self.call("cuStreamSynchronize", self.stream)
        return found.raw

    def symbol(self, module: c_void_p, name: str) -> bytes:
        address, size = c_ulonglong(), c_size_t()
        self.call("cuModuleGetGlobal_v2", byref(address), byref(size), module, name.encode())
        return self.read(address.value, size.value)


class Nvshmem:
    """The host library, with the return types of its functions."""

    POINTERS = ("nvshmem_malloc", "nvshmem_calloc", "nvshmem_align", "nvshmem_ptr")

    def __init__(self, version: str) -> None:
        self.golden = Golden(version)
        self.library = ctypes.CDLL("libnvshmem_host.so.3", mode=ctypes.RTLD_GLOBAL)
        for name in self.POINTERS:
            getattr(self.library, name).restype = c_void_p
        self._kept: list[Any] = []

    def new_id(self) -> bytes:
        found = ctypes.create_string_buffer(self.golden.bytes_of("UniqueId"))
        assert self.library.nvshmemx_get_uniqueid(found) == 0
        return found.raw

    def arguments(self, unique_id: bytes, pe: int, pes: int) -> Any:
        """Return what NVSHMEM's own initializers and nvshmemx_set_attr_uniqueid_args produce."""
        golden = self.golden
        made = ctypes.create_string_buffer(golden.bytes_of("InitArguments"))
        table = bytearray(len(made))
        inner = golden.bytes_of("InitArguments") - golden.offset_of("InitArguments.arguments_version")
        golden.put(table, "InitArguments.version", 1 << 16 | golden.bytes_of("InitArguments"))
        golden.put(table, "InitArguments.arguments_version", 1 << 16 | inner)
        golden.put(table, "InitArguments.unique_id_version", 1 << 16 | golden.bytes_of("UniqueIdArguments"))
        made.raw = bytes(table)
        given = ctypes.create_string_buffer(unique_id, len(unique_id))
        self._kept += [made, given]
        assert self.library.nvshmemx_set_attr_uniqueid_args(pe, pes, given, made) == 0
        return made

    def init(self, unique_id: bytes, pe: int, pes: int) -> int:
        return int(self.library.nvshmemx_hostlib_init_attr(WITH_UNIQUE_ID, self.arguments(unique_id, pe, pes)))

    def status(self) -> int:
        return int(self.library.nvshmemx_init_status())

    def malloc(self, count: int) -> int | None:
        return self.library.nvshmem_malloc(c_size_t(count))

    def align(self, alignment: int, count: int) -> int | None:
        return self.library.nvshmem_align(c_size_t(alignment), c_size_t(count))

    def free(self, address: int) -> None:
        self.library.nvshmem_free(c_void_p(address))

    def near(self, address: int, pe: int) -> int | None:
        return self.library.nvshmem_ptr(c_void_p(address), pe)

    def create_queue_pairs(self, count: int) -> list[int]:
        handles = ctypes.POINTER(c_int)()
        assert self.library.nvshmemx_qp_create(count, byref(handles)) == 0
        return handles[:count]
