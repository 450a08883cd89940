"""Bugs of combine in two hops."""

from __future__ import annotations

from mutants.mutant import TWO_HOPS, Mutant, one, silent

_FORWARD = "kernels/two_hops/forward.h"
_GATHER = "kernels/two_hops/gather.h"
_COMBINE = "kernels/two_hops/combine.h"
_OWN_SUMS = "kernels/two_hops/own_sums.h"
_EACH_CHUNK = "for (u32 d = 0; d < me_.per_node; ++d) {\n            if (rows_.sends(d) && !use("
_GIVE_BACK = "            rows_.give_back(chunk, layout.chunks(tables_.streams[line].forwarded), way.owner);\n"
_SUM_CHUNK = "        if (!rows_.find(line, chunk)) return;\n"
_NODES_BELOW = "list_nodes(token, 0, me.node, 0);"
_NODES_ABOVE = "const u32 count = list_nodes(token, me.node + 1, args.layout.nodes, end);"
_BIASED = """args.combined_x + offset, rows.into, count,
                 args.bias[0]"""
_ROUNDED = """args.combined_x + offset, rows.into, count, nullptr, nullptr, row_bytes);
        __syncwarp();
        if (device::lane() == 0) rows.into.x[0] = args.combined_x + offset;
        __syncwarp();
        sum_rows(sums, args.combined_x + offset, rows.into, 1,
                 args.bias[0]"""

MUTANTS: tuple[Mutant, ...] = (
    # --- kernels/two_hops/gather.h
    one(
        "two hops: the first local chunk in a slot for all",
        _GATHER,
        "Place::stream(node, local, me.per_node), chunk / wire::kLocalSlots + 1);",
        "Place::stream(node, local, me.per_node), 1);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows of a local chunk found from the stream's begin",
        _GATHER,
        "{message + layout.local.x_offset() - first * row_bytes,",
        "{message + layout.local.x_offset(),",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows of a node summed from the last rank",
        _GATHER,
        "const u32 slot = count + __popc(mask & lanes_below);",
        "const u32 slot = count + __popc(mask) - 1 - __popc(mask & lanes_below);",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: a stream's last local chunk given back",
        _GATHER,
        "        if (chunk + wire::kLocalSlots >= chunks) return;  // the last one is not given back\n",
        "",
        "fast",
        *TWO_HOPS,
    ),
    # --- kernels/two_hops/combine.h
    one(
        "two hops: slot of the owner not waited for",
        _COMBINE,
        "wire::kNext + what.slot, owner, n)))",
        "wire::kNext + what.slot, owner, 0)))",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: local slot not waited for in combine",
        _COMBINE,
        "what.who, n));",
        "what.who, 0));",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a chunk summed before the last rank's local chunk has come",
        _COMBINE,
        _EACH_CHUNK,
        _EACH_CHUNK.replace("d < me_", "d + 1 < me_"),
        "fast",
        *TWO_HOPS,
    ),
    Mutant(
        "two hops: local chunks given back before the forwarder has summed",
        _COMBINE,
        (
            (_GIVE_BACK, ""),
            (_SUM_CHUNK, "        if (threadIdx.x == 0) {\n" + _GIVE_BACK + "        }\n" + _SUM_CHUNK),
        ),
        "exact",
        TWO_HOPS,
    ),
    silent(
        "two hops: rows of a sum listed by lanes that do not meet",
        _COMBINE,
        "            __syncwarp();  // the list is complete\n",
        "",
        *TWO_HOPS,
    ),
    silent(
        "two hops: rows of a sum given back, or listed anew, while lanes read",
        _COMBINE,
        "            __syncwarp();  // the list has been read\n",
        "",
        *TWO_HOPS,
    ),
    one(
        "two hops: a producer has the place and the word of the owner",
        _COMBINE,
        "const u32 stream = Place::stream(owner / me_.per_node, me_.local, me_.per_node);",
        "const u32 stream = owner;",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a chunk's rows begin one node row too late",
        _COMBINE,
        "static_cast<u32>(sources[row].node_row) < node_row;",
        "static_cast<u32>(sources[row].node_row) <= node_row;",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a forwarder sends without a last look",
        _COMBINE,
        "        if (!broadcast(device::lane() != 0 || op_.looks_clear())) return;\n",
        "",
        "exact",
        "two hops failing",
    ),
    one(
        "two hops: read given before all blocks have read",
        _COMBINE,
        "if (op.last_to_finish()) end_combine(args, op, me, tables);",
        "if (op.last_to_finish(), blockIdx.x == 0) end_combine(args, op, me, tables);",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: read not waited for",
        _COMBINE,
        "        if (publishes(d)) op.wait_signal(Phase::kRead, wire::kRead, me.near(d), 1);\n",
        "",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: offer of a combine not consumed",
        _COMBINE,
        "        if (me.has(d)) op.consume(wire::kOffer, me.near(d), 1);\n",
        "",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows counted in a slot are not forgotten",
        _COMBINE,
        "            if (role == 0) op.slots_read()[node * wire::kSlots + slot] = 0;\n",
        "",
        "fast",
        *TWO_HOPS,
    ),
    # --- kernels/two_hops/own_sums.h
    one(
        "two hops: slot given back when the first of its rows has been summed",
        _OWN_SUMS,
        "(device::fetch_add_acq_rel<Scope::kDevice>(counter, 1u) + 1) % layout.chunk_rows != 0)",
        "(device::fetch_add_acq_rel<Scope::kDevice>(counter, 1u) + 1) % layout.chunk_rows != 1)",
        "fast",
        *TWO_HOPS,
    ),
    silent(
        "two hops: rows of a slot counted without order",
        _OWN_SUMS,
        "device::fetch_add_acq_rel<Scope::kDevice>(counter, 1u)",
        "device::fetch_add_relaxed<Scope::kDevice>(counter, 1u)",
        *TWO_HOPS,
    ),
    silent(
        "two hops: row counted while lanes read it",
        _OWN_SUMS,
        "            __syncwarp();  // all lanes have read the rows before any of them is given back\n",
        "",
        *TWO_HOPS,
    ),
    one(
        "two hops: chunk not waited for behind the first in its slot",
        _OWN_SUMS,
        "chunk / wire::kSlots + 1);",
        "1);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: owner does not wait for its node's local chunks",
        _OWN_SUMS,
        "for (u32 d = 0; staged && d < me.per_node; ++d) {",
        "for (u32 d = me.per_node; staged && d < me.per_node; ++d) {",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a window wider than its chunks have slots",
        _OWN_SUMS,
        "most = (slots - 1) * args.layout.chunk_rows + 1;",
        "most = (slots + 1) * args.layout.chunk_rows + 1;",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a window waits for the first of its chunks alone",
        _OWN_SUMS,
        "chunk_of(first + count - 1) - chunk_of(first) + 1};",
        "1};",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a window waits for the chunks of the one before",
        _COMBINE,
        "if (chunk + gridDim.x < own_.windows()) own_.find_needed(chunk + gridDim.x);",
        "",
        "fast",
        *TWO_HOPS,
    ),
    Mutant(
        "two hops: the own node's rows are summed first",
        _OWN_SUMS,
        (
            ("before = " + _NODES_BELOW, "before = 0;"),
            (_NODES_ABOVE, "end = list_nodes(token, 0, me.node, end);\n" + _NODES_ABOVE),
        ),
        "fast",
        TWO_HOPS,
    ),
    one("two hops: sums are rounded before the biases", _OWN_SUMS, _BIASED, _ROUNDED, "fast", *TWO_HOPS),
    one(
        "two hops: a choice's weight also from ranks that do not hold it",
        _GATHER,
        "if (!held || i < begin || i >= end) sum += into.weights[i][k];",
        "sum += into.weights[i][k];",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: holders of choices as in the first node",
        _FORWARD,
        "static_cast<i64>(me.near(0)) * args.experts_per_rank;",
        "0;",
        "fast",
        *TWO_HOPS,
    ),
)
