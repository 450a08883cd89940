"""A device that interprets the compiler's PTX on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.device.device import Compiling
from deep_ep_py.device.device import Shape as RuntimeShape
from deep_ep_py.device.jit.ptx import PtxCache
from deep_ep_py.device.jit.registry import ANY_FABRIC, KERNELS, Kernel, Shape, copy_piece
from deep_ep_py.device.make import cpu_made_by

Compile = Callable[[Kernel, Shape, str], tuple[str, str]]
"""Returns a kernel's PTX and its symbol in it: `compile_ptx`, or the `get` of a cache."""

_NO_SHAPE = (0, 0, 0)


class Images:
    """The modules of one architecture, read once for all ranks.

    Parameters
    ----------
    architecture : str
        For example `sm_90a`.
    compile_
        Returns the PTX. Default: from a `PtxCache`.
    """

    def __init__(self, architecture: str, compile_: Compile | None = None) -> None:
        self.architecture = architecture
        self._compile = compile_ or PtxCache().get
        self._found: dict[tuple[str, Shape], tuple[str, Any]] = {}
        self.shapes: dict[str, Shape] = {}
        """For each kernel, the shape that was requested last."""
        self._lock = threading.Lock()  # rank threads release the GIL while they wait for it

    def get(self, name: str, shape: RuntimeShape, options: C.BufferOptions | None = None) -> tuple[str, Any]:
        """Return a kernel's symbol, and the module that contains it.

        Parameters
        ----------
        options
            The Buffer whose kernel it is. Default: any.

        Raises
        ------
        CompileError, NvrtcUnavailableError
            As `compile_ptx`.
        OSError
            As `KernelCache.get_all`.
        C.ptx.PtxError
            The PTX has an instruction or directive that the interpreter does not support.
        """
        with self._lock:
            static = Shape(
                *(shape if shape != _NO_SHAPE else (1, 16, 1)),
                bulk_copies=copy_piece(self.architecture) != 0,
                fabrics=ANY_FABRIC if options is None else tuple(options.fabrics),
                masks_ranks=options is None or options.masks_ranks,
            )
            self.shapes[name] = static
            if (name, static) not in self._found:
                text, symbol = self._compile(KERNELS[name], static, self.architecture)
                self._found[name, static] = symbol, C.ptx.Image(text)
            return self._found[name, static]


class PtxDevice(CpuDevice):
    """A GPU as kernels see it. Its memory is host memory, and its ranks are threads of this process.

    Parameters
    ----------
    images
        The source of its kernels.
    warps : int
        Warps per block.
    blocks : int
        Blocks per operation, if the call does not say.
    """

    def __init__(self, images: Images, warps: int = 4, blocks: int = 1) -> None:
        super().__init__()
        self.blocks = blocks
        self._images = images
        self._kernels = C.ptx.Kernels(copy_piece=copy_piece(images.architecture), warps=warps)

    def prepare(self, kernels: Iterable[str], shape: RuntimeShape, compiling: Compiling) -> None:
        """Compile and read the kernels that are not ready yet."""
        for name in kernels:
            key = shape if KERNELS[name].takes_shape else _NO_SHAPE
            if not self._kernels.has(name, key):
                with compiling():
                    self._kernels.add(name, key, *self._images.get(name, key, self._options))

    def make_runtime(
        self, options: C.BufferOptions, heaps: list[C.Heap], near: list[C.Heap | None], network: C.NetworkOptions
    ) -> C.Runtime:
        """Make a runtime over the executor that interprets the kernels."""
        self._options = options
        for rank, heap in enumerate(heaps):
            C.ptx.add_heap(heap.base, heap.bytes, rank)
        for rank, part in enumerate(near):
            if part is not None:
                C.ptx.add_heap(part.base, part.bytes, rank)
        return C.Runtime(options, heaps, near, network, self._kernels)


@contextmanager
def interpreting(images: Images, warps: int = 4, blocks: int = 1) -> Iterator[None]:
    """Make Buffers that are created on the CPU in the body launch interpreted kernels.

    Parameters
    ----------
    images
        The source of the kernels.
    warps, blocks
        As in `PtxDevice`.

    Raises
    ------
    RuntimeError
        The warps of this build of the extension do not have 32 threads.
    """
    if C.WARP_SIZE != 32:
        raise RuntimeError(
            f"DEEP_EP_BUILD=exact: expected a build whose warps have 32 threads, not {C.WARP_SIZE}; "
            "`DEEP_EP_BUILDS=fast,exact make build` builds one"
        )
    with cpu_made_by(lambda: PtxDevice(images, warps, blocks)):
        yield
