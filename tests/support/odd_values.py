"""Values that no caller means to pass, each derived from the correct one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Odd = Callable[[Any], Any]

_PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**63, -(2**63), 10**30, 0.5, math.nan, math.inf),
    *("", "text", b"x", [], (), {}, [1, 2], (None,), (None, None), object, range(3)),
    *(torch.tensor(1), torch.tensor(math.nan), torch.empty(0), torch.empty(0, 0), torch.zeros(3), np.zeros((3, 3))),
)
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)


def _extreme(tensor: torch.Tensor) -> torch.Tensor:
    limits = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return tensor if tensor.dtype == torch.bool else torch.full_like(tensor, limits(tensor.dtype).max)


def _lowest(tensor: torch.Tensor) -> torch.Tensor:
    limits = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return tensor if tensor.dtype == torch.bool else torch.full_like(tensor, limits(tensor.dtype).min)


_OF_TENSORS: dict[str, Odd] = {
    "transposed": lambda t: t.t() if t.dim() == 2 else t.flip(0),
    "rows_transposed_in_memory": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "one_row_less": lambda t: t[:-1],
    "one_row_more": lambda t: torch.cat([t, t[:1]]),
    "one_column_less": lambda t: t[..., :-1],
    "no_columns": lambda t: t[..., :0],
    "every_other_column": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "one_dimension_more": lambda t: t.unsqueeze(0),
    "flat": lambda t: t.flatten(),
    "one_row_for_all": lambda t: t[:1].expand(t.shape),
    "on_meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "shifted_in_memory": _shifted,
    "highest": _extreme,
    "lowest": _lowest,
    "not_a_number": lambda t: torch.full_like(t, math.nan) if t.is_floating_point() else t,
    "with_gradient": lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t,
    "a_parameter": lambda t: torch.nn.Parameter(t) if t.is_floating_point() else t,
    "as_numpy": lambda t: t.numpy() if t.dtype != torch.bfloat16 else t.float().numpy(),
    "as_lists": lambda t: t.tolist(),
    "twice": lambda t: (t, t),
    "thrice": lambda t: (t, t, t),
    "with_scales": lambda t: (t, torch.ones(len(t), 1)),
    "fp8_with_scales": lambda t: (t.to(torch.float8_e4m3fn), torch.ones(len(t), 1)),
    "fp8_with_none_as_scales": lambda t: (t.to(torch.float8_e4m3fn), None),
    "reversed": lambda t: t.flip(0).contiguous(),
    "zeros": torch.zeros_like,
}


def _constant(value: Any) -> Odd:
    return lambda _: value


def _cast(dtype: torch.dtype) -> Odd:
    return lambda tensor: tensor.to(dtype)


def _for_tensors(odd: Odd) -> Odd:
    return lambda value: odd(value) if isinstance(value, torch.Tensor) else value


ODD: dict[str, Odd] = {
    **{f"{number}: {value!r}": _constant(value) for number, value in enumerate(_PLAIN)},
    **{f"as {dtype}": _for_tensors(_cast(dtype)) for dtype in _DTYPES},
    **{name: _for_tensors(odd) for name, odd in _OF_TENSORS.items()},
}
"""By name: maps the correct value to a wrong one, or to itself where the change does not apply."""
