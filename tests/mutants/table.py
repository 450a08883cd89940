"""Bugs that the tests must catch, each planted alone: what is changed, and which build and scenario must notice.

The scenarios are those of tests/native/protocol. A change is a pair of texts; the first stands once in the file.
"""

from __future__ import annotations

from dataclasses import dataclass

NORMAL = ("peer", "peer rounds", "one region", "weak", "ibgda")
FAILING = ("failing", "failing rounds", "failing weak", "failing ibgda")
# In these, rows are written over while others read them, and what comes of it must not count: a race on purpose.
RACING = (*FAILING, "failing, watched")
ORDERED = ("failing, ordered", "two buffers", "two buffers weak")
REPLAYS = ("replays", "replays ibgda")
BOUNDS = ("bounds", "bounds rounds", "bounds weak", "bounds ibgda")


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Parameters
    ----------
    name
        What is wrong.
    file
        Where, below csrc/.
    changes
        Texts and their replacements.
    build
        The variant that catches it.
    scenarios
        Those in which it does, in the order of trying.
    silent
        Whether all scenarios of the fast build pass in spite of it, which is checked: only an order of memory is wrong.
    endless
        Whether it shows by never ending.
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    build: str
    scenarios: tuple[str, ...]
    silent: bool = False
    endless: bool = False


def _one(
    name: str, file: str, text: str, replacement: str, build: str, *scenarios: str, silent: bool = False
) -> Mutant:
    return Mutant(name, file, ((text, replacement),), build, scenarios, silent)


def _silent(name: str, file: str, text: str, replacement: str, *scenarios: str) -> Mutant:
    return _one(name, file, text, replacement, "tsan", *scenarios, silent=True)


_RECORD = "device::store_release<Scope::kSystem>(qp.record, mlx5::send_counter(filled));"
_DOORBELL = "device::store_release<Scope::kSystem>(qp.doorbell, mlx5::doorbell(qp.number, filled));"
_PEER_SIGNAL = "device::add_release<device::Scope::kSystem>("
_WRITE = "write_request(net, qp, index++, pieces[i].source + done, pieces[i].target + done, bytes);"
_ADD = "add_request(net, qp, index, word);\n    // In order"
_NOTHING = "block_at(qp, index).atomic = mlx5::fetch_add(0);"
_TELL = "tell(told != 0 ? told : wire::abort_word(generation_, reason, rank(), peer));"
_MARK = "device::store_release<Scope::kSystem>(&outcome_.failure.mark, wire::failure_mark(generation_, reason));"
_LOOK = "if_current(device::add_acq_rel<Scope::kSystem>(abort_word(peers().local), 0ull));"
_EXCHANGE = "device::exchange_acq_rel<Scope::kSystem>(theirs, word);"
# As over a link that is slow, which is no bug: so the peer may have looked for the last time before it is told.
_SLOWLY = "for (u32 turn = 0; turn < 150; ++turn) device::load_relaxed<Scope::kSystem>(abort_word(peers().local));\n"
_ONLY_SIGNAL = "[&] { Completion none{}; return post(Peers{}, net, waiter, none, to, nullptr, 0, word); }()"
_POSTED = "return true;\n}\n\n// The block, after all posting"

MUTANTS = (
    # --- fabric/peer.h, weak.h, fabric.h
    _silent(
        "peer: relaxed signal", "fabric/peer.h", _PEER_SIGNAL, "device::add_relaxed<device::Scope::kSystem>(", "peer"
    ),
    _one(
        "peer: signal at device scope",
        "fabric/peer.h",
        _PEER_SIGNAL,
        "device::add_release<device::Scope::kDevice>(",
        "exact",
        "peer",
    ),
    _one("peer: half a unit", "fabric/peer.h", "word.offset), amount);", "word.offset), amount / 2);", "fast", "peer"),
    _silent(
        "weak: command released by a relaxed store",
        "fabric/weak.h",
        "device::store_release<device::Scope::kSystem>(&command.ready",
        "device::store_relaxed<device::Scope::kSystem>(&command.ready",
        "weak",
    ),
    _silent(
        "put: lanes' stores not joined",
        "fabric/fabric.h",
        "    __syncwarp();  // all lanes' stores into the pieces",
        "    // all lanes' stores into the pieces",
        "posters",
        "ibgda",
        "weak",
    ),
    # --- fabric/ibgda.h
    _silent(
        "ibgda: relaxed doorbell record",
        "fabric/ibgda.h",
        _RECORD,
        _RECORD.replace("release", "relaxed"),
        "posters",
        "ibgda",
    ),
    _one(
        "ibgda: doorbell record at device scope",
        "fabric/ibgda.h",
        _RECORD,
        _RECORD.replace("kSystem", "kDevice"),
        "exact",
        "posters",
    ),
    _one(
        "ibgda: doorbell before its record",
        "fabric/ibgda.h",
        _RECORD,
        _DOORBELL + "\n" + _RECORD,
        "exact",
        "posters",
        "ibgda",
    ),
    _one("ibgda: no doorbell record", "fabric/ibgda.h", _RECORD, "", "fast", "posters"),
    _one(
        "ibgda: record in the wrong byte order",
        "fabric/ibgda.h",
        "mlx5::send_counter(filled)",
        "static_cast<u32>(filled & 0xffff)",
        "fast",
        "posters",
    ),
    _one(
        "ibgda: record not cut to 16 bits",
        "wire/mlx5.h",
        "return big(static_cast<u32>(produced & 0xffff)); }",
        "return big(static_cast<u32>(produced)); }",
        "fast",
        "wrap",
    ),
    _one(
        "ibgda: index one too high",
        "fabric/ibgda.h",
        "mlx5::control(mlx5::kRdmaWrite, index,",
        "mlx5::control(mlx5::kRdmaWrite, index + 1,",
        "fast",
        "posters",
    ),
    _one(
        "ibgda: lost wrap-around of the ring",
        "fabric/ibgda.h",
        "qp.ring[index & (qp.blocks - 1)]",
        "qp.ring[index % (qp.blocks - 1)]",
        "fast",
        "posters",
    ),
    _one(
        "ibgda: no back-pressure",
        "fabric/ibgda.h",
        "if (end > qp.blocks && !await_completed",
        "if (end > ~0ull - 1 && !await_completed",
        "exact",
        "posters",
    ),
    _one(
        "ibgda: published out of turn",
        "fabric/ibgda.h",
        "device::load_acquire<Scope::kDevice>(&qp.filled) == begin; };",
        "true; };",
        "exact",
        "posters",
    ),
    _silent(
        "ibgda: relaxed turn",
        "fabric/ibgda.h",
        "device::load_acquire<Scope::kDevice>(&qp.filled) == begin; };",
        "device::load_relaxed<Scope::kDevice>(&qp.filled) == begin; };",
        "posters",
    ),
    _silent(
        "ibgda: relaxed publication",
        "fabric/ibgda.h",
        "device::store_release<Scope::kDevice>(&qp.filled, end);",
        "device::store_relaxed<Scope::kDevice>(&qp.filled, end);",
        "posters",
    ),
    _silent(
        "ibgda: relaxed completion",
        "fabric/ibgda.h",
        "device::load_acquire<Scope::kSystem>(&qp.cqe->tail);\n    // Of a request",
        "device::load_relaxed<Scope::kSystem>(&qp.cqe->tail);\n    // Of a request",
        "posters",
    ),
    Mutant(
        "ibgda: waits without ringing",
        "fabric/ibgda.h",
        (("if (unrung()) ring(qp);", ""),),
        "exact",
        ("posters",),
        endless=True,
    ),
    _one(
        "ibgda: the last one leaves the doorbell too",
        "fabric/ibgda.h",
        "(&qp.reserved) == end) ring(qp);",
        "(&qp.reserved) == end + 1) ring(qp);",
        "fast",
        "ibgda",
    ),
    _one(
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
        ((_WRITE, _WRITE.replace("index++", "++index")), (_ADD, _ADD.replace("index, word", "begin, word"))),
        "exact",
        ("posters", "ibgda"),
    ),
    Mutant(
        "ibgda: signal on another queue pair",
        "fabric/ibgda.h",
        (
            ("word.queue % net.per_peer]", "(word.queue + (count == 0)) % net.per_peer]"),
            (_ADD, "add_request(net, qp, index, word);\n    if (count != 0) " + _NOTHING + "\n    // In order"),
            (_POSTED, _POSTED.replace("true", f"count == 0 || {_ONLY_SIGNAL}")),
        ),
        "exact",
        ("posters", "ibgda"),
    ),
    _one(
        "ibgda: one queue pair for all words",
        "fabric/ibgda.h",
        "word.queue % net.per_peer]",
        "0]",
        "fast",
        "ibgda",
    ),
    _one(
        "ibgda: words of a source on one queue pair",
        "kernels/common/operation.h",
        "region() * wire::kSignals + kind};",
        "rank()};",
        "fast",
        "ibgda",
    ),
    _one(
        "ibgda: a signal more",
        "fabric/fabric.h",
        "return post(peers, state, waiter, completion, to, pieces, count, word);",
        "return post(peers, state, waiter, completion, to, nullptr, 0, word) &&"
        " post(peers, state, waiter, completion, to, pieces, count, word);",
        "exact",
        "posters",
    ),
    _one(
        "ibgda: keys of another rank",
        "fabric/ibgda.h",
        "(static_cast<u64>(qp.peer) * net.chunks +",
        "(0 * net.chunks +",
        "fast",
        "posters",
        "ibgda",
    ),
    _one(
        "ibgda: request beyond the remote key",
        "fabric/ibgda.h",
        "return min(bytes, chunk - ((piece.target + done) & (chunk - 1)));",
        "return bytes;",
        "fast",
        "keys",
    ),
    _one(
        "ibgda: not quiet",
        "fabric/ibgda.h",
        "if (!await_completed(qp, waiter, wire::Phase::kQuiet, filled)) return false;",
        "if (filled == ~0ull) return false;",
        "exact",
        "posters",
    ),
    # --- kernels/common/operation.h
    _silent(
        "wait: relaxed",
        "kernels/common/operation.h",
        "[&] { return device::load_acquire<Scope::kSystem>(shown) >= expected; });",
        "[&] { return device::load_relaxed<Scope::kSystem>(shown) >= expected; });",
        "peer",
        "peer rounds",
    ),
    _silent(
        "last block: relaxed count",
        "kernels/common/operation.h",
        "device::add_acq_rel<Scope::kDevice>(&ticket_.blocks_met[meeting], 1u)",
        "device::add_relaxed<Scope::kDevice>(&ticket_.blocks_met[meeting], 1u)",
        "peer",
        "ibgda",
    ),
    _one(
        "meeting: no second barrier",
        "kernels/common/operation.h",
        "        __syncthreads();  // no thread gives up",
        "        // no thread gives up",
        "tsan",
        *NORMAL,
    ),
    _silent(
        "broadcast: a shuffle for a barrier",
        "kernels/common/operation.h",
        "int value) {\n    __syncwarp();",
        "int value) {",
        "peer rounds",
        "weak",
        "ibgda",
    ),
    _one(
        "region reused without free",
        "kernels/normal/combine.h",
        "if (!op.enter() || !op.await_free()) return;",
        "if (!op.enter()) return;",
        "tsan",
        "one region",
    ),
    _one(
        "target without its base",
        "kernels/common/operation.h",
        "return context_.base[wire::word_index(region(), kind, source, ranks())] + puts * wire::kUnit;",
        "return puts * wire::kUnit;",
        "exact",
        *NORMAL,
    ),
    # --- kernels/normal/staging.h
    _silent(
        "chunk: lanes' stores not joined",
        "kernels/normal/staging.h",
        "        __syncwarp();  // all lanes' stores",
        "        // all lanes' stores",
        "peer rounds",
    ),
    _silent(
        "chunk: slot given back while lanes read",
        "kernels/normal/staging.h",
        "    __syncwarp();  // all lanes have read",
        "    // all lanes have read",
        "peer rounds",
    ),
    _silent(
        "chunk: relaxed arrival",
        "kernels/normal/staging.h",
        "return device::load_acquire<Scope::kSystem>(word) >= expected;",
        "return device::load_relaxed<Scope::kSystem>(word) >= expected;",
        "peer rounds",
    ),
    _one(
        "chunk: slot reused before it is given back",
        "kernels/normal/staging.h",
        "stream.sending ? done : done + 1)",
        "stream.sending ? 0 : done + 1)",
        "exact",
        "peer rounds",
        "ibgda",
    ),
    # --- kernels/normal/dispatch.h, combine.h, notify.h
    _one(
        "dispatch: signal before the copies are finished",
        "kernels/normal/dispatch.h",
        "    copies.finish();\n",
        "",
        "exact",
        "peer",
    ),
    _one(
        "dispatch: signal before all blocks have stored",
        "kernels/normal/dispatch.h",
        "if (op.last_block(kStored)) {",
        "if (op.last_block(kStored), blockIdx.x == 0) {",
        "tsan",
        "peer",
    ),
    _one(
        "dispatch: rows listed by lanes that do not meet",
        "kernels/normal/dispatch.h",
        "        __syncwarp();  // the list is complete",
        "        // the list is complete",
        "exact",
        "peer",
    ),
    _silent(
        "combine: rows listed by lanes that do not meet",
        "kernels/normal/combine.h",
        "    __syncwarp();  // the list is complete",
        "    // the list is complete",
        "peer",
        "weak",
    ),
    _one(
        "combine: read before all blocks have",
        "kernels/normal/combine.h",
        "if (!op.meet() || !op.last_block(kFinished)) return;",
        "if (!op.meet() || (op.last_block(kFinished), blockIdx.x != 0)) return;",
        "tsan",
        "peer",
        "peer rounds",
    ),
    _silent(
        "notify: relaxed counts",
        "kernels/normal/notify.h",
        "device::store_release<Scope::kSystem>(&args.call.outcome->counts_ready, 1u);",
        "device::store_relaxed<Scope::kSystem>(&args.call.outcome->counts_ready, 1u);",
        "peer",
    ),
    _one(
        "notify: put before the block has written",
        "kernels/normal/notify.h",
        "    if (!op.meet()) return;  // the whole block's stores",
        "    // the whole block's stores",
        "tsan",
        "peer",
        "weak",
    ),
    # --- host
    _one(
        "host: an offer of the wrong place",
        "host/modes/normal/calls.cpp",
        "offer.topk_weights = runtime.offset_of(offered.topk_weights);",
        "offer.topk_weights = runtime.offset_of(offered.topk_idx);",
        "fast",
        "peer",
    ),
    _one(
        "host: a layout for fewer experts",
        "host/modes/normal/calls.cpp",
        "args.layout = region_layout(runtime, sizes.experts, dispatch_format(sizes, false));",
        "args.layout = region_layout(runtime, sizes.experts / 2, dispatch_format(sizes, false));",
        "fast",
        "peer",
        "weak",
    ),
    # --- recovery
    _one(
        "recovery: words not cleared",
        "host/session/recovery.cpp",
        "memory_->fill(bank, 0, heap.bank_bytes());",
        "",
        "fast",
        "recover",
        "recover ibgda",
    ),
    _one(
        "recovery: what was consumed is remembered",
        "host/session/recovery.cpp",
        "memory_->fill(base_.get(), 0, heap.words() * sizeof(u64));",
        "",
        "fast",
        "recover",
        "recover ibgda",
    ),
    _one(
        "recovery: the old network goes on",
        "host/session/recovery.cpp",
        "    networks_ = {};  // before the next are made: no agent of the old ones is left\n"
        "    networks_ = make_networks_(*memory_);\n",
        "",
        "exact",
        "recover ibgda",
    ),
    _silent(
        "recovery: relaxed meetings",
        "host/cpu/memory.cpp",
        "return __atomic_load_n(word, __ATOMIC_ACQUIRE);",
        "return __atomic_load_n(word, __ATOMIC_RELAXED);",
        "recover",
        "recover ibgda",
    ),
    _one(
        "recovery: others are sent to before they are ready",
        "host/session/recovery.cpp",
        "if (stage >= stage_of(attempt, again)) continue;",
        "if (stage >= stage_of(attempt, false)) continue;",
        "tsan",
        "recover",
        "recover ibgda",
    ),
    _one(
        "recovery: the first bank alone is cleared",
        "host/session/recovery.cpp",
        "heap.bank_offset(generation);",
        "heap.bank_offset(0);",
        "fast",
        "recover",
        "recover ibgda",
    ),
    _one(
        "recovery: an old abort word counts",
        "kernels/common/operation.h",
        "return wire::abort_generation(word) >= generation_ ? word : 0;",
        "return word;",
        "fast",
        "recover",
    ),
    _one(
        "recovery: the host stays in its generation",
        "host/session/recovery.cpp",
        "    generation_ = generation;",
        "",
        "fast",
        "recover",
    ),
    _one(
        "recovery: a replay that failed has failed forever",
        "kernels/common/operation.h",
        "return device::load_relaxed<Scope::kDevice>(&ticket_.failed) == generation_ || aborted() != 0;",
        "return device::load_relaxed<Scope::kDevice>(&ticket_.failed) != 0 || aborted() != 0;",
        "fast",
        "replays",
    ),
    # --- notify
    _one(
        "notify: a begin waits for the peers' counts",
        "kernels/normal/notify.h",
        "if (args.finish_later == 0) take_counts",
        "take_counts",
        "fast",
        "apart",
    ),
    # --- failing
    _one(
        "failing: a told thread does not pass it on",
        "kernels/common/operation.h",
        _TELL,
        "if (told == 0) " + _TELL,
        "exact",
        "failing",
    ),
    _one(
        "failing: the own heap alone",
        "kernels/common/operation.h",
        "if (r == rank() || !mapped(r)) continue;",
        "continue;",
        "fast",
        *FAILING,
    ),
    _silent(
        "failing: told by a plain store",
        "kernels/common/operation.h",
        _EXCHANGE,
        _SLOWLY + _EXCHANGE.replace("exchange_acq_rel", "store_release"),
        "failing, ordered",
    ),
    Mutant(
        "failing: the reason before the answers",
        "kernels/common/operation.h",
        ((_MARK, ""), (_TELL, _MARK + "\n" + _TELL)),
        "exact",
        ("failing, watched",),
    ),
    _one(
        "failing: no last look",
        "kernels/common/operation.h",
        "        if (threadIdx.x == 0) look_last();\n",
        "",
        "fast",
        *FAILING,
    ),
    Mutant(
        "failing: a relaxed last look",
        "kernels/common/operation.h",
        ((_LOOK, "aborted();"), (_EXCHANGE, _SLOWLY + _EXCHANGE)),
        "tsan",
        ("failing, ordered",),
        silent=True,
    ),
    _one(
        "failing: the teller tells no rank",
        "host/control/teller.cpp",
        "memory_->store_words(words_, told_);",
        "",
        "fast",
        "failing weak",
        "failing ibgda",
    ),
    _one(
        "failing: other Buffers go on",
        "kernels/common/operation.h",
        "} else if (device::load_relaxed<Scope::kSystem>(context_.failures) != context_.failures_known) {",
        "} else if (false) {",
        "fast",
        "two buffers",
        "two buffers weak",
    ),
    _one(
        "failing: other Buffers are not told",
        "kernels/common/operation.h",
        "device::add_release<Scope::kSystem>(context_.failures, 1ull);",
        "",
        "fast",
        "two buffers",
        "two buffers weak",
    ),
    # --- bounds
    _one(
        "bounds: an offer of fewer rows",
        "kernels/normal/offers.h",
        "return static_cast<u64>(mine.first) + mine.rows <= offer.rows && offer.x",
        "return offer.x",
        "fast",
        "bounds",
    ),
    _one(
        "bounds: an offer of what is not mapped",
        "kernels/normal/offers.h",
        "const u64 mapped = device::load_relaxed<Scope::kSystem>(&op.peers().mapped_bytes[r]);",
        "const u64 mapped = ~0ull;",
        "fast",
        "bounds",
    ),
    _one(
        "bounds: a chunk of other rows",
        "kernels/normal/staging.h",
        "if (ours && (header.first != due.first || header.rows != due.rows)) {",
        "if (false) {",
        "fast",
        "bounds rounds",
        "bounds weak",
    ),
    _one(
        "bounds: a plan's rows",
        "kernels/normal/bounds.h",
        "if (begin >= 0 && end >= begin && range.rows <= most) return true;",
        "return true;",
        "fast",
        "bounds rounds",
        "bounds",
    ),
    _one(
        "bounds: rows of a chunk, by their tokens",
        "kernels/normal/combine.h",
        "if (range.rows <= args.layout.chunk_rows) return true;",
        "return true;",
        "fast",
        "bounds rounds",
        "bounds weak",
    ),
    _one(
        "bounds: a token's row in dispatch",
        "kernels/normal/dispatch.h",
        "const bool goes = row >= 0 && static_cast<u32>(row) < targets[r].sent_rows;",
        "const bool goes = row >= 0;",
        "fast",
        "bounds",
    ),
    _one(
        "bounds: a row's token",
        "kernels/normal/dispatch.h",
        "if (token < args.tokens) return token;",
        "return token;",
        "fast",
        "bounds rounds",
    ),
    _one(
        "bounds: a token's row in combine",
        "kernels/normal/combine.h",
        "const bool there = row >= 0 && static_cast<u32>(row) - sources[r].there.first < sources[r].there.rows;",
        "const bool there = row >= 0;",
        "fast",
        "bounds",
    ),
    _one(
        "bounds: a source's tokens",
        "kernels/normal/combine.h",
        "if (tokens > wire::kMostTokens) {",
        "if (false) {",
        "fast",
        "bounds rounds",
        "bounds",
    ),
)
