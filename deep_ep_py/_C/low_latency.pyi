# Written by `make stubs` from the bindings in csrc/python: change those.
"""
The calls of low-latency mode.
"""

from __future__ import annotations
import deep_ep_py._C
import typing

__all__: list[str] = [
    "LOG_GROUP",
    "MAX_EXPERTS",
    "MAX_RESULTS",
    "SCALE_GROUP",
    "Scales",
    "Sizes",
    "combine",
    "dispatch",
    "finish",
    "fits_shared_memory",
    "forward",
    "forwards",
    "max_put_bytes",
    "places_words",
    "put_bytes",
    "region_bytes",
]

class Scales:
    """
    Members:

      NONE

      FLOAT

      POWERS

      EXPONENTS
    """

    EXPONENTS: typing.ClassVar[Scales]
    FLOAT: typing.ClassVar[Scales]
    NONE: typing.ClassVar[Scales]
    POWERS: typing.ClassVar[Scales]
    __members__: typing.ClassVar[dict[str, Scales]]
    @typing.overload
    def __eq__(self, other: Scales) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Scales) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: int) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Sizes:
    def __init__(
        self,
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        experts: int,
        id_bytes: int,
        scales: Scales,
        logfmt: bool,
        per_node: int,
        weighted: bool,
    ) -> None: ...

def combine(
    runtime: deep_ep_py._C.Runtime,
    sizes: Sizes,
    tokens: int,
    x: int,
    topk_idx: int,
    topk_weights: int,
    combined_x: int,
    publish: bool,
    src_info: int,
    ranges: int,
    places: int,
    waited_ns: int,
    handle: int,
    whole: bool,
    blocks: int,
    forward_blocks: int,
) -> deep_ep_py._C.Call: ...
def dispatch(
    runtime: deep_ep_py._C.Runtime,
    sizes: Sizes,
    tokens: int,
    x: int,
    topk_idx: int,
    topk_weights: int,
    recv_x: int,
    recv_scales: int,
    scales_stride: int,
    recv_count: int,
    src_info: int,
    ranges: int,
    places: int,
    stats: int,
    waited_ns: int,
    whole: bool,
    blocks: int,
    forward_blocks: int,
) -> deep_ep_py._C.Call: ...
def finish(runtime: deep_ep_py._C.Runtime, call: deep_ep_py._C.Call) -> None: ...
def fits_shared_memory(runtime: deep_ep_py._C.Runtime, sizes: Sizes) -> bool: ...
def forward(runtime: deep_ep_py._C.Runtime, call: deep_ep_py._C.Call) -> int: ...
def forwards(call: deep_ep_py._C.Call) -> bool:
    """
    Return whether the call has a launch that only forwards, which forward() is to make.
    """

def max_put_bytes(runtime: deep_ep_py._C.Runtime, sizes: Sizes) -> int: ...
def places_words(sizes: Sizes, *, ranks: int, tokens: int) -> int: ...
def put_bytes(runtime: deep_ep_py._C.Runtime, sizes: Sizes) -> int: ...
def region_bytes(sizes: Sizes, *, ranks: int, has_remote: bool) -> int: ...

LOG_GROUP: int = 128
MAX_EXPERTS: int = 65535
MAX_RESULTS: int = 2097151
SCALE_GROUP: int = 128
