# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The expanded layout of normal mode.
"""

from __future__ import annotations
import collections.abc
import deep_ep_py._C
import deep_ep_py._C.normal
import typing

__all__: list[str] = ["CHOICE_CHUNKS", "Layout", "Tensors", "copy", "copy_scales", "fold", "number"]

class Layout:
    def __init__(
        self, *, expert_rows: int, slots: int, experts: int, alignment: int, rows: int, expanded_rows: int
    ) -> None: ...

class Tensors:
    def __init__(self) -> None: ...
    @property
    def bias(self) -> typing.Annotated[list[int], "FixedSize(2)"]: ...
    @bias.setter
    def bias(self, arg0: typing.Annotated[collections.abc.Sequence[int], "FixedSize(2)"]) -> None: ...
    @property
    def expanded_scales(self) -> int: ...
    @expanded_scales.setter
    def expanded_scales(self, arg0: int) -> None: ...
    @property
    def expanded_weights(self) -> int: ...
    @expanded_weights.setter
    def expanded_weights(self, arg0: int) -> None: ...
    @property
    def expanded_x(self) -> int: ...
    @expanded_x.setter
    def expanded_x(self, arg0: int) -> None: ...
    @property
    def scales(self) -> int: ...
    @scales.setter
    def scales(self, arg0: int) -> None: ...
    @property
    def scales_stride(self) -> typing.Annotated[list[int], "FixedSize(2)"]: ...
    @scales_stride.setter
    def scales_stride(self, arg0: typing.Annotated[collections.abc.Sequence[int], "FixedSize(2)"]) -> None: ...
    @property
    def topk_weights(self) -> int: ...
    @topk_weights.setter
    def topk_weights(self, arg0: int) -> None: ...
    @property
    def x(self) -> int: ...
    @x.setter
    def x(self, arg0: int) -> None: ...

def copy(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: deep_ep_py._C.normal.Sizes,
    layout: Layout,
    tensors: Tensors,
    *,
    zero_padding: bool,
    blocks: int,
) -> None: ...
def copy_scales(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: deep_ep_py._C.normal.Sizes,
    *,
    rows: int,
    scales: int,
    columns: int,
    column_stride: int,
    blocks: int,
) -> None: ...
def fold(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: deep_ep_py._C.normal.Sizes,
    layout: Layout,
    tensors: Tensors,
    *,
    blocks: int,
) -> None: ...
def number(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: deep_ep_py._C.normal.Sizes,
    layout: Layout,
    *,
    topk_idx: int,
    received: int,
    counts: int,
    blocks: int,
) -> None: ...

CHOICE_CHUNKS: int = 64
