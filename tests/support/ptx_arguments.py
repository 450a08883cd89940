"""Why some lines may be weakened in the PTX without a workload of `ptx_mutants` noticing.

Each is either ordered by something else too, and stays because its function promises the order to any caller; or it is
needed, and what needs it happens in no workload: then a litmus test or a model shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptx_idioms import Weakened


@dataclass(frozen=True)
class Argument:
    """`how`: the weakening; `file` and `text`: how its line begins; `why`: nothing has to notice."""

    how: str
    file: str
    text: str
    why: str

    def is_of(self, mutant: Weakened) -> bool:
        return (
            mutant.how == self.how
            and mutant.idiom.file == self.file
            and mutant.idiom.text.removeprefix("DEEP_EP_DEVICE ").startswith(self.text)
        )


_FAILURE = "the word alone is what is told; device scope would do on one GPU, but a host reads it"
_ABORT = "needed where a user writes over rows after a failure, which nothing tells the order of: litmus last_look"
_MASKS = "needed where a source sends while it is being masked: tests/models/masking.py, rules told_first, decided_once"
_CALLERS = "all callers meet as well; the function does not rest on it"
_TAKEN = "slots are strong words, so that no race shows; litmus nic_completion has the same order"

ARGUMENTS = (
    Argument("left out", "fabric/fabric.h", "__syncwarp();  // all lanes' stores into the pieces", _CALLERS),
    Argument(
        "block scope",
        "fabric/ibgda.h",
        "const u64 filled = device::load_relaxed<Scope::kDevice>(qp.filled);",
        "the blocks that post have been joined; kernels of another library may post meanwhile",
    ),
    Argument(
        "block scope",
        "fabric/proxy.h",
        "const u64 posted = device::load_relaxed<device::Scope::kDevice>(&ring.reserved);",
        "the blocks that post have been joined; those of an operation on another stream may post meanwhile",
    ),
    Argument("without its acquire", "fabric/proxy.h", "const u64 now = device::load_acquire<Scope::kSystem>", _TAKEN),
    Argument("without its acquire", "fabric/proxy.h", "u64 known = device::load_acquire<Scope::kDevice>", _TAKEN),
    Argument("without its release", "fabric/proxy.h", "known = device::cas_release<Scope::kDevice>", _TAKEN),
    Argument(
        "device scope",
        "fabric/proxy.h",
        "device::store_relaxed<Scope::kSystem>(&command.low,",
        "the release of the upper half orders it; it is strong so that a host never sees half of it",
    ),
    Argument(
        "block scope",
        "kernels/common/operation.h",
        "const u64 found = device::cas_relaxed<Scope::kDevice>(&context_.sequence",
        "one thread of a launch, and launches of a Buffer follow each other; a graph that is replayed beside a call, "
        "which this is to find, does not",
    ),
    Argument(
        "block scope",
        "kernels/common/operation.h",
        "const u32 counted = device::load_relaxed<Scope::kDevice>(&context_.counted);",
        "two calls of one Buffer would have to fail at once, on two streams",
    ),
    Argument(
        "block scope",
        "kernels/common/operation.h",
        "device::cas_relaxed<Scope::kDevice>(&context_.counted",
        "two calls of one Buffer would have to fail at once, on two streams",
    ),
    Argument("device scope", "kernels/common/operation.h", "device::add_release<Scope::kSystem>(context_.f", _FAILURE),
    Argument(
        "without its release",
        "kernels/common/operation.h",
        "device::add_release<Scope::kSystem>(context_.f",
        "needed by a host that counts while a kernel fails: FailureCount::settled() acquires it, then looks whether "
        "the failure has been claimed",
    ),
    Argument("device scope", "kernels/common/operation.h", "const bool elsewhere = device::load_relaxed", _FAILURE),
    Argument(
        "without its release",
        "kernels/common/operation.h",
        "device::store_release<Scope::kSystem>(&outcome_.failure.mark",
        "needed by a host that looks while other blocks still run; where it looks after the kernel, its end orders",
    ),
    Argument(
        "device scope",
        "kernels/common/operation.h",
        "device::store_release<Scope::kSystem>(&outcome_.failure.mark",
        "as without its release",
    ),
    Argument(
        "device scope",
        "kernels/common/operation.h",
        "give_up(what.phase, what.peer, what.expected, device::load_relaxed",
        "the value is for a message alone; others may still add to the word",
    ),
    Argument("without its acquire", "kernels/common/operation.h", "const u64 before = if_current(", _ABORT),
    Argument("without its acquire", "kernels/common/operation.h", "device::exchange_acquire<Scope::kSystem>", _ABORT),
    Argument("without its release", "kernels/common/operation.h", "const u64 word = if_current(device::add", _ABORT),
    Argument("without its acquire", "kernels/common/operation.h", "return (device::load_acquire<Scope::kSy", _MASKS),
    Argument("without its acquire", "kernels/common/operation.h", "u64 found = device::load_acquire<Scope", _MASKS),
    Argument("its release alone", "kernels/common/operation.h", "const u64 before = device::cas_acq_rel", _MASKS),
    Argument("its acquire alone", "kernels/common/operation.h", "const u64 before = device::cas_acq_rel", _MASKS),
    Argument(
        "without its acquire",
        "kernels/common/operation.h",
        "return device::load_acquire<Scope::kSystem>(word(wire::kFree, rank)) >= free_target();",
        "the operation in between has been received from all, whose signals order more; needed where two are under way",
    ),
    Argument(
        "device scope",
        "kernels/common/patience.h",
        "const i32 other = wire::waited_for(device::load_relaxed<Scope::kSystem>(&header()->waiting));",
        "a host of another rank looks at it, and none stores there while kernels run; at system scope as its stores",
    ),
    Argument(
        "device scope",
        "kernels/common/patience.h",
        "if (device::load_relaxed<Scope::kSystem>(suspect) < steps_) {",
        "a host stores there when it masks a rank, which another thread may be about to accuse",
    ),
    Argument("left out", "kernels/common/polling.h", "__syncwarp();  // all lanes have read the count", _CALLERS),
    Argument(
        "device scope",
        "kernels/low_latency/combine.h",
        "const u64 end = device::load_relaxed<Scope::kSystem>(&op.peers().mapped_bytes[from]);",
        "raised before the launch of what needs it, which orders; a host may raise it for a later one meanwhile",
    ),
    Argument("left out", "kernels/normal/dispatch.h", "copies.finish();", "the block meets behind it"),
    Argument("left out", "kernels/normal/combine.h", "device::RowSums sums(", _CALLERS),
)


def argument_for(mutant: Weakened) -> str:
    """Return why a mutant need not be noticed; "": there is no reason."""
    return next((argument.why for argument in ARGUMENTS if argument.is_of(mutant)), "")
