"""Bugs of the paths that puts take: loads and stores, and queue pairs."""

from __future__ import annotations

from mutants.mutant import Mutant, one, silent

_RECORD = "device::store_fenced<Scope::kSystem>(here.record, mlx5::send_counter(filled));"
_DOORBELL = "device::store_fenced<Scope::kSystem>(here.doorbell, mlx5::doorbell(here.number, filled));"
_PEER_SIGNAL = "device::add_release<device::Scope::kSystem>("
_WRITE = "write_request(requests, index++, net.heap + source, heap + target, keys, bytes);"
_ADD = "add_request(requests, qp, index, heap + word.offset, word_key);\n    // In order"
_NOTHING = "requests.at(index).atomic = mlx5::fetch_add(0);"
_ONLY_SIGNAL = "[&] { Completion none{}; return post(Peers{}, net, waiter, none, to, nullptr, 0, word); }()"
_KNOWN = "const u64 known = device::load_acquire<Scope::kDevice>(qp.completed);\n    for"
_LOOK = "begin = device::load_relaxed<Scope::kDevice>(reserved);\n    " + _KNOWN
_ADDED = "device::fetch_add_relaxed<Scope::kDevice>(reserved, static_cast<u64>(count));"
_SWAP = (
    "const u64 found = device::cas_relaxed<Scope::kDevice>(reserved, begin, end);\n"
    "        if (found == begin) return true;\n        begin = found;"
)
_OUTLAST = "waiter.outlast(wire::Phase::kPost, static_cast<i32>(to), filled, begin, our_turn)"
_WAIT = _OUTLAST.replace("outlast", "wait")
_POSTED = "return true;\n}\n\n// The block, after all posting"

MUTANTS: tuple[Mutant, ...] = (
    # --- What the software NIC may do by default
    one(
        "ibgda: atomics pass data",
        "host/network/nic_options.h",
        "bool atomics_pass = false;",
        "bool atomics_pass = true;",
        "fast",
        "ibgda",
        "posters",
    ),
    # --- fabric/peer.h, weak.h, fabric.h
    silent(
        "peer: relaxed signal", "fabric/peer.h", _PEER_SIGNAL, "device::add_relaxed<device::Scope::kSystem>(", "peer"
    ),
    one(
        "peer: signal at device scope",
        "fabric/peer.h",
        _PEER_SIGNAL,
        "device::add_release<device::Scope::kDevice>(",
        "exact",
        "peer",
    ),
    one(
        "peer: half a unit",
        "fabric/peer.h",
        "u64 amount = wire::kUnit)",
        "u64 amount = wire::kUnit / 2)",
        "fast",
        "peer",
    ),
    silent(
        "weak: command released by a relaxed store",
        "fabric/weak.h",
        "device::store_release<device::Scope::kSystem>(&command.ready",
        "device::store_relaxed<device::Scope::kSystem>(&command.ready",
        "weak",
    ),
    silent(
        "put: lanes' stores not joined",
        "fabric/fabric.h",
        "    __syncwarp();  // all lanes' stores into the pieces",
        "    // all lanes' stores into the pieces",
        "posters",
        "ibgda",
        "weak",
    ),
    # --- fabric/ibgda.h
    silent(
        "ibgda: relaxed doorbell record",
        "fabric/ibgda.h",
        _RECORD,
        _RECORD.replace("fenced", "relaxed"),
        "posters",
        "ibgda",
    ),
    one(
        "ibgda: doorbell record at device scope",
        "fabric/ibgda.h",
        _RECORD,
        _RECORD.replace("kSystem", "kDevice"),
        "exact",
        "posters",
    ),
    one(
        "ibgda: doorbell before its record",
        "fabric/ibgda.h",
        _RECORD,
        _DOORBELL + "\n" + _RECORD,
        "exact",
        "posters",
        "ibgda",
    ),
    one("ibgda: no doorbell record", "fabric/ibgda.h", _RECORD, "", "fast", "posters"),
    one(
        "ibgda: record in the wrong byte order",
        "fabric/ibgda.h",
        "mlx5::send_counter(filled)",
        "static_cast<u32>(filled & 0xffff)",
        "fast",
        "posters",
    ),
    one(
        "ibgda: record not cut to 16 bits",
        "wire/mlx5.h",
        "return big(static_cast<u32>(produced & 0xffff)); }",
        "return big(static_cast<u32>(produced)); }",
        "fast",
        "wrap",
    ),
    one(
        "ibgda: index one too high",
        "fabric/ibgda.h",
        "mlx5::control(mlx5::kRdmaWrite, index,",
        "mlx5::control(mlx5::kRdmaWrite, index + 1,",
        "fast",
        "posters",
    ),
    one(
        "ibgda: lost wrap-around of the ring",
        "fabric/ibgda.h",
        "blocks[index & (count - 1)]",
        "blocks[index % (count - 1)]",
        "fast",
        "posters",
    ),
    one(
        "ibgda: no back-pressure",
        "fabric/ibgda.h",
        "if (end > known + qp.blocks && !await_completed",
        "if (end > ~0ull - 1 && !await_completed",
        "exact",
        "posters",
    ),
    one(
        "ibgda: blocks taken before there is room",
        "fabric/ibgda.h",
        _LOOK,
        f"begin = {_ADDED}\n    if (begin + count <= qp.blocks ||\n"
        "        await_completed(qp, waiter, wire::Phase::kPost, begin + count - qp.blocks)) return true;\n"
        f"    if (begin != ~0ull) return false;\n    {_KNOWN}",
        "exact",
        "sharing, giving up",
    ),
    one(
        "ibgda: blocks taken wherever the count is by then",
        "fabric/ibgda.h",
        _SWAP,
        f"begin = {_ADDED}\n        return true;",
        "exact",
        "posters",
        "sharing",
    ),
    one("ibgda: a turn given up", "fabric/ibgda.h", _OUTLAST, _WAIT, "exact", "sharing, giving up"),
    one(
        "ibgda: told to give up, and nothing published",
        "fabric/ibgda.h",
        f"return {_OUTLAST};",
        f"return {_OUTLAST} && {_WAIT};",
        "exact",
        "sharing, giving up",
    ),
    one(
        "ibgda: the doorbell left to those that wait for room",
        "fabric/ibgda.h",
        "end > rung + requests.count / 4) {",
        "end > rung + requests.count) {",
        "fast",
        "sharing, doorbells",
    ),
    silent(
        "ibgda: room by a relaxed look",
        "fabric/ibgda.h",
        "u64 known = device::load_acquire<Scope::kDevice>(completed);\n    if (known >= count) return true;",
        "u64 known = device::load_relaxed<Scope::kDevice>(completed);\n    if (known >= count) return true;",
        "posters",
    ),
    one(
        "ibgda: published out of turn",
        "fabric/ibgda.h",
        "device::load_relaxed<Scope::kDevice>(filled) == begin; };",
        "true; };",
        "exact",
        "sharing",
    ),
    silent(
        "ibgda: rings for what it has not acquired",
        "fabric/ibgda.h",
        "device::load_acquire<Scope::kDevice>(here.filled);",
        "device::load_relaxed<Scope::kDevice>(here.filled);",
        "posters",
    ),
    silent(
        "ibgda: relaxed publication",
        "fabric/ibgda.h",
        "device::add_fenced<Scope::kDevice>(filled,",
        "device::add_relaxed<Scope::kDevice>(filled,",
        "posters",
    ),
    silent(
        "ibgda: relaxed completion",
        "fabric/ibgda.h",
        "device::load_acquire<Scope::kSystem>(&qp.cqe->tail);\n    // Of a request",
        "device::load_relaxed<Scope::kSystem>(&qp.cqe->tail);\n    // Of a request",
        "posters",
    ),
    one("ibgda: waits without ringing", "fabric/ibgda.h", "if (unrung()) ring(qp, 0);", "", "fast", "quiet"),
    one(
        "ibgda: the last one leaves the doorbell too",
        "fabric/ibgda.h",
        "last == end ||",
        "last == end + 1 ||",
        "fast",
        "ibgda",
    ),
    one(
        "ibgda: no completion asked for",
        "fabric/ibgda.h",
        "mlx5::kUnitsOfFetchAdd, true);",
        "mlx5::kUnitsOfFetchAdd, false);",
        "fast",
        "posters",
    ),
    Mutant(
        "ibgda: signal before data",
        "fabric/ibgda.h",
        ((_WRITE, _WRITE.replace("index++", "++index")), (_ADD, _ADD.replace("index, heap", "begin, heap"))),
        "exact",
        ("posters", "ibgda"),
    ),
    Mutant(
        "ibgda: signal on another queue pair",
        "fabric/ibgda.h",
        (
            ("word.number % net.per_peer]", "(word.number + (count == 0)) % net.per_peer]"),
            (_ADD, _ADD.replace("// In", "if (count != 0) " + _NOTHING + "\n    // In")),
            (_POSTED, _POSTED.replace("true", f"count == 0 || {_ONLY_SIGNAL}")),
        ),
        "exact",
        ("posters", "ibgda"),
    ),
    one(
        "ibgda: one queue pair for all words",
        "fabric/ibgda.h",
        "word.number % net.per_peer]",
        "0]",
        "fast",
        "ibgda",
    ),
    one(
        "ibgda: words of a source on one queue pair",
        "kernels/common/operation.h",
        "region() * wire::kOfRanks + kind};",
        "rank()};",
        "fast",
        "ibgda",
    ),
    one(
        "ibgda: a signal more",
        "fabric/fabric.h",
        "return post(peers, state, waiter, completion, to, pieces, count, word);",
        "return post(peers, state, waiter, completion, to, nullptr, 0, word) &&"
        " post(peers, state, waiter, completion, to, pieces, count, word);",
        "exact",
        "posters",
    ),
    one(
        "ibgda: keys of another rank",
        "fabric/ibgda.h",
        "u64{qp.peer} * net.chunks +",
        "0 * net.chunks +",
        "fast",
        "posters",
        "ibgda",
    ),
    one(
        "ibgda: request beyond the remote key",
        "fabric/ibgda.h",
        "return min(bytes, rest_of_chunk(net, piece.target + done));",
        "return bytes;",
        "fast",
        "keys, offset",
    ),
    one(
        "ibgda: keys of the first request for all",
        "fabric/ibgda.h",
        "if ((i | done) != 0) keys = Keys::of(net, qp, source, target);\n",
        "\n",
        "fast",
        "keys, offset",
    ),
    one(
        "ibgda: keys as if heaps began with chunks",
        "fabric/ibgda.h",
        "static_cast<u32>((offset + net.key_offset) >> net.chunk_log2);",
        "static_cast<u32>(offset >> net.chunk_log2);",
        "fast",
        "keys, offset",
    ),
    one(
        "ibgda: requests end as if heaps began with chunks",
        "fabric/ibgda.h",
        "return chunk - ((offset + net.key_offset) & (chunk - 1));",
        "return chunk - (offset & (chunk - 1));",
        "fast",
        "keys, offset",
    ),
    one(
        "ibgda: not quiet",
        "fabric/ibgda.h",
        "if (!await_completed(qp, waiter, wire::Phase::kQuiet, filled) && !waiter.masked(qp.peer)) return false;",
        "if (filled == ~0ull) return false;",
        "exact",
        "posters",
    ),
)
