"""Bugs in the handling of masked ranks."""

from __future__ import annotations

from mutants.mutant import MASKS, Mutant, one

_OPERATION = "kernels/common/operation.h"
_RECEIVE = "kernels/low_latency/dispatch_receive.h"
_COMBINE = "kernels/low_latency/combine.h"
_WARDEN = "host/control/warden.cpp"

MUTANTS: tuple[Mutant, ...] = (
    one(
        "masks: no last look",
        "kernels/common/operation.h",
        "if (device::lane() == 0 && (reads || masks_ranks())) look_last();",
        "if (device::lane() == 0 && reads) look_last();",
        "exact",
        *MASKS,
    ),
    one(
        "masks: entered without a look behind `free`",
        _OPERATION,
        "bool goes_on = !masks_ranks();",
        "bool goes_on = true;",
        "exact",
        "barriers",
    ),
    one(
        "masks: a masked rank takes part",
        _OPERATION,
        "(masked(source) ? 0 : 1)",
        "1",
        "fast",
        *MASKS,
    ),
    one(
        "masks: rows that have not come are left as they are",
        _RECEIVE,
        "for (u32 i = 0; !here && i < count; ++i) zero_row(scratch.targets[i], args.layout.x_bytes);",
        "",
        "fast",
        *MASKS,
    ),
    one(
        "masks: the routing of a masked rank is taken",
        _RECEIVE,
        "    if (!op.takes_part(source)) return {};\n",
        "",
        "fast",
        *MASKS,
    ),
    one(
        "masks: results of a masked rank are summed",
        _COMBINE,
        "    if (results[from].take_part == 0) return nullptr;\n",
        "",
        "fast",
        *MASKS,
    ),
    one(
        "masks: a masked rank tells the others that it has failed",
        _OPERATION,
        "const bool alone = wire::abort_reason(word) == wire::kMasked;",
        "const bool alone = false;",
        "fast",
        *MASKS,
    ),
    one(
        "masks: a masked rank is not told",
        _WARDEN,
        "control_->tell_masked(rank, wire::abort_word(post_.generation, wire::kMasked, self, rank), post_.generation);",
        "(void)self;",
        "fast",
        *MASKS,
    ),
    one(
        "masks: a rank that waits has no excuse",
        _WARDEN,
        "if (told < wire::kSuspect || excused(rank)) {",
        "if (told < wire::kSuspect) {",
        "fast",
        *MASKS,
    ),
    one(
        "masks: suspected after the first step",
        _WARDEN,
        "if (told < wire::kSuspect || excused(rank)) {",
        "if (excused(rank)) {",
        "fast",
        *MASKS,
    ),
    one(
        "masks: others are not told",
        _WARDEN,
        "    control_->tell_masks(mine_, post_.generation);\n",
        "",
        "fast",
        *MASKS,
    ),
    one(
        "masks: waits for a masked rank go on",
        _OPERATION,
        "over = arrived || failed() || must_leave() || masked_peer(what);",
        "over = arrived || failed() || must_leave();",
        "fast",
        *MASKS,
    ),
)
