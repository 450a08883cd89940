"""Bugs of normal mode in two hops."""

from __future__ import annotations

from mutants.mutant import TWO_HOPS, Mutant, one, silent

_OPERATION = "kernels/common/operation.h"
_POLLING = "kernels/common/polling.h"
_WIRE = "wire/two_hops.h"
_FORWARDERS = "wire/forwarders.h"
_RECOVERY = "host/session/recovery.cpp"
_NOTIFY = "kernels/two_hops/notify.h"
_NUMBER = "kernels/two_hops/number.h"
_PLAN = "kernels/two_hops/plan.h"
_OFFERS = "kernels/two_hops/offers.h"
_DISPATCH_ARGS = "kernels/two_hops/dispatch_args.h"
_DISPATCH = "kernels/two_hops/dispatch.h"
_FORWARD = "kernels/two_hops/forward.h"
_GATHER = "kernels/two_hops/gather.h"
_COMBINE = "kernels/two_hops/combine.h"
_OWN_SUMS = "kernels/two_hops/own_sums.h"
_RAILS = ("two hops weak", "two hops ibgda")
_WITHOUT, _CROSSED = "two hops without", "two hops crossed"

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
    one(
        "two hops: a call takes its number again with its second kernel",
        "kernels/two_hops/dispatch.h",
        "args.first != 0 ? op.enter_and_begin(",
        "args.tokens != 0 ? op.enter_and_begin(",
        "fast",
        "two hops peer",
        "two hops weak",
    ),
    # --- free (P4)
    one(
        "two hops: `free` of other nodes' ranks not waited for",
        _OPERATION,
        "if (!hears(r) || masked(r)) continue;\n            wait_word(",
        "if (!hears(r) || masked(r) || !mapped(r)) continue;\n            wait_word(",
        "exact",
        *_RAILS,
    ),
    one(
        "two hops: region given back to the ranks of the own node alone",
        _OPERATION,
        "if (!hears(r) || masked(r)) continue;\n            fabric::signal(",
        "if (!hears(r) || masked(r) || !mapped(r)) continue;\n            fabric::signal(",
        "fast",
        *_RAILS,
    ),
    one(
        "two hops: region given back before the chunks of other nodes' empty streams",
        _COMBINE,
        "            op.wait_signal(Phase::kChunk, wire::kChunk, me.forwarder(node), 1);\n",
        "",
        "fast",
        "two hops ibgda",
    ),
    # --- kernels/two_hops/number.h, plan.h, notify.h
    one(
        "two hops: a mark without the rows of its own round",
        _NUMBER,
        "static_cast<i32>(rows[d] + __popc(mask & before_mark));",
        "static_cast<i32>(rows[d]);",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows since the last mark left out",
        _PLAN,
        "rows += is_for(before, local);",
        "rows += 0;",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: every lane counts the rows of every rank",
        _NUMBER,
        "if (lane != d % device::kWarpSize) continue;",
        "",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: a forwarder tells all ranks its own rows",
        _NOTIFY,
        "rail_message(args, op, me, line) + wire::kNotifyCounts, d),",
        "rail_message(args, op, me, line) + wire::kNotifyCounts, me.local),",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows of an expert without those of other nodes",
        _NOTIFY,
        "            if (origin == op.rank() || origin == wire::kNoRank) continue;\n",
        "            if (origin != op.ranks()) continue;\n",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: counts signalled before the block has stored them",
        _NOTIFY,
        "    if (!op.sync_block()) return false;  // the whole block's stores come before each thread's release\n",
        "",
        "tsan",
        *TWO_HOPS,
    ),
    one(
        "two hops: running sums made before all rows are there",
        _NOTIFY,
        "if (!op.sync_block() || device::warp() != 0) return;",
        "if (device::warp() != 0) return;",
        "tsan",
        "two hops ibgda",
    ),
    one(
        "two hops: counts of a forwarder not consumed",
        _NOTIFY,
        "        op.consume(wire::kNotify, forwarder, 1);\n",
        "",
        "fast",
        *TWO_HOPS,
    ),
    silent(
        "two hops: relaxed counts",
        _NOTIFY,
        "device::store_release<Scope::kSystem>(&args.call.outcome->counts_ready, 1u);",
        "device::store_relaxed<Scope::kSystem>(&args.call.outcome->counts_ready, 1u);",
        *TWO_HOPS,
    ),
    # --- kernels/two_hops/offers.h, wire/two_hops.h
    one(
        "two hops: offer taken before it has come",
        _OFFERS,
        "if (!op.wait_signal(Phase::kOffer, wire::kOffer, r, 1)) return false;",
        "",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a place for one local chunk of each stream",
        _WIRE,
        "return local_chunks.at((role * ranks() + stream) * kLocalSlots + slot);",
        "return local_chunks.at((role * ranks() + stream) * kLocalSlots);",
        "fast",
        *TWO_HOPS,
    ),
    # --- kernels/two_hops/dispatch_args.h, dispatch.h
    silent(
        "two hops: chunk signalled before all lanes have stored it",
        _DISPATCH_ARGS,
        "        __syncwarp();  // all lanes' stores into the peer's slot come before lane 0's release\n",
        "",
        "two hops peer",
    ),
    one(
        "two hops: slot of another node's rank not waited for",
        _DISPATCH,
        "wire::kNext + entry % wire::kSlots, to, n);",
        "wire::kNext + entry % wire::kSlots, to, 0);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: firsts of the stream's begin in every chunk",
        _DISPATCH,
        "firsts[d] = rows != 0 ? rows_of.first_row(d) : 0;",
        "firsts[d] = 0;",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: sets of the stream's first node rows in every chunk",
        _DISPATCH,
        "sets[i] = rows_of.sent.set(first)[i];",
        "sets[i] = rows_of.sent.set(0)[i];",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: local slot not waited for in dispatch",
        _DISPATCH,
        "Place::stream(node, local, me.per_node), chunk / wire::kLocalSlots);",
        "Place::stream(node, local, me.per_node), 0);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a placed chunk's slot given back for its origin",
        _DISPATCH,
        "Place::stream(origin / me.per_node, me.local, me.per_node));\n        }\n    }\n};",
        "origin);\n        }\n    }\n};",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: slot given back before copies from it have been made",
        _DISPATCH,
        "        copies.finish();\n        if (chunk",
        "        if (chunk",
        "exact",
        *TWO_HOPS,
    ),
    silent(
        "two hops: local slot given back while lanes read",
        _DISPATCH,
        "        __syncwarp();  // all lanes have read the slot before lane 0 releases it. Litmus: slot_given_back\n",
        "",
        *TWO_HOPS,
    ),
    one(
        "two hops: outputs used before all warps have found them",
        _DISPATCH,
        "return op.sync_group(threads);",
        "return !op.failed();",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: data signalled before all blocks have stored",
        _DISPATCH,
        "if (op.last_to_finish()) end_dispatch(args, op, me, tables);",
        "if (op.last_to_finish(), blockIdx.x == 0) end_dispatch(args, op, me, tables);",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: data not waited for",
        _DISPATCH,
        "if (stores(f)) op.wait_signal(Phase::kData, wire::kData, me.near(f), 1);",
        "",
        "exact",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows of the output that no rank sends are left as they are",
        "kernels/normal/rows.h",
        "        idx.set(i, -1);\n",
        "",
        "fast",
        *TWO_HOPS,
    ),
    # --- kernels/two_hops/forward.h
    one(
        "two hops: table without the streams before",
        _FORWARD,
        "args.plan.table[u64{tables.streams[line].begin + first + i} * per_node + d] =",
        "args.plan.table[u64{first + i} * per_node + d] =",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a rank that a node row is not for has a row in the table",
        _FORWARD,
        "goes ? static_cast<i32>(index) : -1;",
        "static_cast<i32>(index);",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: rows of a node row listed by lanes that do not meet",
        _FORWARD,
        "            __syncwarp();  // the list is complete\n",
        "",
        "exact",
        *TWO_HOPS,
    ),
    silent(
        "two hops: list of a node row's rows written over while lanes read",
        _FORWARD,
        "            __syncwarp();  // the list has been read\n",
        "",
        *TWO_HOPS,
    ),
    silent(
        "two hops: local chunk signalled before all lanes have stored it in dispatch",
        _FORWARD,
        "        __syncwarp();  // all lanes' stores into the receiver's slot come before lane 0's release\n",
        "",
        *TWO_HOPS,
    ),
    one(
        "two hops: a forwarder signals in its own name",
        _FORWARD,
        "op.signal_for(me.near(local), local_word(wire::kStreamChunk, 0, chunk), origin);",
        "op.signal(me.near(local), local_word(wire::kStreamChunk, 0, chunk));",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: no local chunk where it has no rows",
        _FORWARD,
        "        const u32 first = count != 0 ? rows_of.first_row(local) : 0;\n",
        "        if (count == 0) return;\n        const u32 first = rows_of.first_row(local);\n",
        "fast",
        *TWO_HOPS,
    ),
    # --- kernels/common/polling.h
    one(
        "two hops: a warp blocks on one of the streams that it serves",
        _POLLING,
        "op.wait(pending, ready);",
        "op.wait(pending, [&] { return pending.over(); });",
        "fast",
        *TWO_HOPS,
    ),
    one(
        "two hops: a timeout names what held a warp up at first",
        _POLLING,
        "return ready() || op.wait(pending, ready);",
        "if (ready()) return true;\n    const Pending first = pending;\n    return op.wait(first, ready);",
        "exact",
        "barriers",
    ),
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
    # --- ranks that are left out (P17)
    one(
        "two hops without ranks: a choice that one of them holds has no weight, and is refused",
        _GATHER,
        "        if (!me.has(d)) return 0.0f;\n",
        "",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: the same words for local chunks of both roles",
        _PLAN,
        "kind + role * wire::kLocalSlots + chunk % wire::kLocalSlots;",
        "kind + chunk % wire::kLocalSlots;",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: local chunks take the words of chunks between nodes",
        _PLAN,
        "kind + role * wire::kLocalSlots + chunk % wire::kLocalSlots;",
        "kind - wire::kStreamChunk + wire::kChunk + role * wire::kLocalSlots + chunk % wire::kLocalSlots;",
        "fast",
        _CROSSED,
    ),
    one(
        "two hops without ranks: the same slots for local chunks of both roles",
        _WIRE,
        "return local_chunks.at((role * ranks() + stream) * kLocalSlots + slot);",
        "return local_chunks.at(stream * kLocalSlots + slot);",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: the same slots for streams of both roles",
        _WIRE,
        "return role * others() + place(node, own);",
        "return place(node, own);",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: a rank that is left out is waited for",
        _PLAN,
        "return mask.has(rank) ? wire::kNoRank : rank;",
        "return rank;",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: no queue pairs to ranks that take others' places",
        _RECOVERY,
        "const std::vector<fabric::Route> reached = routes(mask);",
        "const std::vector<fabric::Route> reached = routes({});",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: offers of the first role's rows for both",
        _OFFERS,
        "const u32 origin = theirs.origin(line);",
        "const u32 origin = theirs.origin(layout.node_of(line));",
        "fast",
        _WITHOUT,
    ),
    one(
        "two hops without ranks: a sender takes a substitute's first place",
        _PLAN,
        "return forwarder % per_node == origin % per_node ? 0 : 1;",
        "return 0 * (forwarder + origin);",
        "fast",
        _WITHOUT,
    ),
)
