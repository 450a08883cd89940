"""What `deep_ep.Buffer` of DeepEP 1.2 has besides its life, dispatch and combine: defaults, sizes, second names."""

from __future__ import annotations

import os
from typing import Any

import torch

from deep_ep_py.core import arguments
from deep_ep_py.core.config import Config
from deep_ep_py.core.events import EventHandle, EventOverlap
from deep_ep_py.v1.low_latency import LowLatencySurface
from deep_ep_py.v1.masks import MaskSurface

# By ranks, for dispatch and combine: tokens per chunk and per queue inside a node, then between nodes.
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
"""Arguments of dispatch before that one."""


class V1Surface(LowLatencySurface, MaskSurface):
    """The part of a Buffer that is there because DeepEP's has it."""

    num_sms: int = _V1_SMS
    _num_sms_is_set = False

    dispatch: Any
    combine: Any

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the blocks of calls without a Config, of `get_dispatch_config` and of `get_combine_config`.

        Parameters
        ----------
        new_num_sms : int
            An even number. Until it is set, the device decides for calls without a Config.
        """
        if arguments.integer("new_num_sms", new_num_sms, 2, arguments.MAX_BLOCKS) % 2:
            raise ValueError(f"new_num_sms={new_num_sms}: expected an even number")
        cls.num_sms, cls._num_sms_is_set = new_num_sms, True

    def _config(self, given: Config | None) -> Config | None:
        # Some callers assign it.
        is_set = self._num_sms_is_set or self.num_sms != _V1_SMS
        return Config(self.num_sms) if given is None and is_set else given

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Tell whether FP8 rows are supported: always."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return V1's default Config of a dispatch among `num_ranks` ranks, at most 160.

        For a number of ranks that V1 does not know, that of the next it knows.
        """
        return cls._default_config(num_ranks, _DISPATCH)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return V1's default Config of a combine; else as `get_dispatch_config`."""
        return cls._default_config(num_ranks, _COMBINE)

    @classmethod
    def _default_config(cls, num_ranks: int, which: int) -> Config:
        arguments.integer("num_ranks", num_ranks, 1, max(_CHUNKS))
        known = min(ranks for ranks in _CHUNKS if ranks >= num_ranks)
        return Config(cls.num_sms, *_CHUNKS[known][which])

    @property
    def nvshmem_qp_depth(self) -> int:
        """The environment's NVSHMEM_QP_DEPTH, which V1's callers compare with their tokens; 1024 without one."""
        return int(os.environ.get("NVSHMEM_QP_DEPTH", 1024))

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return the memory that rows and counts go through. Writing to it breaks operations that are open.

        Parameters
        ----------
        dtype : torch.dtype
            How to read it.
        size : torch.Size, optional
            Shape, a part of it; else all of it, flat.
        offset : int
            Bytes to leave out at its beginning, a multiple of the dtype's.
        use_rdma_buffer : bool
            The same memory: there is one for all paths. Only on a Buffer with low-latency mode.

        Returns
        -------
        torch.Tensor
            Not to be used after the Buffer.

        Raises
        ------
        ValueError, TypeError
            Naming the argument.
        """
        self._engine.check_usable()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r}: expected a torch.dtype")
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
        """Call `dispatch`, which serves any number of nodes; there is no `num_worst_tokens` among these arguments."""
        before, after = arguments[:_BEFORE_WORST_TOKENS], arguments[_BEFORE_WORST_TOKENS:]
        result: tuple[Any, ...] = self.dispatch(*before, *((0, *after) if after else ()), **options)
        return result

    def internode_combine(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Call `combine`, which serves any number of nodes."""
        result: tuple[Any, ...] = self.combine(*arguments, **options)
        return result
