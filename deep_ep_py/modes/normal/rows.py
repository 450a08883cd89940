"""Rows of tokens: elements of one or two bytes, optionally with scales that travel with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.logs import log

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ONE_BYTE = (*FP8, torch.int8, torch.uint8)
TWO_BYTES = (torch.bfloat16, torch.float16, torch.int16)
_TYPES = (*TWO_BYTES, *ONE_BYTE)
"""Ranks compare row types by their index in this tuple."""
_SCALES = (torch.float32, torch.int32)
_MAX_SCALES = 4096


@dataclass(frozen=True)
class Rows:
    """Rows to send, or received rows.

    Attributes
    ----------
    x : torch.Tensor
        [tokens, hidden], of a type in `TWO_BYTES` or `ONE_BYTE`.
    scales : torch.Tensor or None
        Only with elements of one byte: float32, or int32 (four UE8M0 exponents each), [tokens] or [tokens, scales],
        with any strides.

    Values are never interpreted: both are moved as bytes.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None

    @staticmethod
    def of(name: str, value: Any, device: torch.device, count: int | None = None) -> Rows:
        """Check the rows that a caller passes: a tensor, or a tuple of rows and scales.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        if not isinstance(value, tuple):
            rows = Rows(arguments.rows(name, value, _TYPES, device, count))
            if rows.x.dtype in FP8:
                _say_how_scales_travel(name, rows.x.dtype)
            return rows
        if len(value) != 2:
            raise TypeError(f"{name}=a tuple of {len(value)}: expected a tensor, or a tuple of FP8 rows and scales")
        x = arguments.rows(f"{name}[0]", value[0], ONE_BYTE, device, count)
        scales = value[1]
        if not isinstance(scales, torch.Tensor) or scales.dtype not in _SCALES or scales.device != device:
            raise TypeError(
                f"{name}[1]={arguments.describe(scales)}: expected the scales, float32 or int32 on {device}"
                f"{arguments.elsewhere(scales, device)}"
            )
        fits = scales.dim() in (1, 2) and scales.shape[0] == x.shape[0] and 1 <= _per_row(scales) <= _MAX_SCALES
        if not fits:
            raise ValueError(
                f"{name}[1]={arguments.describe(scales)}: expected [{x.shape[0]}] or [{x.shape[0]}, scales], "
                f"1 to {_MAX_SCALES} scales per row"
            )
        return Rows(x, arguments.with_memory(f"{name}[1]", scales))

    @property
    def hidden(self) -> int:
        """Elements per row."""
        return self.x.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's elements."""
        return self.x.shape[1] * self.x.element_size()

    @property
    def scales_per_row(self) -> int:
        """Number of scales per row."""
        return 0 if self.scales is None else _per_row(self.scales)

    @property
    def types(self) -> int:
        """The types, on which ranks must agree, as a number; 0 for BF16."""
        of_scales = 0
        if self.scales is not None:
            of_scales = 1 + 2 * _SCALES.index(self.scales.dtype) + self.scales.dim() - 1
        return len(_TYPES) * of_scales + _TYPES.index(self.x.dtype)

    @property
    def strides(self) -> tuple[int, int]:
        """Strides between the scales of neighboring tokens, and between neighboring scales, in elements."""
        if self.scales is None:
            return 0, 0
        strides = self.scales.stride()
        return strides[0], strides[1] if len(strides) == 2 else 1

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that kernels read or write."""
        return self.x, self.scales

    def received_scales(
        self, rows: int, empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> torch.Tensor | None:
        """Allocate the scales of this number of rows of the same kind."""
        return None if self.scales is None else empty((rows, *self.scales.shape[1:]), self.scales.dtype)

    def given(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the rows in the form in which callers pass them."""
        return self.x if self.scales is None else (self.x, self.scales)


@dataclass(frozen=True)
class Received:
    """The outputs of a dispatch besides its handle.

    Attributes
    ----------
    rows : Rows
        The rows.
    topk_idx : torch.Tensor or None
        Ids of the local experts of each row.
    topk_weights : torch.Tensor or None
        Their weights.
    """

    rows: Rows
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that kernels write."""
        return *self.rows.tensors(), self.topk_idx, self.topk_weights


def type_text(code: int) -> str:
    """Return the types that `Rows.types` stands for."""
    of_scales, of_rows = divmod(code, len(_TYPES))
    text = str(_TYPES[of_rows]).removeprefix("torch.")
    if not of_scales:
        return text
    kind, dimensions = divmod(of_scales - 1, 2)
    scales = str(_SCALES[kind]).removeprefix("torch.")
    return f"{text} with {scales} scales{', one per row' if dimensions == 0 else ''}"


def _per_row(scales: torch.Tensor) -> int:
    return 1 if scales.dim() == 1 else scales.shape[1]


@cache
def _say_how_scales_travel(name: str, dtype: torch.dtype) -> None:
    """Warn once per process: rows that are scaled by a constant need no scales, but forgotten ones are a bug."""
    log.warning(
        "%s: %s rows without scales move as they are; scales travel only in %s=(rows, scales)", name, dtype, name
    )
