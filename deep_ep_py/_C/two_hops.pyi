# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The calls of normal mode in two hops.
"""

from __future__ import annotations
import deep_ep_py._C
import deep_ep_py._C.normal
import typing

__all__: list[str] = [
    "MARK_ROWS",
    "MAX_CHUNK_BYTES",
    "MAX_CHUNK_ROWS",
    "Plan",
    "ROLES",
    "SET_BITS",
    "SLOTS",
    "chunk_rows",
    "combine",
    "dispatch",
    "max_ranks",
    "min_region_bytes",
    "notify",
    "put_bytes",
    "staging",
]

class Plan:
    def __init__(
        self,
        *,
        sent: int,
        sent_token: int,
        sent_ranks: int,
        sent_marks: int,
        node_row: int,
        rows_to_rank: int,
        forwarded: int,
        node_rows: int,
        rank_prefix: int,
        node_forwarded: int,
        rank_begin: int,
        table: int,
        holders: int,
        table_rows: int,
    ) -> None: ...

def chunk_rows(runtime: deep_ep_py._C.Runtime, sizes: deep_ep_py._C.normal.Sizes) -> int: ...
def combine(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: deep_ep_py._C.normal.Sizes,
    tensors: deep_ep_py._C.normal.CombineTensors,
    *,
    plan: Plan,
    rows: int,
    publish: bool,
    blocks: int,
) -> bool: ...
def dispatch(
    runtime: deep_ep_py._C.Runtime,
    call: deep_ep_py._C.Call,
    sizes: deep_ep_py._C.normal.Sizes,
    tensors: deep_ep_py._C.normal.DispatchTensors,
    *,
    plan: Plan,
    rows: int,
    cached: bool,
    blocks: int,
) -> bool: ...
def max_ranks(runtime: deep_ep_py._C.Runtime, experts: int) -> int: ...
def min_region_bytes(runtime: deep_ep_py._C.Runtime, sizes: deep_ep_py._C.normal.Sizes) -> int: ...
def notify(
    runtime: deep_ep_py._C.Runtime,
    sizes: deep_ep_py._C.normal.Sizes,
    *,
    is_token_in_rank: int,
    tokens_per_expert: int,
    checked_ids: int | None,
    plan: Plan,
    counts: deep_ep_py._C.normal.CountTensors,
    max_rows: int,
    finish_later: bool,
    blocks: int,
) -> deep_ep_py._C.Call: ...
def put_bytes(runtime: deep_ep_py._C.Runtime, sizes: deep_ep_py._C.normal.Sizes) -> tuple[int, int]: ...
def staging(
    sizes: deep_ep_py._C.normal.Sizes, *, ranks: int, ranks_per_node: int, bytes_in_flight: int
) -> tuple[int, int]: ...

MARK_ROWS: int = 32
MAX_CHUNK_BYTES: int = 524288
MAX_CHUNK_ROWS: int = 128
ROLES: int = 2
SET_BITS: int = 32
SLOTS: int = 4
