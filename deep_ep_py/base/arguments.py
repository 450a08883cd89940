"""Checks of callers' arguments, made before anything is launched.

Every error names the argument, its value and what was expected.
"""

from __future__ import annotations

import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base.environment import TIMEOUT
from deep_ep_py.base.logs import log
from deep_ep_py.base.native import C

if TYPE_CHECKING:
    from deep_ep_py.base.events import Streams

ROW_ALIGNMENT = 16
"""In bytes: rows are moved one vector access at a time."""
MAX_TOPK = 32
MAX_EXPERTS = 2048
MAX_RANKS = 1024
MAX_ROWS = 2**31 - 1
"""Per rank: rows are counted in 32 bits."""
MAX_TOKENS = MAX_ROWS // MAX_RANKS
MAX_ROW_BYTES = 1 << 24
MAX_ALIGNMENT = 1 << 20
MAX_BLOCKS = 256
"""All thread blocks of a kernel are resident at once."""
MAX_BYTES = 1 << 44
"""Upper bound on the memory of a Buffer; a larger request is a mistake."""


_DEVICES = ("cpu", "cuda")
_MAX_DESCRIBED = 4
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def describe(value: Any) -> str:
    """Describe a value for an error message, briefly: tensors, also in a tuple or list, by dtype and shape."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            layout = f", {str(value.layout).removeprefix('torch.')}"
        else:
            layout = "" if value.is_contiguous() else ", not contiguous"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}{layout}"
    if isinstance(value, tuple | list) and any(isinstance(one, torch.Tensor) for one in value):
        more = ", ..." if len(value) > _MAX_DESCRIBED else ""
        return f"({', '.join(describe(one) for one in value[:_MAX_DESCRIBED])}{more})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array of NumPy or another library
        kind = type(value)
        return f"{kind.__module__.partition('.')[0]}.{kind.__name__} {value.dtype}{list(value.shape)}"
    return _SHORT.repr(value)


def same_on_all_ranks(rank: int, everyones: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks were given the same values; `everyones` holds each rank's values by name."""
    for name, value in everyones[rank].items():
        if found := difference({peer: values.get(name) for peer, values in enumerate(everyones)}):
            raise ValueError(f"{name}={value!r} on rank {rank}: expected the same on all ranks, it is {found}")


def difference(values: Mapping[int, Any], text: Callable[[Any], str] = repr) -> str:
    """Return how the ranks' values differ, the most common value first, or "" if they are all equal.

    Parameters
    ----------
    values
        By rank.
    text
        Returns a value as text; values with the same text are equal.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks_of.setdefault(text(values[rank]), []).append(rank)
    if len(ranks_of) < 2:
        return ""
    parts = sorted(ranks_of.items(), key=lambda one: -len(one[1]))
    return "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, with consecutive ones as a range: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(names)}"


def tensor(
    name: str,
    value: Any,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    *or_dtypes: torch.dtype,
) -> torch.Tensor:
    """Check a tensor whose memory a Buffer's kernels access; None in `shape` matches any extent."""
    try:
        checked = shaped(name, value, dtype, shape, device, *or_dtypes)
    except TypeError as error:
        raise TypeError(f"{error}{elsewhere(value, device)}") from None
    return with_memory(name, checked)


def elsewhere(value: Any, device: torch.device) -> str:
    """Return what to do about a tensor that is not on the device of the Buffer, to end an error; "" if it is there."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return ""
    other = f", or make the Buffer with device='{value.device}'" if value.device.type in _DEVICES else ""
    return f", the device= that the Buffer was made with: move it there{other}"


def with_memory(name: str, value: torch.Tensor) -> torch.Tensor:
    """Check that a tensor's values are what is at its address."""
    if value.is_neg():
        raise TypeError(f"{name}={describe(value)}, a view that negates what it shows: expected its resolve_neg()")
    try:
        address = value.data_ptr()
    except RuntimeError:  # a sparse tensor, or one that is being transformed
        address = 0
    if address == 0 and value.numel():
        kind = type(value).__name__
        way = {"DTensor": ", such as its to_local()", "AsyncCollectiveTensor": ": call its wait()"}.get(kind, "")
        raise TypeError(
            f"{name}={describe(value)}, of type {kind} and without memory: expected a tensor with its own{way}"
        )
    if value.requires_grad and torch.is_grad_enabled():  # not so inside of ops and autograd functions
        _say_that_gradients_end(name)
    return value


@cache
def _say_that_gradients_end(name: str) -> None:
    """Warn once per process and argument: otherwise a router or a layer would silently learn nothing."""
    log.warning(
        "%s requires a gradient, but results of a Buffer's calls have none: use deep_ep_py.ops, or pass %s.detach() if "
        "none is wanted",
        name,
        name,
    )


def shaped(
    name: str,
    value: Any,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    *or_dtypes: torch.dtype,
) -> torch.Tensor:
    """Check all of a tensor but its memory, which one that is being compiled does not have."""
    # A call checks a dozen tensors, so the comparisons that run in C come first.
    if (
        not isinstance(value, torch.Tensor)
        or (value.dtype is not dtype and value.dtype not in or_dtypes)
        or value.device != device
    ):
        raise TypeError(_unlike(name, value, (dtype, *or_dtypes), shape, device))
    extents = value.shape
    if (
        (extents != shape and not _fits(extents, shape))
        or value.layout is not torch.strided
        or not value.is_contiguous()
    ):
        raise ValueError(_unlike(name, value, (dtype, *or_dtypes), shape, device))
    return value


def _fits(extents: Sequence[int], shape: tuple[int | None, ...]) -> bool:
    """Return whether the extents match a shape in which None matches anything."""
    if len(extents) != len(shape):
        return False
    for dimension, want in enumerate(shape):  # noqa: SIM110 - a generator is slower
        if want is not None and want != extents[dimension]:
            return False
    return True


def _unlike(
    name: str, value: Any, dtypes: Sequence[torch.dtype], shape: tuple[int | None, ...], device: torch.device
) -> str:
    """Return the message that says what is wrong with a tensor."""
    extents = ", ".join("any" if n is None else str(n) for n in shape)
    types = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
    return f"{name}={describe(value)}: expected {types}[{extents}], contiguous, on {device}"


def aligned(name: str, value: torch.Tensor) -> torch.Tensor:
    """Check the alignment of a tensor's address."""
    if value.data_ptr() % ROW_ALIGNMENT and value.numel():
        raise ValueError(
            f"{name}={describe(value)} at address {value.data_ptr():#x}: expected a multiple of {ROW_ALIGNMENT} bytes"
        )
    return value


def seconds(name: str, value: Any) -> float:
    """Check a time limit in seconds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={describe(value)}: expected seconds")
    if not 0 < float(value) < 1e6:
        raise ValueError(f"{name}={describe(value)}: expected more than 0 and less than 1e6 seconds")
    return float(value)


def timeout(name: str, value: Any) -> float:
    """Check the time limit of a Buffer; None means that of the environment, or else 100 seconds."""
    if value is not None:
        return seconds(name, value)
    text = os.environ.get(TIMEOUT, "")
    try:
        return seconds(TIMEOUT, float(text)) if text else 100.0
    except ValueError:
        raise ValueError(f"{TIMEOUT}={text!r}: expected more than 0 and less than 1e6 seconds") from None


def rows(
    name: str, value: Any, dtypes: Sequence[torch.dtype], device: torch.device, count: int | None = None
) -> torch.Tensor:
    """Check a tensor of rows."""
    value = tensor(name, value, dtypes[0], (count, None), device, *dtypes[1:])
    tokens, elements = value.shape
    row_bytes = elements * value.element_size()
    if row_bytes == 0 or row_bytes % ROW_ALIGNMENT or row_bytes > MAX_ROW_BYTES:
        raise ValueError(
            f"{name}={describe(value)}: expected rows of a positive multiple of {ROW_ALIGNMENT} bytes "
            f"up to {MAX_ROW_BYTES}, got {row_bytes}"
        )
    if count is None and tokens > MAX_TOKENS:
        raise ValueError(f"{name}={describe(value)}: expected at most {MAX_TOKENS} tokens")
    return aligned(name, value)


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Check an int within [low, high]; those of NumPy count too. A tensor does not: it may be on a GPU."""
    if isinstance(value, bool | torch.Tensor) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name}={describe(value)}: expected an int")
    try:
        value = operator.index(value)
    except TypeError:  # an array
        raise TypeError(f"{name}={describe(value)}: expected an int") from None
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: expected {low} to {high}")
    return value


def number(name: str, value: Any, low: float, high: float) -> float:
    """Check a number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={describe(value)}: expected a number")
    if not low <= float(value) <= high:
        raise ValueError(f"{name}={value}: expected {low:g} to {high:g}")
    return float(value)


def device(value: Any) -> torch.device:
    """Check a device; None means the CPU."""
    if value is not None and not isinstance(value, str | torch.device):
        raise TypeError(f"device={describe(value)}: expected cpu or cuda")
    try:
        chosen = torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={describe(value)}: expected cpu or cuda") from None
    if chosen.type not in _DEVICES:
        raise ValueError(f"device={chosen}: expected cpu or cuda")
    return chosen


def flag(name: str, value: Any) -> bool:
    """Check a bool, which many callers write as 0 or 1."""
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{name}={describe(value)}: expected a bool")
    return bool(value)


def no_unknown(given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Check the names of keyword arguments where Python's own check would raise on the calling rank alone."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{name}={describe(value)}: expected no argument of this name")


def experts(num_experts: Any, ranks: int, name: str = "num_experts") -> int:
    """Check a number of experts against the number of ranks they are spread over."""
    num_experts = integer(name, num_experts, 1, MAX_EXPERTS)
    if num_experts % ranks:
        raise ValueError(f"{name}={num_experts}: expected a multiple of the {ranks} ranks")
    return num_experts


def max_tokens(value: Any) -> int:
    """Check the bound on tokens per rank that low-latency calls take."""
    return integer("num_max_dispatch_tokens_per_rank", value, 1, MAX_TOKENS)


def topk_idx(value: Any, num_experts: int, device: torch.device, tokens: int | None = None) -> torch.Tensor:
    """Check expert ids: int64 or int32 [tokens, top-k], -1 or below `num_experts`.

    Ids on a GPU are not read, which would have to wait for the GPU; there the kernels report invalid ids.
    """
    value = tensor("topk_idx", value, torch.int64, (tokens, None), device, torch.int32)
    if not 1 <= value.shape[1] <= MAX_TOPK:
        raise ValueError(f"topk_idx={describe(value)}: expected 1 to {MAX_TOPK} experts per token")
    if not value.is_cuda and not C.ids_fit(value.data_ptr(), value.numel(), value.element_size(), num_experts):
        low, high = (int(bound) for bound in torch.aminmax(value))
        raise ValueError(
            f"topk_idx: ids from {low} to {high}, expected -1 to {num_experts - 1} with {num_experts} experts"
        )
    return value


def wrong_id(found: int) -> ValueError:
    """Make the exception for an id found by a kernel that is neither -1 nor that of an expert."""
    return ValueError(
        f"topk_idx: an earlier get_dispatch_layout or low_latency_dispatch found the id {found}, expected -1 or an "
        "expert's; it was treated as -1"
    )


def biases(value: Any, shape: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Check combine's bias: None, one tensor or two."""
    if value is None:
        return ()
    given = value if isinstance(value, tuple) else (value,)
    if len(given) > 2:
        raise ValueError(f"bias=a tuple of {len(given)}: expected at most 2 tensors")
    return tuple(
        aligned("bias", tensor("bias", bias, torch.bfloat16, shape, device)) for bias in given if bias is not None
    )


def streams(previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any) -> Streams:
    """Check V1's stream arguments; `previous_event` may also be of the type that V2 passes."""
    from deep_ep_py.base.events import EventHandle, EventOverlap, Streams

    if previous_event is not None and not isinstance(previous_event, EventOverlap | EventHandle):
        raise TypeError(f"previous_event={describe(previous_event)}: expected an EventOverlap or an EventHandle")
    flag("async_finish", async_finish)
    if flag("allocate_on_comm_stream", allocate_on_comm_stream) and (previous_event is None or not async_finish):
        raise ValueError("allocate_on_comm_stream=True: expected together with previous_event and async_finish=True")
    return Streams(previous_event, bool(async_finish), bool(allocate_on_comm_stream))
