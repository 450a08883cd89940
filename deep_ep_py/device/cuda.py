"""A GPU as a device: kernels run on the caller's stream, or on one of their own that is ordered with it by events."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch

from deep_ep_py.base import arguments, choices
from deep_ep_py.base.events import EventHandle
from deep_ep_py.base.gpus import DRIVER, SAME_GPU, GpuAnswer, answer_of, name_of_gpu
from deep_ep_py.base.native import C
from deep_ep_py.device import nvml
from deep_ep_py.device.device import Compiling, MakeLauncher, Shape
from deep_ep_py.device.rates import Rates, rates_file
from deep_ep_py.errors import CudaError

_log = logging.getLogger("deep_ep_py")

_UNMEASURED_BLOCKS = 24
_POOLS_SINCE = "2.8"
"""The first torch whose `use_mem_pool` concerns only the calling thread."""
_PINNED_ARENA_BYTES = 64 << 20


class CudaDevice:
    """A GPU: kernels are compiled for the shapes in use, or come from the cache, and are launched through the driver.

    Parameters
    ----------
    device
        `torch.device("cuda", n)`.
    sharers
        Number of the Buffer's ranks on this GPU.
    linked
        Whether the ranks are several processes, which usually have one GPU each.
    make_launcher
        Makes the launcher that launches the kernels `of_each_rank`, for all sharers at once. Default: each rank
        launches for itself.

    Attributes
    ----------
    context : native.C.cuda.Context
        The GPU's primary context.

    Raises
    ------
    CudaError
        There is no CUDA driver or no such GPU.
    """

    asynchronous = True
    warps: int = C.cuda.BLOCK_WARPS
    calls = 64
    fabrics: tuple[str, ...] = ("peer", "ibgda", "proxy")
    default_fabrics: tuple[str, ...] = ("peer", "proxy")  # software NICs are for tests here
    poison = False
    maps_all = False
    fresh_memory_is_slow = False
    first_arena_bytes = 64 << 20
    _pool_refused = False

    def __init__(
        self,
        device: torch.device,
        sharers: int = 1,
        linked: bool = False,
        make_launcher: MakeLauncher | None = None,
    ) -> None:
        self.torch_device = device
        self._sharers, self._linked = sharers, linked
        if torch.__version__ < _POOLS_SINCE:
            self._refuse_pool(
                f"torch {torch.__version__} would put the outputs of other threads there as well",
                f"expected torch {_POOLS_SINCE} or later",
            )
        self.context = C.cuda.Context(device.index)
        self._copy_piece = copy_piece(self.context.architecture)
        self._ranks_are_threads = sharers > 1 or make_launcher is not None
        self._callers_stream: torch.cuda.Stream | None = None  # the one that the next kernels go to; None: the own one
        self.gpu = self.context.uuid
        self.name, self.copies = self.context.name, "bulk" if self._copy_piece else "vector"
        self._gathered = make_launcher is not None
        make_launcher = make_launcher or partial(C.cuda.Launcher, sharers=sharers)
        cooperative = choices.chosen(choices.LAUNCH) == "cooperative"
        self._launcher = make_launcher(
            self.context, warps=self.warps, copy_piece=self._copy_piece, cooperative=cooperative
        )
        self._set_share(sharers)

    def share(self, ranks: int) -> None:
        """See `Device`. Processes without MPS take turns on a GPU, which each then has to itself."""
        if ranks > self._sharers and self.context.may_have_mps:
            self._launcher.share(ranks)
            self._set_share(ranks)

    def _set_share(self, ranks: int) -> None:
        self._sharers = ranks
        self.max_blocks = max(1, min(arguments.MAX_BLOCKS, self.context.multiprocessors // ranks))
        self.blocks = min(_UNMEASURED_BLOCKS, self.max_blocks)

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Open an NVTX range, which profilers such as Nsight Systems show."""
        try:
            return partial(torch.cuda.nvtx.range_end, torch.cuda.nvtx.range_start(f"deep_ep_py {name}"))
        except (RuntimeError, AttributeError):  # this torch has no NVTX
            return None

    def answer_about(self, gpu: str) -> GpuAnswer:
        """See `Device`. Signals are atomic additions, which CUDA guarantees between GPUs only if they are native."""
        if gpu == self.gpu:
            return GpuAnswer(SAME_GPU)
        try:
            peer = self.context.peer(gpu)
        except CudaError as error:
            return GpuAnswer(DRIVER, f"cannot query how their GPUs use each other's memory: {error}", access=False)
        if peer is not None:
            return answer_of(DRIVER, self.gpu, gpu, peer.access, peer.native_atomics)
        try:
            return nvml.library().answer(self.gpu, gpu)
        except nvml.NvmlError as error:
            # Assuming peers could lose signals, or fail only when heaps are mapped; another path is merely slower.
            return GpuAnswer(
                "",
                f"how {name_of_gpu(self.gpu)} and {name_of_gpu(gpu)} reach each other cannot be asked here, so they "
                f"count as apart ({error}): let each process see both GPUs, or NVML",
                access=False,
            )

    @cached_property
    def _rates(self) -> Rates | None:
        from deep_ep_py.device.jit.cache import default_folder

        try:
            return Rates.load(rates_file(default_folder(), self.name, self.copies, self._linked))
        except (OSError, ValueError) as error:  # rates that cannot be read must not fail the caller
            _log.warning("the rates of this GPU are not used: %s", error)
            return None

    def blocks_for(self, moved: float) -> int:
        """Choose by the rates that `python -m deep_ep_py rates` measured on such a GPU; otherwise use a fixed number.

        The number is also fixed where ranks launch together: by the rates each rank would choose its own.
        """
        if self._gathered or self._rates is None:
            return self.blocks
        return self._rates.blocks_for(moved, self.max_blocks, self._sharers)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(self._launcher.stream, device=self.torch_device)

    @property
    def comm_stream(self) -> torch.cuda.Stream:
        """The stream that kernels run on, except those of low-latency calls that the caller's stream waits for.

        Once it has been handed out, it outlives the Buffer: torch's allocator uses it when a tensor is freed that was
        used on it (`record_stream`).
        """
        self._launcher.keep_stream()
        return self._stream

    @cached_property
    def _pool(self) -> torch.cuda.MemPool:
        # torch's allocator manages the arena, so that its tensors are reused in stream order like all others.
        return torch.cuda.MemPool(_pool_allocator().allocator())

    def default_arena_bytes(self, ranks: int, by_nics: bool) -> tuple[int, int]:
        """Start small and grow to at most this rank's share of an eighth of the GPU's memory.

        Where NICs must know of the memory, it is a small amount of host memory, all of it from the start.
        """
        del ranks
        if by_nics:
            return _PINNED_ARENA_BYTES, _PINNED_ARENA_BYTES
        most = torch.cuda.get_device_properties(self.torch_device).total_memory // (8 * self._sharers)
        return min(most, self.first_arena_bytes), most

    def check_arena_bytes(self, arena_bytes: int) -> None:
        """Accept any size: the driver refuses what does not fit."""

    def room_for_regions(self, in_process: bool) -> int | None:
        """Accept any size: the driver refuses what does not fit."""
        del in_process
        return None

    def make_heap(self, size: int, first: int, cleared: int, in_process: bool, by_nics: bool) -> C.Heap:
        """Map physical memory, with a descriptor if other processes need one.

        Where host threads stand in for NICs, or a proxy hands the heap to a network, it is pinned host memory, whose
        new pages are zero.
        """
        if by_nics:
            return self._pinned(C.Heap.make_plain(size) if in_process else C.Heap.make_shared(size))
        return C.cuda.make_heap(self.context, size, first, cleared, not in_process)

    def map_heap(self, descriptor: int, size: int, first: int, by_nics: bool) -> C.Heap:
        """Map the same physical memory."""
        if by_nics:
            return self._pinned(C.Heap.map(descriptor, size))
        return C.cuda.map_heap(self.context, descriptor, size, first)

    def make_copy(self, size: int) -> C.Heap:
        """Allocate pinned host memory."""
        return self._pinned(C.Heap.make_plain(size))

    def _pinned(self, heap: Any) -> Any:
        C.cuda.pin_heap(self.context, heap)
        return heap

    def make_runtime(
        self, options: C.BufferOptions, heaps: list[C.Heap], near: list[C.Heap | None], network: C.NetworkOptions
    ) -> C.Runtime:
        """Make a runtime over this device's launcher."""
        self._options = options
        return C.cuda.make_runtime(options, heaps, near, network, self.context, self._launcher)

    def allocate(
        self, runtime: C.Runtime, shape: tuple[int, ...], dtype: torch.dtype, grows: bool
    ) -> torch.Tensor | None:
        """Allocate from a pool over the arena, which may grow for the next calls if it has no room.

        Returns None during a capture, because a graph's tensors must stay where they are and come from the graph's own
        pool. Also returns None if torch has no pools for one thread, or its allocator is configured to serve none.
        """
        if self._pool_refused or self.capturing():
            return None
        try:
            with C.cuda.pool_over(runtime, grows):
                tensor = self._empty_in_pool(shape, dtype)
        except torch.cuda.OutOfMemoryError:
            return None
        except RuntimeError as error:
            if _is_of_the_gpu(error):
                raise
            configured = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
            self._refuse_pool(
                str(error).partition("\n")[0],
                f"PYTORCH_CUDA_ALLOC_CONF={configured}: expected without expandable_segments:True",
            )
            return None
        return tensor if runtime.arena_contains(tensor.data_ptr(), tensor.nbytes) else None

    def _refuse_pool(self, why: str, remedy: str) -> None:
        self._pool_refused = True
        _warn_of_refused_pool(why, remedy)

    def _empty_in_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, device=self.torch_device):
            return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def time_launches(self, timed: bool) -> None:
        """Take the times of this rank's kernels from now on, by events around each launch, or no longer."""
        self._launcher.time_launches(timed)

    def take_launch_times(self) -> list[tuple[str, float, float]]:
        """Wait for the kernels that are timed; return the name of each, and when it began and ended in milliseconds."""
        times: list[tuple[str, float, float]] = self._launcher.take_launch_times()
        return times

    def view(self, address: int, size: int) -> torch.Tensor:
        """Wrap the bytes through the CUDA array interface."""
        interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=self.torch_device)

    def prepare(self, kernels: Iterable[str], shape: Shape, compiling: Compiling) -> None:
        """Compile, or find in the cache, and load the kernels that are not loaded yet."""
        missing = [name for name in kernels if not self._launcher.loaded(name, self._key(name, shape))]
        if missing:
            with compiling():
                self._load(missing, shape)

    def _load(self, missing: list[str], shape: Shape) -> None:
        from deep_ep_py.device.jit import GATHERED, KERNELS, KernelCache
        from deep_ep_py.device.jit import Shape as StaticShape
        from deep_ep_py.device.jit.compiler import check_driver
        from deep_ep_py.device.jit.registry import ANY_FABRIC

        check_driver(C.cuda.driver_version())
        wanted = [(GATHERED if self._gathered else KERNELS)[name] for name in missing]
        static = StaticShape(
            *shape,
            bulk_copies=self._copy_piece != 0,
            # The launcher of ranks that launch together serves all their Buffers.
            fabrics=ANY_FABRIC if self._gathered else tuple(self._options.fabrics),
            masks_ranks=self._gathered or self._options.masks_ranks,
            notes_stages=self._options.notes_stages,
        )
        # Processes that start together begin with different kernels.
        found = KernelCache().get_all(wanted, static, self.context.architecture, start=os.getpid())
        for name, kernel in zip(missing, found, strict=True):
            self._launcher.load(name, self._key(name, shape), kernel.cubin, kernel.symbol)

    def copy(self, target: torch.Tensor, source: torch.Tensor, ranks: int) -> None:
        """Copy on the current stream."""
        del ranks
        target.copy_(source)

    def capturing(self) -> bool:
        """Return whether the device's current stream is being captured."""
        with torch.cuda.device(self.torch_device):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.torch_device)

    def allocating(self, on_comm_stream: bool) -> AbstractContextManager[Any]:
        """Allocate tensors on the communication stream, or on the current one."""
        return torch.cuda.stream(self.comm_stream) if on_comm_stream else nullcontext()

    def callers_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Select the stream that is current now."""
        return partial(torch.cuda.stream, torch.cuda.current_stream(self.torch_device))

    def launch_on_callers_stream(self) -> None:
        """Let no stream wait for another, which takes longer than a small call.

        Ranks that are threads may all use the default stream, where the kernel of one rank, which waits for the others,
        would be ahead of their work. Their kernels go to streams of their own.
        """
        if self._ranks_are_threads:
            self.order_after_caller(None, False)
        else:
            self._launch_on(torch.cuda.current_stream(self.torch_device))

    def _launch_on(self, callers: torch.cuda.Stream | None) -> None:
        self._callers_stream = callers
        if callers is None:
            self._launcher.launch_on(None)
        else:
            # torch never destroys its own streams. Their identifiers are odd; the default stream's is 0.
            ends = callers.stream_id % 2 == 0 and callers.stream_id != 0
            self._launcher.launch_on(callers.cuda_stream, ends)

    def order_after_caller(self, event: EventHandle | None, on_comm_stream: bool) -> None:
        """Make the communication stream wait."""
        if self._callers_stream is not None:
            self._launch_on(None)
        if event is not None:
            event.wait_on(self._stream)
        if not on_comm_stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.torch_device))

    def order_caller_after(
        self, tensors: Sequence[torch.Tensor | None], async_finish: bool, on_comm_stream: bool
    ) -> EventHandle:
        """Make the current stream wait, or return an event on the communication stream."""
        if self._callers_stream is not None:
            return EventHandle(work_on=self._callers_stream)
        current = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            if tensor is None:
                continue
            if async_finish:
                tensor.record_stream(self.comm_stream)
            if on_comm_stream:  # the caller's later work uses what has been allocated there
                tensor.record_stream(current)
        if async_finish:
            return EventHandle(self._stream)
        current.wait_stream(self._stream)
        return EventHandle(work_on=current)

    @staticmethod
    def _key(name: str, shape: Shape) -> Shape:
        from deep_ep_py.device.jit import KERNELS

        return shape if KERNELS[name].takes_shape else (0, 0, 0)


def copy_piece(architecture: str) -> int:
    """Return the bytes that a bulk copy moves; 0: the GPU has none, or the environment says no."""
    from deep_ep_py.device import jit

    return jit.copy_piece(architecture) if choices.chosen(choices.COPIES) == "bulk" else 0


def _is_of_the_gpu(error: RuntimeError) -> bool:
    """Return whether a kernel or the driver has failed, as opposed to a refusal by torch's allocator."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or str(error).startswith("CUDA error")


@cache
def _warn_of_refused_pool(why: str, remedy: str) -> None:
    """Warn once per process: all Buffers will meet the same refusal."""
    _log.warning(
        "torch does not take memory for outputs from a pool (%s), so rows go in rounds, which is slower; %s",
        why,
        remedy,
    )


@cache
def _pool_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """Return the one allocator for all pools; it is never freed, because tensors outlive Buffers."""
    return torch.cuda.memory.CUDAPluggableAllocator(str(C.__file__), "deep_ep_pool_allocate", "deep_ep_pool_free")
