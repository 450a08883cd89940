"""Bugs of the expanded layout, of counts on the device, and of sums in the order of the choices."""

from __future__ import annotations

from mutants.mutant import EXPANDED, Mutant, one, silent

_COUNTS = "kernels/normal/counts.h"
_COMBINE = "kernels/normal/combine.h"
_ROWS_OF_TOKENS = "kernels/normal/rows.h"
_SLOTS = "kernels/expand/slots.h"
_ROWS = "kernels/expand/rows.h"
_FOLD = "kernels/expand/fold.h"
_COLUMNS = "kernels/expand/columns.h"

MUTANTS: tuple[Mutant, ...] = (
    # --- counts on the device
    one(
        "counts: an expert's own rows rounded up where its expanded rows end",
        _COUNTS,
        "counts.expert_sums[e] -= counts.aligned(counts.expert_rows[e]) - counts.expert_rows[e];",
        "(void)e;",
        "fast",
        *EXPANDED,
    ),
    one(
        "counts: statistics replaced instead of added to",
        _COUNTS,
        "counts.statistics[e] += counts.expert_rows[e];",
        "counts.statistics[e] = counts.expert_rows[e];",
        "fast",
        *EXPANDED,
    ),
    one(
        "counts: rounded down to the alignment",
        _COUNTS,
        "wire::ceil_div(static_cast<u32>(rows), alignment) * alignment",
        "(static_cast<u32>(rows) / alignment * alignment)",
        "fast",
        *EXPANDED,
    ),
    # --- the order of summation
    one(
        "combine: a rank's row where the token has its first choice there",
        _COMBINE,
        "for (u32 j = k + 1; last && j < args.choices; ++j) last = rank_of_choice(args, token, j) != r;",
        "for (u32 j = 0; last && j < k; ++j) last = rank_of_choice(args, token, j) != r;",
        "fast",
        *EXPANDED,
    ),
    one(
        "combine: in rank order in spite of the choices",
        _COMBINE,
        "if (args.choices != 0) {\n        const u32 count = list_chosen",
        "if (args.choices != 0 && args.tokens == 0) {\n        const u32 count = list_chosen",
        "fast",
        *EXPANDED,
    ),
    one(
        "combine: a weight from the row of the wrong column",
        _COMBINE,
        "there ? sources[r].weights[u64{row} * shape.topk() + k] : 0.0f;",
        "there ? sources[r].weights[u64{row} * shape.topk()] : 0.0f;",
        "fast",
        *EXPANDED,
    ),
    silent(
        "combine: the list of chosen rows read before it is complete",
        _COMBINE,
        """    __syncwarp();  // the list is complete
    return count < CombineShared""",
        """    return count < CombineShared""",
        *EXPANDED,
    ),
    # --- the expanded layout
    one(
        "slots: the experts before not rounded up",
        _SLOTS,
        "there ? args.experts.aligned(static_cast<u32>(args.experts.rows[e])) : 0;",
        "there ? static_cast<u32>(args.experts.rows[e]) : 0;",
        "fast",
        *EXPANDED,
    ),
    one(
        "slots: choices of a round in reverse",
        _SLOTS,
        "static_cast<i64>(end + __popc(mask & lanes_below))",
        "static_cast<i64>(end + __popc(mask & ~lanes_below) - 1)",
        "exact",
        *EXPANDED,
    ),
    one(
        "slots: the chunk before not counted",
        _SLOTS,
        "e < experts && before < chunk; ++before)",
        "e < experts && before + 1 < chunk; ++before)",
        "fast",
        *EXPANDED,
    ),
    silent(
        "slots: an end advanced while lanes still read it",
        _SLOTS,
        "                __syncwarp();  // all lanes have read the end\n",
        "",
        *EXPANDED,
    ),
    one(
        "slots: choices elsewhere left unwritten",
        _SLOTS,
        "if (!here && choice < last) take(choice, -1);",
        "",
        "fast",
        *EXPANDED,
    ),
    # --- rows that senders put into the layout
    one(
        "by senders: a source's rows begin where the first source's do",
        "kernels/normal/notify.h",
        "            start += rows;\n",
        "            (void)rows;\n",
        "fast",
        *EXPANDED,
    ),
    one(
        "by senders: rows begin where the expert's own end",
        "kernels/normal/notify.h",
        "static_cast<u32>(args.received.expert_sums[e] - args.received.expert_rows[e]);",
        "static_cast<u32>(args.received.expert_sums[e]);",
        "fast",
        *EXPANDED,
    ),
    one(
        "by senders: the row in the slot of the last choice",
        "kernels/normal/dispatch.h",
        "    for (u32 k = 0; k < topk; ++k) {\n        const u32 slot = slot_of(",
        "    for (u32 k = topk; k-- > 0;) {\n        const u32 slot = slot_of(",
        "fast",
        *EXPANDED,
    ),
    one(
        "by senders: starts that the offer's signal does not publish",
        "kernels/normal/offers.h",
        "if (offer.expanded_rows != 0) send_starts(layout, op, r);",
        "if (offer.expanded_rows != 0) op.signal(r, wire::kOffer), send_starts(layout, op, r);",
        "tsan",
        *EXPANDED,
    ),
    one(
        "expand: the last row of padding not zeroed",
        _ROWS,
        "slot < u64{begin} + args.experts.aligned(rows); ++slot)",
        "slot + 1 < u64{begin} + args.experts.aligned(rows); ++slot)",
        "fast",
        *EXPANDED,
    ),
    one(
        "expand: scales with the stride of rows",
        _ROWS,
        "to[i64{s} * args.scales_stride[1]] = from[s];",
        "to[i64{s} * args.scales_stride[0]] = from[s];",
        "fast",
        *EXPANDED,
    ),
    silent(
        "expand: addresses of slots read before they are complete",
        _ROWS,
        "        __syncwarp();  // the addresses are complete\n",
        "",
        *EXPANDED,
    ),
    silent(
        "fold: slots read before they are complete",
        _ROWS,
        """        count += __popc(mask);
    }
    __syncwarp();  // the list is complete
""",
        """        count += __popc(mask);
    }
""",
        *EXPANDED,
    ),
    one(
        "fold: weights of a row in the order of its slots",
        _FOLD,
        "args.weights[u64{row} * topk + k] = slot < args.expanded_rows ? args.expanded_weights[slot] : 0.0f;",
        "args.weights[u64{row} * topk + k] = k < count ? args.expanded_weights[slots[k]] : 0.0f;",
        "fast",
        *EXPANDED,
    ),
    one(
        "fold: biases after the choices",
        _FOLD,
        "addresses, biases + count, nullptr, nullptr,",
        "addresses + biases, count, biases > 0 ? addresses[0] : nullptr, biases > 1 ? addresses[1] : nullptr,",
        "fast",
        *EXPANDED,
    ),
    one(
        "fold: every row gets the bias of the first",
        _FOLD,
        "addresses[biases] = bias + u64{row} * row_bytes;",
        "addresses[biases] = bias;",
        "fast",
        *EXPANDED,
    ),
    one(
        "columns: rows as far apart as in the row-major scales",
        _COLUMNS,
        "column[row] = args.from[u64{row} * args.scales + scale];",
        "column[row] = args.from[u64{scale} * args.rows + row];",
        "fast",
        *EXPANDED,
    ),
    one(
        "dispatch: a choice elsewhere keeps its weight",
        _ROWS_OF_TOKENS,
        "weights[k] = here ? from_weights[k] : 0.0f;",
        "weights[k] = from_weights[k];",
        "fast",
        "peer",
        "ibgda",
    ),
)
