"""The rest of DeepEP 1.2's `deep_ep.Buffer`, besides lifetime, dispatch and combine: defaults, sizes and aliases."""

from __future__ import annotations

import os
from typing import Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.config import Config
from deep_ep_py.base.events import EventHandle, EventOverlap
from deep_ep_py.base.kept import kept
from deep_ep_py.v1.low_latency import LowLatencySurface
from deep_ep_py.v1.masks import MaskSurface

# By number of ranks, for dispatch and combine: tokens per chunk and per queue, inside a node and between nodes.
_CHUNKS = {
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}
_DISPATCH, _COMBINE = 0, 1
_V1_SMS = 20
_BEFORE_WORST_TOKENS = 9
"""Number of arguments of `dispatch` before `num_worst_tokens`."""


class V1Surface(LowLatencySurface, MaskSurface):
    """The part of a Buffer that exists for compatibility with DeepEP."""

    num_sms: int = _V1_SMS
    _num_sms_is_set = False

    dispatch: Any
    combine: Any

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the number of blocks for calls without a Config, `get_dispatch_config` and `get_combine_config`.

        Parameters
        ----------
        new_num_sms : int
            An even number. Until it is set, the device chooses the number for calls without a Config.
        """
        if arguments.integer("new_num_sms", new_num_sms, 2, arguments.MAX_BLOCKS) % 2:
            raise ValueError(f"new_num_sms={new_num_sms}: expected an even number")
        cls.num_sms, cls._num_sms_is_set = new_num_sms, True

    def _config(self, given: Config | None) -> Config | None:
        # Some callers assign `num_sms` directly.
        is_set = self._num_sms_is_set or self.num_sms != _V1_SMS
        return Config(self.num_sms) if given is None and is_set else given

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: FP8 rows are always supported."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return V1's default Config for a dispatch among `num_ranks` ranks, at most 160.

        For a number of ranks that V1 does not list, this is the Config for the next larger number.
        """
        return cls._default_config(num_ranks, _DISPATCH)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return V1's default Config for a combine; otherwise like `get_dispatch_config`."""
        return cls._default_config(num_ranks, _COMBINE)

    @classmethod
    def _default_config(cls, num_ranks: int, which: int) -> Config:
        arguments.integer("num_ranks", num_ranks, 1, max(_CHUNKS))
        known = min(ranks for ranks in _CHUNKS if ranks >= num_ranks)
        return Config(cls.num_sms, *_CHUNKS[known][which])

    @property
    def nvshmem_qp_depth(self) -> int:
        """NVSHMEM_QP_DEPTH, or 1024 if it is not set; callers of V1 compare it with their number of tokens."""
        return int(os.environ.get("NVSHMEM_QP_DEPTH", 1024))

    @kept
    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return the memory that rows and counts pass through. Writing to it breaks open operations.

        Parameters
        ----------
        dtype : torch.dtype
            Element type of the returned view.
        size : torch.Size, optional
            Shape of the view, which covers the beginning. Default: all of it, flat.
        offset : int
            Bytes to skip at the beginning, a multiple of the size of `dtype`.
        use_rdma_buffer : bool
            Has no effect on the result, since all paths use the same memory. Only on a Buffer with low-latency mode.

        Returns
        -------
        torch.Tensor
            Must not be used after the Buffer is destroyed.

        Raises
        ------
        ValueError, TypeError
            The message names the argument.
        """
        self._engine.check_usable()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={arguments.describe(dtype)}: expected a torch.dtype")
        if arguments.flag("use_rdma_buffer", use_rdma_buffer) and not self.low_latency_mode:
            raise ValueError("use_rdma_buffer=True: expected a Buffer that was made with low_latency_mode=True")
        memory: torch.Tensor = self._engine.region_memory()
        if arguments.integer("offset", offset, 0, len(memory)) % dtype.itemsize:
            raise ValueError(f"offset={offset}: expected a multiple of the {dtype.itemsize} bytes of {dtype}")
        end = offset + (len(memory) - offset) // dtype.itemsize * dtype.itemsize
        tensor = memory[offset:end].view(dtype)
        if size is None:
            return tensor
        elements = torch.Size(size).numel()
        if elements > len(tensor):
            raise ValueError(f"size={tuple(size)}: expected at most {len(tensor)} elements")
        return tensor[:elements].view(size)

    def internode_dispatch(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Call `dispatch`, which serves any number of nodes; the positional arguments lack `num_worst_tokens`."""
        before, after = arguments[:_BEFORE_WORST_TOKENS], arguments[_BEFORE_WORST_TOKENS:]
        result: tuple[Any, ...] = self.dispatch(*before, *((0, *after) if after else ()), **options)
        return result

    def internode_combine(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Call `combine`, which serves any number of nodes."""
        result: tuple[Any, ...] = self.combine(*arguments, **options)
        return result
