# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The calls of normal mode.
"""

from __future__ import annotations
import collections.abc
import deep_ep_py._C
import typing

__all__: list[str] = [
    "CALL_WORDS",
    "CombineTensors",
    "DispatchTensors",
    "Plan",
    "Sizes",
    "combine",
    "counts",
    "dispatch",
    "forwarded_rows",
    "layout",
    "max_ranks",
    "min_region_bytes",
    "notify",
    "notify_cached_dispatch",
    "notify_combine",
    "put_bytes",
    "rows_per_expert",
    "total_rows",
]

class Sizes:
    def __init__(
        self,
        tokens: int,
        row_bytes: int,
        topk: int,
        experts: int,
        *,
        id_bytes: int = 8,
        scales: int = 0,
        types: int = 0,
    ) -> None: ...
    @property
    def experts(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def topk(self) -> int: ...

class DispatchTensors:
    def __init__(self) -> None: ...
    @property
    def recv_scales(self) -> int: ...
    @recv_scales.setter
    def recv_scales(self, arg0: int) -> None: ...
    @property
    def recv_src_idx(self) -> int: ...
    @recv_src_idx.setter
    def recv_src_idx(self, arg0: int) -> None: ...
    @property
    def recv_topk_idx(self) -> int: ...
    @recv_topk_idx.setter
    def recv_topk_idx(self, arg0: int) -> None: ...
    @property
    def recv_topk_weights(self) -> int: ...
    @recv_topk_weights.setter
    def recv_topk_weights(self, arg0: int) -> None: ...
    @property
    def recv_x(self) -> int: ...
    @recv_x.setter
    def recv_x(self, arg0: int) -> None: ...
    @property
    def scales(self) -> int: ...
    @scales.setter
    def scales(self, arg0: int) -> None: ...
    @property
    def scales_stride(self) -> typing.Annotated[list[int], "FixedSize(2)"]: ...
    @scales_stride.setter
    def scales_stride(self, arg0: typing.Annotated[collections.abc.Sequence[int], "FixedSize(2)"]) -> None: ...
    @property
    def topk_idx(self) -> int: ...
    @topk_idx.setter
    def topk_idx(self, arg0: int) -> None: ...
    @property
    def topk_weights(self) -> int: ...
    @topk_weights.setter
    def topk_weights(self, arg0: int) -> None: ...
    @property
    def x(self) -> int: ...
    @x.setter
    def x(self, arg0: int) -> None: ...

class CombineTensors:
    def __init__(self) -> None: ...
    @property
    def bias(self) -> typing.Annotated[list[int], "FixedSize(2)"]: ...
    @bias.setter
    def bias(self, arg0: typing.Annotated[collections.abc.Sequence[int], "FixedSize(2)"]) -> None: ...
    @property
    def combined_weights(self) -> int: ...
    @combined_weights.setter
    def combined_weights(self, arg0: int) -> None: ...
    @property
    def combined_x(self) -> int: ...
    @combined_x.setter
    def combined_x(self, arg0: int) -> None: ...
    @property
    def src_idx(self) -> int: ...
    @src_idx.setter
    def src_idx(self, arg0: int) -> None: ...
    @property
    def topk_weights(self) -> int: ...
    @topk_weights.setter
    def topk_weights(self, arg0: int) -> None: ...
    @property
    def x(self) -> int: ...
    @x.setter
    def x(self, arg0: int) -> None: ...

class Plan:
    def __init__(
        self, token_row: int, row_token: int, rank_prefix: int, source_tokens: int, rows_to_rank: int
    ) -> None: ...

def combine(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: Sizes,
    tensors: CombineTensors,
    *,
    plan: Plan,
    rows: int,
    publish: bool,
    blocks: int,
) -> bool: ...
def counts(call: deep_ep_py._C.Call) -> None: ...
def dispatch(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: Sizes,
    tensors: DispatchTensors,
    *,
    plan: Plan,
    rows: int,
    cached: bool,
    blocks: int,
) -> bool: ...
def forwarded_rows(call: deep_ep_py._C.Call) -> int: ...
def layout(
    runtime: deep_ep_py._C.Runtime,
    sizes: Sizes,
    *,
    topk_idx: int,
    tokens_per_rank: int,
    tokens_per_node: int,
    tokens_per_expert: int,
    is_token_in_rank: int,
    blocks: int,
) -> int: ...
def max_ranks(runtime: deep_ep_py._C.Runtime, experts: int) -> int: ...
def min_region_bytes(runtime: deep_ep_py._C.Runtime, sizes: Sizes) -> int: ...
def notify(
    runtime: deep_ep_py._C.Runtime,
    sizes: Sizes,
    *,
    is_token_in_rank: int,
    tokens_per_expert: int,
    plan: Plan,
    max_rows: int,
    finish_later: bool,
    blocks: int,
) -> deep_ep_py._C.Call: ...
def notify_cached_dispatch(runtime: deep_ep_py._C.Runtime, sizes: Sizes, *, handle: int) -> deep_ep_py._C.Call: ...
def notify_combine(runtime: deep_ep_py._C.Runtime, sizes: Sizes, *, handle: int) -> deep_ep_py._C.Call: ...
def put_bytes(runtime: deep_ep_py._C.Runtime, sizes: Sizes) -> tuple[int, int]: ...
def rows_per_expert(call: deep_ep_py._C.Call) -> list[int]: ...
def total_rows(call: deep_ep_py._C.Call) -> int: ...

CALL_WORDS: int = 2048
