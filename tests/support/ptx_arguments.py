"""Why some source lines may be weakened in the PTX without any workload of `ptx_mutants` detecting it.

Either something else orders the access too, and the line stays because its function promises the order to any caller;
or the order is needed, but no workload contains the situation that needs it: then a litmus test or a model shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptx_idioms import Weakened


@dataclass(frozen=True)
class Argument:
    """`how`: the weakening; `file` and `text`: the beginning of the source line; `why`: why no workload must detect
    it."""

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


_FAILURE = "only the word itself is communicated; device scope would suffice on one GPU, but a host reads it"
_ABORT = "needed where a user overwrites rows after a failure, in an order nothing reports: litmus last_look"
_MASKS = "needed where a source sends while it is being masked: models/masking.py, rules told_first, decided_once"
_CALLERS = "all callers also have a barrier; the function does not rely on it"
_MAPPED = "raised before the launch that needs it, which orders it; a host may raise it for a later one at any time"
_OFFERED = "needed for outputs whose memory a user's kernel has read before; none of these kernels does"
_FENCED = "copy_rows() fences both spaces before each chunk"
_TAKEN = "slots are strong words, so no race is visible; litmus nic_completion has the same order"

ARGUMENTS = (
    Argument("left out", "fabric/fabric.h", "__syncwarp();  // all lanes' stores into the pieces", _CALLERS),
    Argument(
        "block scope",
        "fabric/ibgda.h",
        "const u64 filled = device::load_relaxed<Scope::kDevice>(qp.filled);",
        "the posting blocks have been joined; kernels of another library may post meanwhile",
    ),
    Argument(
        "block scope",
        "fabric/proxy.h",
        "const u64 posted = device::load_relaxed<device::Scope::kDevice>(&ring.reserved);",
        "the posting blocks have been joined; those of an operation on another stream may post meanwhile",
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
        "one thread of a launch, and launches of a Buffer follow each other; a graph replayed beside a call, which "
        "this must detect, does not",
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
    Argument("device scope", "kernels/common/operation.h", "device::add_release<Scope::kSystem>(environment", _FAILURE),
    Argument(
        "without its release",
        "kernels/common/operation.h",
        "device::add_release<Scope::kSystem>(environment",
        "needed by a host that counts failures while a kernel fails: FailureCount::settled() acquires it, then checks "
        "whether the failure has been claimed",
    ),
    Argument("device scope", "kernels/common/operation.h", "const bool elsewhere = device::load_relaxed", _FAILURE),
    Argument(
        "without its release",
        "kernels/common/operation.h",
        "device::store_release<Scope::kSystem>(&outcome_.failure.mark",
        "needed by a host that reads while other blocks still run; after the kernel, its end orders the read",
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
        "the value is only for a message; other threads may still add to the word",
    ),
    Argument("without its acquire", "kernels/common/operation.h", "const u64 before = if_current(", _ABORT),
    Argument("without its acquire", "kernels/common/operation.h", "device::exchange_acquire<Scope::kSystem>", _ABORT),
    Argument(
        "without its release", "kernels/common/operation.h", "const u64 word = if_current(device::fetch_add", _ABORT
    ),
    Argument("without its acquire", "kernels/common/operation.h", "return (device::load_acquire<Scope::kSy", _MASKS),
    Argument("without its acquire", "kernels/common/operation.h", "u64 found = device::load_acquire<Scope", _MASKS),
    Argument("its release alone", "kernels/common/operation.h", "const u64 before = device::cas_acq_rel", _MASKS),
    Argument("its acquire alone", "kernels/common/operation.h", "const u64 before = device::cas_acq_rel", _MASKS),
    Argument(
        "without its acquire",
        "kernels/common/operation.h",
        "return device::load_acquire<Scope::kSystem>(word(wire::kFree, rank)) >= free_target();",
        "the operation in between was received from all ranks, whose signals order more; needed with two in flight",
    ),
    Argument(
        "device scope",
        "kernels/common/patience.h",
        "const i32 other = wire::waited_for(device::load_relaxed<Scope::kSystem>(&header()->waiting));",
        "another rank's host reads it, and no host stores there while kernels run; system scope like its stores",
    ),
    Argument(
        "device scope",
        "kernels/common/patience.h",
        "if (device::load_relaxed<Scope::kSystem>(suspect) < steps_) {",
        "a host stores there when it masks a rank, which another thread may be about to accuse",
    ),
    Argument("device scope", "kernels/low_latency/combine.h", "const u64 end = device::load_relaxed", _MAPPED),
    Argument("device scope", "kernels/normal/offers.h", "const u64 mapped = device::load_relaxed", _MAPPED),
    Argument("device scope", "kernels/two_hops/offers.h", "const u64 mapped = device::load_relaxed", _MAPPED),
    Argument("left out", "kernels/two_hops/forward.h", "copies.finish();", "a block barrier follows"),
    Argument("left out", "kernels/normal/dispatch.h", "copies.finish();", "a block barrier follows"),
    Argument("left out", "kernels/normal/staging.h", "copies.finish();", "a block barrier follows"),
    Argument(
        "left out",
        "kernels/normal/staging.h",
        "copies.read_what_came();",
        "needed in a block that sends a chunk after it has summed a round; few workloads have so many chunks",
    ),
    Argument("left out", "kernels/normal/combine.h", "device::RowCopies copies(", _FENCED),
    Argument("of the other space", "kernels/normal/combine.h", "device::RowCopies copies(", _FENCED),
    Argument("left out", "kernels/normal/combine.h", "device::RowSums sums(", _CALLERS),
    Argument("left out", "kernels/normal/dispatch.h", "device::RowCopies copies(", _OFFERED),
    Argument("of the other space", "kernels/normal/dispatch.h", "device::RowCopies copies(", _OFFERED),
)


def argument_for(mutant: Weakened) -> str:
    """Return why a mutant may go undetected; "" if there is no reason."""
    return next((argument.why for argument in ARGUMENTS if argument.is_of(mutant)), "")
