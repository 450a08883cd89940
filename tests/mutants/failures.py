"""Bugs of failures: who is told, and how a Buffer goes on after one."""

from __future__ import annotations

from mutants.mutant import FAILING, Mutant, one, silent

_TELL = "tell(told != 0 ? told : wire::abort_word(generation_, reason, rank(), peer));"
_MARK = "device::store_release<Scope::kSystem>(&outcome_.failure.mark, wire::failure_mark(generation_, reason));"
_LOOK = "if_current(device::fetch_add_release<Scope::kSystem>(own_abort_word(), 0ull));"
_EXCHANGE = "device::exchange_acquire<Scope::kSystem>(theirs, word);"
# Mimics a slow link, which is not a bug: the peer may have checked for the last time before it is notified.
_SLOWLY = "for (u32 turn = 0; turn < 150; ++turn) device::load_relaxed<Scope::kSystem>(own_abort_word());\n"

MUTANTS: tuple[Mutant, ...] = (
    # --- recovery
    one(
        "recovery: words not cleared",
        "host/session/recovery.cpp",
        "memory_->fill(near, 0, heap.bank_bytes());",
        "",
        "fast",
        "recover",
        "recover ibgda",
    ),
    one(
        "recovery: what was consumed is remembered",
        "host/session/recovery.cpp",
        "memory_->fill(base_.get(), 0, heap.words() * sizeof(u64));",
        "",
        "fast",
        "recover",
        "recover ibgda",
    ),
    Mutant(
        "recovery: the old network goes on",
        "host/session/recovery.cpp",
        (
            ("    networks_ = {};  // before the next ones are made, so that no agent of the old ones remains\n", ""),
            ("    networks_ = make_networks_(*memory_, reached, generation);\n", ""),
        ),
        "exact",
        ("recover ibgda",),
    ),
    silent(
        "recovery: relaxed meetings",
        "sim/host/memory.cpp",
        "return __atomic_load_n(word, __ATOMIC_ACQUIRE);",
        "return __atomic_load_n(word, __ATOMIC_RELAXED);",
        "recover",
        "recover ibgda",
    ),
    one(
        "recovery: others are sent to before they are ready",
        "host/session/recovery.cpp",
        "if (stage >= stage_of(attempt, again)) continue;",
        "if (stage >= stage_of(attempt, false)) continue;",
        "tsan",
        "recover",
        "recover ibgda",
    ),
    one(
        "recovery: a later attempt is not joined",
        "host/session/recovery.cpp",
        "if (latest >> 1 > attempt) {",
        "if (false) {",
        "fast",
        "recover",
    ),
    one(
        "leaving: kernels are launched afterwards",
        "host/session/runtime.cpp",
        "if (left_) throw",
        "if (false) throw",
        "fast",
        "peer",
    ),
    one(
        "recovery: the first bank alone is cleared",
        "host/session/recovery.cpp",
        "near_.of(options_.rank) + heap.bank_offset(generation);",
        "near_.of(options_.rank) + heap.bank_offset(0);",
        "fast",
        "recover",
        "recover ibgda",
    ),
    one(
        "recovery: an old abort word counts",
        "kernels/common/operation.h",
        "return wire::abort_generation(word) >= generation_ ? word : 0;",
        "return word;",
        "fast",
        "recover",
    ),
    one(
        "recovery: the host stays in its generation",
        "host/session/recovery.cpp",
        "    generation_ = generation;",
        "",
        "fast",
        "recover",
    ),
    one(
        "recovery: a replay that failed has failed forever",
        "kernels/common/operation.h",
        "return device::load_relaxed<Scope::kDevice>(&ticket_.failed) == generation_;",
        "return device::load_relaxed<Scope::kDevice>(&ticket_.failed) != 0;",
        "fast",
        "replays",
    ),
    # --- failing
    one(
        "failing: a told thread does not pass it on",
        "kernels/common/operation.h",
        _TELL,
        "if (told == 0) " + _TELL,
        "exact",
        "failing",
    ),
    one(
        "failing: the own heap alone",
        "kernels/common/operation.h",
        "if (alone || r == rank() || !mapped(r) || masked(r)) continue;",
        "continue;",
        "fast",
        *FAILING,
    ),
    silent(
        "failing: told by a plain store",
        "kernels/common/operation.h",
        _EXCHANGE,
        _SLOWLY + _EXCHANGE.replace("exchange_acquire", "store_release"),
        "failing, ordered",
    ),
    Mutant(
        "failing: the reason before the answers",
        "kernels/common/operation.h",
        ((_MARK, ""), (_TELL, _MARK + "\n" + _TELL)),
        "exact",
        ("failing, watched",),
    ),
    one(
        "failing: no last look",
        "kernels/common/operation.h",
        "        if (threadIdx.x == 0 && (reads || masks_ranks())) look_last();\n",
        "",
        "fast",
        *FAILING,
    ),
    one(
        "failing: a chunk is sent without a look",
        "kernels/normal/staging.h",
        "        if (!broadcast(device::lane() != 0 || op_.looks_clear())) return;\n",
        "",
        "fast",
        *FAILING,
    ),
    one(
        "failing: a combine does not say that it has read published rows",
        "kernels/normal/combine.h",
        "op.finish(pulled);",
        "op.finish(false);",
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
    one(
        "failing: the teller tells no rank",
        "host/control/teller.cpp",
        "memory_->store_words(others_.words, told_);",
        "",
        "fast",
        "failing weak",
        "failing ibgda",
    ),
    one(
        "failing: other Buffers go on",
        "kernels/common/operation.h",
        "const bool elsewhere = device::load_relaxed<Scope::kSystem>(environment_.failures) != known;",
        "const bool elsewhere = known == ~0ull;",
        "fast",
        "two buffers",
        "two buffers weak",
    ),
    one(
        "entry: the block's copy of the environment used before it is complete",
        "kernels/common/operation.h",
        "        __syncthreads();  // the copy is complete\n",
        "",
        "fast",
        "low latency",
    ),
    one(
        "failing: other Buffers are not told",
        "kernels/common/operation.h",
        "device::add_release<Scope::kSystem>(environment_.failures, 1ull);",
        "",
        "fast",
        "two buffers",
        "two buffers weak",
    ),
)
