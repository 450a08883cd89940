"""Small standalone programs in PTX."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from deep_ep_py.base.native import C

HEAD = """\
.version 8.0
.target sm_90a
.address_size 64
.file 1 "/somewhere/kernel.cu"
"""
REGISTERS = """\
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<30>;
    .reg .f32 %f<9>;
    .reg .b64 %rd<20>;
"""


def entry(body: str, before: str = "", parameters: int = 2) -> str:
    """Return a module with the kernel `main`, whose parameters are 64-bit words: main_0, main_1, ..."""
    given = ", ".join(f".param .u64 main_{number}" for number in range(parameters))
    return f"{HEAD}{before}.visible .entry main({given})\n{{\n{REGISTERS}{body}\n    ret;\n}}\n"


def run(text: str, *given: Any, **launch: Any) -> None:
    """Run `main`. Arrays are passed by address."""
    words = [ctypes.addressof(one) if isinstance(one, ctypes.Array) else one for one in given]
    C.ptx.run(C.ptx.Image(text), "main", args=struct.pack(f"<{len(words)}Q", *words), **launch)


def words(count: int, values: Sequence[int] = ()) -> Any:
    """Return an array of 64-bit words, aligned to 16 bytes."""
    memory = (ctypes.c_uint64 * (count + 1))()
    found = (ctypes.c_uint64 * count).from_buffer(memory, ctypes.addressof(memory) % 16)
    found[: len(values)] = [*values]
    return found
