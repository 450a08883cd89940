# Written by `make stubs` from the bindings in csrc/python: change those.
"""
Calls that only measurements make.
"""

from __future__ import annotations
import deep_ep_py._C
import typing

__all__: list[str] = ["post"]

def post(
    runtime: deep_ep_py._C.Runtime,
    *,
    to: int,
    posters: int,
    puts: int,
    bytes: int,
    source: int,
    target: int,
    words: int,
    blocks: int,
) -> deep_ep_py._C.Call: ...
