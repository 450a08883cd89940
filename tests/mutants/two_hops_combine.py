"""Bugs of combine in two hops."""

from __future__ import annotations

from mutants.mutant import TWO_HOPS, Mutant, one, silent

_FORWARD = "kernels/two_hops/forward.h"
_GATHER = "kernels/two_hops/gather.h"
_COMBINE = "kernels/two_hops/combine.h"
_OWN_SUMS = "kernels/two_hops/own_sums.h"
_EACH_CHUNK = """for (u32 d = 0; d < me.per_node; ++d) {
            if (!rows.sends(d)) continue;
            const Pending chunk"""
_GIVE_BACK = "if (device::lane() == 0) rows.give_back(chunk, layout.chunks(node_rows), way.owner);\n"
_GIVE_BACK_FIRST = """if (device::lane() == 0) {
            rows.give_back(chunk, args.layout.chunks(tables.streams[line].forwarded), me.origin(line));
        }
"""
_SUM_CHUNK = "if (!sum_chunk(line, chunk)) return;\n"
_NODES_BELOW = "list_nodes(token, 0, me.node, 0);"
_NODES_ABOVE = "const u32 count = list_nodes(token, me.node + 1, args.layout.nodes, end);"
_BIASED = """args.combined_x + offset, rows.into, count,
                 args.bias[0]"""
_ROUNDED = """args.combined_x + offset, rows.into, count, nullptr, nullptr);
        __syncwarp();
        if (device::lane() == 0) rows.into.x[0] = args.combined_x + offset;
        __syncwarp();
        sum_rows(shape, args.combined_x + offset, rows.into, 1,
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
        "wire::kNext + slot, owner, n);",
        "wire::kNext + slot, owner, 0);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: local slot not waited for in combine",
        _COMBINE,
        "local_word(wire::kStreamNext, 0, local), owner, n);",
        "local_word(wire::kStreamNext, 0, local), owner, 0);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a chunk summed before the last rank's local chunk has come",
        _COMBINE,
        _EACH_CHUNK,
        _EACH_CHUNK.replace("d < me", "d + 1 < me"),
        "fast",
        *TWO_HOPS,
    ),
    Mutant(
        "two hops: local chunks given back before the forwarder has summed",
        _COMBINE,
        (("        " + _GIVE_BACK, ""), (_SUM_CHUNK, _GIVE_BACK_FIRST + _SUM_CHUNK)),
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
    silent(
        "two hops: local chunk signalled before all lanes have stored it in combine",
        _COMBINE,
        "        __syncwarp();  // all lanes' stores into the forwarder's slot come before lane 0's release\n",
        "",
        *TWO_HOPS,
    ),
    one(
        "two hops: a producer has the place and the word of the owner",
        _COMBINE,
        "const u32 stream = Place::stream(owner / me.per_node, me.local, me.per_node);",
        "const u32 stream = owner;",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a chunk's rows begin one node row too late",
        _COMBINE,
        "if (static_cast<u32>(args.source[middle].node_row) < node_row)",
        "if (static_cast<u32>(args.source[middle].node_row) <= node_row)",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a forwarder sends without a last look",
        _COMBINE,
        "        if (!broadcast(device::lane() != 0 || op.looks_clear())) return;\n",
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
        "from, chunk / wire::kSlots + 1))",
        "from, 1))",
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
        "two hops: tokens summed from the last one",
        _OWN_SUMS,
        "for (u32 token = worker; token < args.tokens; token += workers) {",
        "for (u32 token = args.tokens - 1 - worker; token < args.tokens; token -= workers) {",
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
