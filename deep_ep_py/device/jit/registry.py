"""The table of kernels: name, header, instantiation and launch of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deep_ep_py.base.native import C

_FIRST_WITH_BULK_COPIES = 90
_WITH_LITTLE_SHARED_MEMORY = range(120, 130)
"""A block has 99 KB there, and 227 KB on the other architectures that have bulk copies."""


ANY_FABRIC = ("ibgda", "proxy")
"""The fabrics by which kernels on GPUs reach ranks that are not mapped."""


@dataclass(frozen=True)
class Shape:
    """The values that kernels are compiled for, and those that their shared memory depends on.

    Parameters
    ----------
    ranks
        Ranks of the Buffer.
    row_bytes
        Bytes of a token's row.
    topk
        Experts per token.
    experts
        Total number of experts.
    warps
        Warps per block.
    bulk_copies
        Whether rows are copied by bulk copies (TMA) if the architecture has them.
    ranks_per_node
        Ranks per node; None: all ranks are on one node.
    fabrics
        How ranks are reached that are not mapped. A kernel has no code for other fabrics.
    masks_ranks
        Whether the Buffer may mask ranks. Without it, kernels have no code for that.
    notes_stages
        Whether kernels note when their warps end a stage. Without it, they have no code for that.
    """

    ranks: int = 8
    row_bytes: int = 2 * 7168
    topk: int = 8
    experts: int = 256
    warps: int = C.cuda.BLOCK_WARPS
    bulk_copies: bool = True
    ranks_per_node: int | None = None
    fabrics: tuple[str, ...] = ()
    masks_ranks: bool = False
    notes_stages: bool = False

    @property
    def macros(self) -> str:
        """Definitions that precede the headers of a kernel."""
        routes = sum(1 << C.route_named(fabric) for fabric in self.fabrics)
        macros = {
            "DEEP_EP_ROUTES": routes,
            "DEEP_EP_MAY_MASK": int(self.masks_ranks),
            "DEEP_EP_NOTES_STAGES": int(self.notes_stages),
        }
        return "".join(f"#define {name} {value}\n" for name, value in macros.items())

    @property
    def static(self) -> str:
        """The shape as the C++ type of `kernels/common/shape.h`."""
        return f"deep_ep::StaticShape<{self.ranks}, {self.row_bytes}, {self.topk}>"


@dataclass(frozen=True)
class Kernel:
    """A kernel as C++ text.

    Parameters
    ----------
    name
        The name that the launcher uses.
    header
        The file that defines it, relative to the include root.
    expression
        The C++ expression for the instantiation; `{static}` stands for the shape.
    type
        The C++ type that describes its launch; see `kernels/common/kernel.h`.
    before
        Headers that are included before `header`.
    """

    name: str
    header: str
    expression: str
    type: str = "deep_ep::NoSharedMemory"
    before: tuple[str, ...] = ()

    @property
    def takes_shape(self) -> bool:
        """Whether the kernel has an instantiation per shape."""
        return "{static}" in self.expression

    def expression_for(self, shape: Shape) -> str:
        """Return the name of the instantiation for `shape`."""
        return self.expression.format(static=shape.static)

    def dynamic_shared_for(self, shape: Shape) -> str:
        """Return a C++ constant expression for the bytes of dynamic shared memory of a launch."""
        block = (
            f"{shape.ranks}, {shape.experts}, {shape.topk}, {shape.warps}, "
            f"deep_ep::device::RowCopies::kSharedBytes, {shape.ranks_per_node or shape.ranks}"
        )
        return f"{self.type}::shared_bytes({{{block}}})"


def copy_piece(architecture: str) -> int:
    """Return the bytes that a bulk copy moves on an architecture, such as `sm_90a`; 0: it has no such copies."""
    number = int("".join(filter(str.isdigit, architecture)))
    if number < _FIRST_WITH_BULK_COPIES:
        return 0
    return 1024 if number in _WITH_LITTLE_SHARED_MEMORY else 2048


def _kernels(*kernels: Kernel) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels}


KERNELS = _kernels(
    Kernel("layout", "kernels/normal/layout.h", "deep_ep::layout<{static}>", "deep_ep::LayoutKernel"),
    Kernel("notify", "kernels/normal/notify.h", "deep_ep::notify<{static}>", "deep_ep::NotifyKernel"),
    Kernel("counts", "kernels/normal/notify.h", "deep_ep::counts<{static}>", "deep_ep::CountsKernel"),
    Kernel("dispatch", "kernels/normal/dispatch.h", "deep_ep::dispatch<{static}>", "deep_ep::DispatchKernel"),
    Kernel("expand_slots", "kernels/expand/slots.h", "deep_ep::expand_slots<{static}>", "deep_ep::ExpandSlotsKernel"),
    Kernel("expand_rows", "kernels/expand/rows.h", "deep_ep::expand_rows<{static}>", "deep_ep::ExpandRowsKernel"),
    Kernel("scale_columns", "kernels/expand/columns.h", "deep_ep::scale_columns", "deep_ep::ScaleColumnsKernel"),
    Kernel("fold", "kernels/expand/fold.h", "deep_ep::fold<{static}>", "deep_ep::FoldKernel"),
    Kernel("combine", "kernels/normal/combine.h", "deep_ep::combine<{static}>", "deep_ep::CombineKernel"),
    *(
        Kernel(
            f"two_hops_{name}",
            f"kernels/two_hops/{header}.h",
            f"deep_ep::two_hops::{name}<{{static}}>",
            f"deep_ep::two_hops::{name.capitalize()}Kernel",
        )
        for name, header in (
            ("notify", "notify"),
            ("counts", "notify"),
            ("dispatch", "dispatch"),
            ("combine", "combine"),
        )
    ),
    Kernel(
        "low_latency_dispatch",
        "kernels/low_latency/dispatch.h",
        "deep_ep::low_latency::dispatch<{static}>",
        "deep_ep::low_latency::DispatchKernel",
    ),
    Kernel(
        "low_latency_combine",
        "kernels/low_latency/combine.h",
        "deep_ep::low_latency::combine<{static}>",
        "deep_ep::low_latency::CombineKernel",
    ),
    Kernel("post", "kernels/measure/post.h", "deep_ep::post", "deep_ep::PostKernel"),
    Kernel("handshake", "kernels/measure/handshake.h", "deep_ep::handshake", "deep_ep::HandshakeKernel"),
)
"""Every kernel by name, in the order in which an operation launches them; kernels only for measurements come last."""

GATHERED = {
    name: replace(
        kernel,
        name=f"{name}_of_each_rank",
        expression=f"deep_ep::device::of_each_rank<{kernel.expression}>",
        before=("device/of_each_rank.h",),
    )
    for name, kernel in KERNELS.items()
}
"""The same kernels under the same names, for all ranks of a process in one launch (`run_ranks(one_launch=True)`)."""
