"""Which kernels there are: name, header, instantiation and shared memory of each, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deep_ep_py.core.native import C

_FIRST_WITH_BULK_COPIES = 90


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for, and what their shared memory depends on.

    Parameters
    ----------
    ranks
        Ranks of the Buffer.
    row_bytes
        Bytes of one token's row.
    topk
        Experts each token chooses.
    experts
        Experts in all.
    warps
        Warps per block.
    bulk_copies
        Whether rows are copied by bulk copies (TMA) where the architecture has them.
    """

    ranks: int = 8
    row_bytes: int = 2 * 7168
    topk: int = 8
    experts: int = 256
    warps: int = C.cuda.BLOCK_WARPS
    bulk_copies: bool = True

    @property
    def static(self) -> str:
        """The shape as the C++ type of `kernels/common/shape.h`."""
        return f"deep_ep::StaticShape<{self.ranks}, {self.row_bytes}, {self.topk}>"


@dataclass(frozen=True)
class Kernel:
    """A kernel as C++ text. The texts may name the fields of a `Shape` in braces, and `{static}`.

    Parameters
    ----------
    name
        What the launcher calls it.
    header
        The file that defines it, relative to the include root.
    expression
        Names the instantiation.
    dynamic_shared
        A constant expression: bytes of dynamic shared memory of a launch.
    before
        Headers that are included before that one.
    """

    name: str
    header: str
    expression: str
    dynamic_shared: str = "0"
    before: tuple[str, ...] = ()

    def expression_for(self, shape: Shape) -> str:
        """Return the name of the instantiation for `shape`."""
        return _fill(self.expression, shape)

    def dynamic_shared_for(self, shape: Shape) -> str:
        """Return the constant expression for `shape`."""
        return _fill(self.dynamic_shared, shape)


def has_bulk_copies(architecture: str) -> bool:
    """Tell whether an architecture, as `sm_90a`, has bulk copies."""
    return int("".join(filter(str.isdigit, architecture))) >= _FIRST_WITH_BULK_COPIES


def _fill(text: str, shape: Shape) -> str:
    return text.format(
        static=shape.static,
        ranks=shape.ranks,
        row_bytes=shape.row_bytes,
        topk=shape.topk,
        experts=shape.experts,
        warps=shape.warps,
    )


def _kernels(*kernels: Kernel) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels}


KERNELS = _kernels(
    Kernel(
        "layout",
        "kernels/normal/layout.h",
        "deep_ep::layout<{static}>",
        "deep_ep::layout_shared_bytes({ranks}, {experts})",
    ),
    Kernel("notify", "kernels/normal/notify.h", "deep_ep::notify<{static}>"),
    Kernel("counts", "kernels/normal/notify.h", "deep_ep::counts<{static}>"),
    Kernel("notify_cached", "kernels/normal/notify.h", "deep_ep::notify_cached"),
    Kernel(
        "dispatch",
        "kernels/normal/dispatch.h",
        "deep_ep::dispatch<{static}>",
        "deep_ep::dispatch_shared_bytes({ranks}, {warps}, deep_ep::device::RowCopies::kSharedBytes)",
    ),
    Kernel(
        "combine",
        "kernels/normal/combine.h",
        "deep_ep::combine<{static}>",
        "deep_ep::combine_shared_bytes({ranks}, {warps})",
    ),
    Kernel("post", "kernels/measure/post.h", "deep_ep::post"),
    Kernel("handshake", "kernels/measure/handshake.h", "deep_ep::handshake"),
)
"""Every kernel by name, in the order in which an operation launches them; last what only measurements do."""

GATHERED = {
    name: replace(
        kernel,
        name=f"{name}_of_each_rank",
        expression=f"deep_ep::device::of_each_rank<{kernel.expression}>",
        before=("device/of_each_rank.h",),
    )
    for name, kernel in KERNELS.items()
}
"""The same kernels, by the same names, for all ranks of a process in one launch: `run_ranks(..., one_launch=True)`."""
