"""Bugs of low-latency mode."""

from __future__ import annotations

from mutants.mutant import LOW_LATENCY, Mutant, one, silent

_OPERATION = "kernels/common/operation.h"
_SEND = "kernels/low_latency/dispatch_send.h"
_RECEIVE = "kernels/low_latency/dispatch_receive.h"
_COMBINE = "kernels/low_latency/combine.h"
_LOGFMT_ROWS = "kernels/low_latency/logfmt_rows.h"
_LOGFMT = "device/logfmt.h"
_MAPPED = ("low latency", "low latency mixed")
_PUTS = ("low latency weak", "low latency ibgda")

_SHARE = "fabric::peer::signal(peers(), to, word_at_peer(kind), share);"
_SHARES_JOINED = "    if (!op.sync_block()) return false;  // the block's stores come before its share of each signal\n"
_ROWS_JOINED = "    if (!op.sync_block()) return false;  // all warps' rows come before the first one's put\n"
_EMPTY_PUT = "op.put_signal(layout.forwarder(node, op.rank()), wire::kChunk + part, &piece, rows != 0 ? 1 : 0);"
_COUNTED = "    for (u32 token = threadIdx.x; token < args.tokens; token += blockDim.x) {\n"
_LAST = "if (!op.last_warp_to_finish()) return;"
_FIRST = "if (op.last_warp_to_finish(), blockIdx.x != 0 || device::warp() != 0) return;"
_READ = "if (results[r].published != nullptr) op.signal(r, wire::kRead);"
_SUMS = (
    "    for (u32 task = blockIdx.x * device::warps() + device::warp(); task < args.tokens * parts; task += warps) {\n"
)
_EARLY_READ = "    for (u32 r = threadIdx.x; blockIdx.x == 0 && r < ranks; r += blockDim.x) {\n" + _READ + "\n}\n"

MUTANTS: tuple[Mutant, ...] = (
    # --- kernels/common/operation.h
    one(
        "low latency: shares of a signal that are no unit together",
        _OPERATION,
        "blockIdx.x == 0 ? wire::kUnit - u64{each} * (gridDim.x - 1) : each;",
        "each;",
        "fast",
        "low latency",
    ),
    silent(
        "low latency: relaxed share of a signal",
        _OPERATION,
        _SHARE,
        "device::add_relaxed<Scope::kSystem>("
        "reinterpret_cast<u64*>(peers().base[to] + word_at_peer(kind).offset), share);",
        *_MAPPED,
    ),
    silent(
        "low latency: relaxed arrival of a routing",
        _OPERATION,
        "return device::load_acquire<Scope::kSystem>(word(kind, source)) >= target(kind, source, puts);",
        "return device::load_relaxed<Scope::kSystem>(word(kind, source)) >= target(kind, source, puts);",
        *LOW_LATENCY,
    ),
    one(
        "low latency: region used before it is free",
        _OPERATION,
        "goes_on = (free || !counts) && goes_on;",
        "goes_on = (free || counts) && goes_on;",
        "exact",
        *LOW_LATENCY,
        "one region",
    ),
    one(
        "low latency: number advanced by the first block",
        _OPERATION,
        "if (failed() || !is_last_at(kSent)) return false;",
        "if (failed() || (is_last_at(kSent), blockIdx.x != 0)) return false;",
        "exact",
        *LOW_LATENCY,
        "peer",
    ),
    # --- kernels/low_latency/dispatch_send.h
    silent(
        "low latency: routing signalled before all threads have stored it",
        _SEND,
        "    if (!op.sync_block()) return false;  // all threads' stores come before any warp's release or post\n",
        "",
        *_MAPPED,
    ),
    silent(
        "low latency: counts sent before all threads have counted",
        _SEND,
        "    if (!op.sync_block()) return false;  // the counts are complete\n",
        "",
        *LOW_LATENCY,
    ),
    silent(
        "low latency: counted before all counts are clear",
        _SEND,
        _COUNTED,
        "    clear_counts(counts, experts);\n" + _COUNTED,
        *LOW_LATENCY,
    ),
    one("low latency: share given before the block has stored", _SEND, _SHARES_JOINED, "", "exact", *_MAPPED),
    one("low latency: rows put before all warps have written", _SEND, _ROWS_JOINED, "", "exact", *_PUTS),
    one(
        "low latency: put without rows left out",
        _SEND,
        _EMPTY_PUT,
        "if (rows != 0) " + _EMPTY_PUT,
        "fast",
        *_PUTS,
    ),
    one(
        "low latency: results begin one too late",
        _SEND,
        "e < begin; e += device::kWarpSize) before += counts[e];",
        "e <= begin; e += device::kWarpSize) before += counts[e];",
        "fast",
        *_PUTS,
    ),
    one(
        "low latency: expert named twice counted twice",
        _SEND,
        "const u32 id = ids.chosen(k, 0, experts);",
        "const u32 id = given.id(token, k);",
        "fast",
        "low latency",
    ),
    # --- kernels/low_latency/unit.h
    one(
        "low latency: expert named twice gets two rows",
        "kernels/low_latency/unit.h",
        "            counts &= ids_[other] != wanted;\n",
        "",
        "fast",
        "low latency",
    ),
    one(
        "low latency: expert named twice gets two results",
        "kernels/low_latency/unit.h",
        "wanted - begin < count && first_of(token, k, wanted) == k ?",
        "wanted - begin < count ?",
        "fast",
        *_PUTS,
    ),
    # --- kernels/low_latency/dispatch_receive.h
    one(
        "low latency: rows not waited for",
        _RECEIVE,
        "here = await_rows(args, op, source, part, timed);",
        "here = part == wanted;",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: the first put's signal for all",
        _RECEIVE,
        "wire::kChunk : wire::kStreamChunk) + part;",
        "wire::kChunk : wire::kStreamChunk);",
        "exact",
        *_PUTS,
    ),
    silent(
        "low latency: starts found before all lanes have taken their routings",
        _RECEIVE,
        "            __syncwarp();  // the sources have been stored\n",
        "",
        *LOW_LATENCY,
    ),
    one(
        "low latency: one note of the routings for all rounds",
        _RECEIVE,
        "scratch.known + round % 2;",
        "scratch.known;",
        "tsan",
        *LOW_LATENCY,
    ),
    one(
        "low latency: routings of one warp's used by others before it has them",
        _RECEIVE,
        "        goes_on = op.sync_block();\n",
        "",
        "exact",
        *LOW_LATENCY,
    ),
    one(
        "low latency: unit without those before it",
        _RECEIVE,
        "            at += static_cast<u32>(__popc(window.marks[e * kWindowUnits + unit]));\n",
        "",
        "fast",
        "low latency",
    ),
    one(
        "low latency: window without those before it",
        _RECEIVE,
        "u32 at = window.first == 0 ? scratch.starts[source * experts + e] : offsets[kWindowUnits];",
        "u32 at = scratch.starts[source * experts + e];",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: a block's share without the remainder",
        _RECEIVE,
        "begin_ + each + (blockIdx.x < rest ? 1 : 0)",
        "begin_ + each",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: marks of a window but one left",
        _RECEIVE,
        "            next.marks[e * kWindowUnits + unit] = 0;\n",
        "",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: marks used before all are set",
        _RECEIVE,
        "if (!op.sync_block()) return false;  // the marks are set",
        "// the marks are set",
        "exact",
        *LOW_LATENCY,
    ),
    one(
        "low latency: places found before all offsets are complete",
        _RECEIVE,
        "return op.sync_block();  // the offsets",
        "return true;  // the offsets",
        "exact",
        *LOW_LATENCY,
    ),
    one(
        "low latency: one window after another in the same memory",
        "kernels/low_latency/dispatch_args.h",
        "const u32 turn = number % 2;",
        "const u32 turn = number % 1;",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: rows of a put without its windows before",
        _RECEIVE,
        "(began_before ? earlier_rows : 0)",
        "0",
        "fast",
        *_PUTS,
    ),
    one(
        "low latency: results without those of windows before",
        _RECEIVE,
        "place_in(window, e, at) - scratch.starts[source * experts + e];",
        "place_in(window, e, at) - scratch.offsets[e * kOffsets];",
        "fast",
        *_PUTS,
    ),
    one(
        "low latency: rows of a later put behind those of all before",
        _RECEIVE,
        "(began_before ? 0 : count_below(window.in_node, first - window.first))",
        "0",
        "fast",
        *_PUTS,
    ),
    silent(
        "low latency: list of targets used before all lanes have stored it",
        _RECEIVE,
        "        __syncwarp();  // the list is complete\n",
        "",
        *LOW_LATENCY,
    ),
    silent(
        "low latency: list of targets written over while lanes read",
        _RECEIVE,
        "        __syncwarp();  // the list has been read\n",
        "",
        *LOW_LATENCY,
    ),
    one(
        "low latency: slots of results without those of lower ranks",
        _SEND,
        "args.layout.max_results()) + warp_total(before);",
        "args.layout.max_results());",
        "fast",
        *_PUTS,
    ),
    one(
        "low latency: result of an expert named again expected elsewhere",
        _SEND,
        "token * topk + given.first(token, choice % topk));",
        "choice);",
        "fast",
        "low latency",
    ),
    silent(
        "low latency: slots of first mentions read by lanes that do not meet",
        _SEND,
        "    __syncwarp();  // the slots of experts' first mentions have been stored\n",
        "",
        *_PUTS,
    ),
    one(
        "low latency: routing not consumed",
        _RECEIVE,
        "        op.consume(wire::kNotify, r, 1);\n",
        "",
        "fast",
        *LOW_LATENCY,
    ),
    one("low latency: rows given back before all blocks have read", _RECEIVE, _LAST, _FIRST, "tsan", *LOW_LATENCY),
    # --- kernels/low_latency/combine.h
    one("low latency: results given back before all blocks have read", _COMBINE, _LAST, _FIRST, "tsan", *LOW_LATENCY),
    one(
        "low latency: a warp skips results of later experts",
        _COMBINE,
        "u32 row = (warp + warps - before % warps) % warps;",
        "u32 row = warp + before % warps;",
        "fast",
        "low latency",
    ),
    one(
        "low latency: a result stored where the next one goes",
        _COMBINE,
        "fabric::address(op.peers(), of, region + layout.slot(to));",
        "fabric::address(op.peers(), of, region + layout.slot(slot));",
        "fast",
        "low latency",
    ),
    one(
        "low latency: several warps sum the same part of a token",
        _COMBINE,
        "task / parts, task % parts, parts);",
        "task / parts, 0, parts);",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: several warps write the same part of a row",
        _SEND,
        "token, task % parts, parts);",
        "token, 0, parts);",
        "fast",
        *LOW_LATENCY,
    ),
    silent(
        "low latency: rows of a sum written over while lanes read",
        _COMBINE,
        "    __syncwarp();  // the list has been read\n",
        "",
        *LOW_LATENCY,
    ),
    one(
        "low latency: results not waited for",
        _COMBINE,
        "op.wait_signal(is_forwarded ? Phase::kForwarded : Phase::kResults, result_word(op, r), r, 1);",
        "true;",
        "fast",
        *LOW_LATENCY,
    ),
    one("low latency: share given before the block's results", _COMBINE, _SHARES_JOINED, "", "exact", *_MAPPED),
    one("low latency: results put before all warps have gathered", _COMBINE, _ROWS_JOINED, "", "exact", *_PUTS),
    one("low latency: published rows never read, says their reader", _COMBINE, _READ, "", "fast", "low latency"),
    Mutant(
        "low latency: read given before the sum",
        _COMBINE,
        (("        " + _READ, ""), (_SUMS, _EARLY_READ + _SUMS)),
        "exact",
        _MAPPED,
    ),
    one(
        "low latency: read not waited for",
        _COMBINE,
        "op.wait_signal(Phase::kRead, wire::kRead, r, 1)) op.consume",
        "r != ~0u) op.consume",
        "exact",
        *_MAPPED,
    ),
    silent(
        "low latency: rows of a sum listed by lanes that do not meet",
        _COMBINE,
        "    __syncwarp();  // the list is complete\n",
        "",
        *LOW_LATENCY,
    ),
    one(
        "low latency: weights in the order of what came",
        _COMBINE,
        "row != nullptr ? args.topk_weights[choice] : 0);",
        "row != nullptr ? args.topk_weights[static_cast<u64>(token) * topk + list.count] : 0);",
        "fast",
        "low latency",
    ),
    one(
        "low latency: choices left out are summed",
        _COMBINE,
        "    if (layout.weighted == 0 && args.topk_idx.get(choice) < 0) return nullptr;\n",
        "",
        "fast",
        "low latency",
    ),
    # --- results that travel as LogFMT
    one(
        "low latency: rests left out of a put that has some",
        _COMBINE,
        "any_kept(kept) ? 3 : 2",
        "2",
        "fast",
        *_PUTS,
    ),
    one(
        "low latency: one note of what was kept for all puts",
        _COMBINE,
        "kept + puts++ % 2 * device::warps()",
        "kept",
        "tsan",
        *_PUTS,
    ),
    one(
        "low latency: the first warp's note of what was kept for all",
        _LOGFMT_ROWS,
        "any = any || kept[warp] != 0;",
        "any = any || kept[0] != 0;",
        "exact",
        *_PUTS,
    ),
    one(
        "low latency: the first slot's rest for all",
        _LOGFMT,
        "return rests + static_cast<u64>(row) * rest_bytes;",
        "return rests;",
        "fast",
        *LOW_LATENCY,
    ),
    one(
        "low latency: zeros cost a group its range",
        _LOGFMT,
        "magnitude != 0 && magnitude < least ? magnitude",
        "magnitude < least ? magnitude",
        "fast",
        "low latency",
    ),
    one(
        "low latency: what has no code gets one",
        _LOGFMT,
        "return magnitude < least ? 0 : nearest + 1;",
        "return nearest + 1;",
        "fast",
        "low latency",
    ),
    # --- device/fp8_scales.h, host
    one(
        "low latency: exponent of a scale one too low",
        "device/fp8_scales.h",
        "exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);",
        "exponent = bits >> 23;",
        "fast",
        "low latency",
    ),
    one(
        "low latency: a hook sends again",
        "host/modes/low_latency/calls.cpp",
        "launch<Kernel>(runtime, call, args, kReceive, blocks);",
        "launch<Kernel>(runtime, call, args, kSend | kReceive, blocks);",
        "fast",
        "low latency",
    ),
)
