"""The object behind `buffer.runtime`, which in DeepEP 1.2 belongs to its C++ extension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import arguments

if TYPE_CHECKING:
    from deep_ep_py.buffer import Buffer


class Runtime:
    """A Buffer with the interface of V1's `deep_ep_cpp.Buffer`.

    `Buffer.runtime` returns it. Attributes that V1 does not have are those of this library's native runtime.
    """

    def __init__(self, buffer: Buffer, native: Any) -> None:
        self._buffer, self._native = buffer, native

    def is_available(self) -> bool:
        """Return whether operations may be called, which holds until the Buffer is destroyed."""
        return not self._buffer._engine.destroyed

    def is_internode_available(self) -> bool:
        """Return whether operations may be called and the ranks are on several nodes."""
        return self.is_available() and self.get_num_rdma_ranks() > 1

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self._buffer._engine.topology.nodes

    def get_rdma_rank(self) -> int:
        """Return the index of this rank's node."""
        return self._buffer._engine.topology.node

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """Return the rank on the first node with this rank's local index; 0 without `is_global`."""
        return self._buffer._engine.topology.local_rank if arguments.flag("is_global", is_global) else 0

    def get_local_device_id(self) -> int:
        """Return the index of the GPU, or -1 on a CPU."""
        index = self._buffer.device.index
        return -1 if index is None else index

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Call the Buffer's method of this name."""
        return self._buffer.get_local_buffer_tensor(dtype, offset=offset, use_rdma_buffer=use_rdma_buffer)

    def get_comm_stream(self) -> Any:
        """Call the Buffer's method of this name."""
        return self._buffer.get_comm_stream()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Call the Buffer's method of this name."""
        self._buffer.clean_low_latency_buffer(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def destroy(self) -> None:
        """Call the Buffer's method of this name."""
        self._buffer.destroy()

    if not TYPE_CHECKING:  # to a type checker, this would make every name an attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # for example of an object under construction
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return getattr(self._native, name)
