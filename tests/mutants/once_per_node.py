"""Bugs of low-latency rows that go once to each node, and of the sums that return."""

from __future__ import annotations

from mutants.mutant import ONCE_PER_NODE, Mutant, one, silent

_SEND = "kernels/low_latency/dispatch_send.h"
_FORWARD = "kernels/low_latency/dispatch_forward.h"
_RECEIVE = "kernels/low_latency/dispatch_receive.h"
_COMBINE = "kernels/low_latency/combine.h"
_SUMS = "kernels/low_latency/combine_forward.h"

_AWAIT = "broadcast(device::lane() == 0 && op.wait_signal(Phase::kChunk, kind, source, 1))"

MUTANTS: tuple[Mutant, ...] = (
    # --- kernels/low_latency/dispatch_send.h
    one(
        "once per node: only rows for the forwarder itself are sent there",
        _SEND,
        "const u32 experts = layout.experts_per_node(), begin = node * experts;",
        "const u32 experts = layout.experts_per_rank, begin = layout.forwarder(node, op.rank()) * experts;",
        "fast",
        *ONCE_PER_NODE,
    ),
    one(
        "once per node: a forwarder gets no weights",
        _SEND,
        "place.weighs ? args.layout.routing_bytes(args.tokens)",
        "place.weighs && args.tokens == 0 ? args.layout.routing_bytes(args.tokens)",
        "fast",
        *ONCE_PER_NODE,
    ),
    one(
        "once per node: sums of a node counted with those of tokens that have none",
        _SEND,
        "const u32 own = slot + static_cast<u32>(__popc(mask & bits_below(device::lane())));\n"
        "        if (token < args.tokens)",
        "const u32 own = token;\n        if (token < args.tokens)",
        "fast",
        *ONCE_PER_NODE,
    ),
    # --- kernels/low_latency/dispatch_forward.h
    one("once per node: rows forwarded before they have come", _FORWARD, _AWAIT, "true", "exact", *ONCE_PER_NODE),
    silent(
        "once per node: rows forwarded without an order behind their arrival",
        _FORWARD,
        _AWAIT,
        "__any_sync(device::kFullMask, device::lane() == 0 && op.wait_signal(Phase::kChunk, kind, source, 1))",
        *ONCE_PER_NODE,
    ),
    # --- kernels/low_latency/dispatch_receive.h
    one(
        "once per node: rows looked for in the own region",
        _RECEIVE,
        "mapped ? source : receiver_of(args, op, source)",
        "mapped ? source : op.rank()",
        "fast",
        *ONCE_PER_NODE,
    ),
    one(
        "once per node: only own rows of a put counted",
        _RECEIVE,
        "count_below(window.in_node, at) -",
        "count_below(window.here, at) -",
        "fast",
        *ONCE_PER_NODE,
    ),
    # --- kernels/low_latency/combine_forward.h
    one(
        "once per node: sums before the node's results",
        _SUMS,
        "if (!op.wait_signal(Phase::kResults, wire::kData, from, 1)) continue;",
        "if (from == op.rank() && !op.wait_signal(Phase::kResults, wire::kData, from, 1)) continue;",
        "exact",
        *ONCE_PER_NODE,
    ),
    one(
        "once per node: all results of a token taken for its rank's first",
        _SUMS,
        "const u32 index = before[local] + before_choice(line.choices, experts, token, first);",
        "const u32 index = before[local];",
        "fast",
        *ONCE_PER_NODE,
    ),
    silent(
        "once per node: results counted before the counts are clear",
        _SUMS,
        "    __syncwarp();  // the counts are clear\n",
        "",
        *ONCE_PER_NODE,
    ),
    silent(
        "once per node: results listed before all lanes have counted",
        _SUMS,
        "    __syncwarp();  // the counts are complete\n",
        "",
        *ONCE_PER_NODE,
    ),
    silent(
        "once per node: sums begun before the list is complete",
        _SUMS,
        "    __syncwarp();  // the list is complete\n",
        "",
        *ONCE_PER_NODE,
    ),
    one(
        "once per node: sums put by the first block to come",
        _SUMS,
        "last = op.last_block(kStored);",
        "last = (op.last_block(kStored), blockIdx.x == 0);",
        "exact",
        *ONCE_PER_NODE,
    ),
    # --- kernels/low_latency/combine.h
    one(
        "once per node: sums of the last node left out",
        _COMBINE,
        "list_sums(args, op, results, token, own_node + 1, args.layout.nodes(), list, mine.begin);",
        "list_sums(args, op, results, token, own_node, args.layout.nodes() - 1, list, mine.begin);",
        "fast",
        *ONCE_PER_NODE,
    ),
)
