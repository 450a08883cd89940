"""Bugs of the proxy: in the ring of commands, in the messages they become, in the totals these add up to."""

from __future__ import annotations

from mutants.mutant import MASKS, PROXY, Mutant, one, silent

_KERNELS = "fabric/proxy.h"
_WIRE = "wire/proxy.h"
_RINGS = "host/network/proxy/command_rings.cpp"
_SENDER = "host/network/proxy/sender.cpp"
_RECEIVER = "host/network/proxy/receiver.cpp"
_FAR_WORDS = "wire/far_words.h"
_RECOVERY = "host/session/recovery.cpp"
_POSTERS = "posters proxy"
_RECOVER = ("recover proxy", "replays proxy")

MUTANTS: tuple[Mutant, ...] = (
    # --- the ring
    silent(
        "proxy: a command is released by a relaxed store",
        _KERNELS,
        "device::store_release<Scope::kSystem>(&command.high",
        "device::store_relaxed<Scope::kSystem>(&command.high",
        *PROXY,
    ),
    one(
        "proxy: a command is complete when its lower half is",
        _RINGS,
        "    if (wire::proxy::lap_of(command.high) != lap) return false;\n",
        "",
        "exact",
        *PROXY,
    ),
    Mutant(
        "proxy: the same lap for ever",
        _WIRE,
        (
            ("{ return (position / commands + 1) & 1; }", "{ return 1 | (position / commands & 0); }"),
            ("lap_at(4, 4) == 0", "lap_at(4, 4) == 1"),
        ),
        "exact",
        (_POSTERS,),
        endless=True,
    ),
    one(
        "proxy: room for one command is taken for room for all of a put",
        _KERNELS,
        "        const u64 end = begin + count;\n        if (!has_room(ring, commands, end) &&",
        "        const u64 end = begin + count;\n        if (!has_room(ring, commands, begin + 1) &&",
        "exact",
        _POSTERS,
    ),
    one(
        "proxy: positions are handed out without a look at what others have taken",
        _KERNELS,
        "if (found == begin) return true;",
        "if (found <= begin) return true;\n        if (found != end) return true;",
        "exact",
        *PROXY,
    ),
    one(
        "proxy: a put takes one slot, whatever its pieces",
        _KERNELS,
        "const u32 needed = count != 0 ? count : 1;",
        "const u32 needed = 1;",
        "fast",
        *PROXY,
    ),
    silent(
        "proxy: what is done is told by a relaxed store",
        _RINGS,
        "observe::store_release(proxy_, &progress.retired, ring.retired);",
        "__atomic_store_n(&progress.retired, ring.retired, __ATOMIC_RELAXED);",
        _POSTERS,
    ),
    one(
        "proxy: a command that has been taken counts as done",
        _RINGS,
        "observe::store_release(proxy_, &progress.retired, ring.retired);",
        "observe::store_release(proxy_, &progress.retired, ring.taken);",
        "exact",
        *PROXY,
    ),
    # --- messages
    Mutant(
        "proxy: a source may be written once its message is posted",
        _SENDER,
        (
            (
                "    link.queue.pop_front();\n",
                "    rings_.end_message(next.of);\n    link.queue.pop_front();\n",
            ),
            ("    rings_.end_message(ended.of);\n", ""),
        ),
        "fast",
        PROXY,
    ),
    one(
        "proxy: messages of a put are counted on into the next one",
        _SENDER,
        "    if (ends) of_put = 0;\n",
        "",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: the last cut of a piece closes the put",
        _SENDER,
        "const u32 pieces = ends && cut + 1 == cuts ? of_put : 0;",
        "const u32 pieces = cut + 1 == cuts ? of_put : 0;",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: all messages to a word have the same number",
        _SENDER,
        "{peer, next.word, window.sent++, message.bytes",
        "{peer, next.word, window.sent, message.bytes",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: what a masked rank is sent is never done",
        _SENDER,
        "rings_.begin(taken.place, lost ? 1 : 0);",
        "rings_.begin(taken.place, 1);",
        "fast",
        *MASKS,
    ),
    one(
        "proxy: the count of a put outlives the link that has lost it",
        _SENDER,
        "        if (operation != kPart) put_messages_[taken.place.ring] = 0;\n",
        "",
        "fast",
        "sender",
    ),
    one(
        "proxy: a message that has failed counts as done",
        _SENDER,
        "    link.lost.push_back(ended.of);\n    if (!link.dead) ++dead_;",
        "    rings_.end_message(ended.of);\n    if (!link.dead) ++dead_;",
        "fast",
        "sender",
    ),
    one(
        "proxy: what waits for a link that has failed counts as done",
        _SENDER,
        "for (const Waiting& waiting : link.queue) link.lost.push_back(waiting.of);",
        "for (const Waiting& waiting : link.queue) rings_.end_message(waiting.of);",
        "fast",
        "sender",
    ),
    one(
        "proxy: a command for a link that has failed counts as done",
        _SENDER,
        "rings_.begin(taken.place, lost ? 1 : 0);\n        if (lost) link.lost",
        "rings_.begin(taken.place, 0);\n        if (lost && false) link.lost",
        "fast",
        "sender",
    ),
    one(
        "proxy: puts of all rings are counted together",
        _SENDER,
        "u32& of_put = put_messages_[taken.place.ring];",
        "u32& of_put = put_messages_[0];",
        "fast",
        "sender",
    ),
    one(
        "proxy: an operation ends with what is in one ring",
        _KERNELS,
        "    for (u32 i = 0; i < net.count; ++i) {",
        "    for (u32 i = 0; i < 1; ++i) {",
        "exact",
        *PROXY,
    ),
    one(
        "proxy: numbers of messages have no window",
        _SENDER,
        "return fits && link.windows[next.word].open() && transport_.takes(peer);",
        "return fits && transport_.takes(peer);",
        "fast",
        "sender",
    ),
    one(
        "proxy: a peer that takes nothing holds up the next ones",
        _SENDER,
        "        Link& link = links_[peer];\n        while (may_post(peer, link)) {",
        "        Link& link = links_[peer];\n"
        "        if (!link.queue.empty() && !transport_.takes(peer)) return posted;\n"
        "        while (may_post(peer, link)) {",
        "fast",
        "sender",
    ),
    one(
        "proxy: what is under way to a peer has no bound",
        _SENDER,
        "    return fits && link.windows",
        "    return (fits || !fits) && link.windows",
        "fast",
        "sender",
    ),
    one(
        "proxy: a put without bytes is no message",
        _SENDER,
        "static_cast<u32>((bytes + most - 1) / most) : ends ? 1 : 0;",
        "static_cast<u32>((bytes + most - 1) / most) : 0;",
        "fast",
        *PROXY,
    ),
    # --- totals
    one(
        "proxy: a repeat that is ahead of its turn counts",
        _RECEIVER,
        "if (ahead >= kWindow || (line.beyond >> ahead & 1) != 0) return;",
        "if (ahead >= kWindow) return;",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: a repeat of what has had its turn counts",
        _RECEIVER,
        "if (ahead >= kWindow || (line.beyond >> ahead & 1) != 0) return;",
        "if (ahead < kWindow && (line.beyond >> ahead & 1) != 0) return;",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: each message counts as a put",
        _WIRE,
        "constexpr u64 share(u32 pieces) { return pieces == 0 ? 1 : kUnit - (pieces - 1); }",
        "constexpr u64 share(u32) { return kUnit; }",
        "fast",
        *PROXY,
    ),
    silent(
        "proxy: a total is stored relaxed",
        _RECEIVER,
        "observe::store_release(proxy_, word, line.total);",
        "__atomic_store_n(word, line.total, __ATOMIC_RELAXED);",
        *PROXY,
    ),
    one(
        "proxy: a total is what has come last",
        _RECEIVER,
        "line.total += share(said.pieces);",
        "line.total = share(said.pieces);",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: the words of the first region for all",
        _RECEIVER,
        "layout_.word_in_bank(region, kind, place.source)",
        "layout_.word_in_bank(region & 0, kind, place.source)",
        "fast",
        *PROXY,
    ),
    # --- words of the host
    one(
        "proxy: kernels look at the near part's words for those that their host stores",
        _FAR_WORDS,
        "(distance & (0 - bit))",
        "(distance & (0 - bit) & 0)",
        "fast",
        *PROXY,
    ),
    one(
        "proxy: kernels look at the far part's words for those of streams",
        _FAR_WORDS,
        "const u64 bit = kind < kOfRanks ? sources",
        "const u64 bit = kind < kSignals ? sources",
        "fast",
        "once per node proxy",
    ),
    one(
        "proxy: a recovery clears no words of the host",
        _RECOVERY,
        "if (!near_.coincide()) memory_->fill(far, 0, heap.bank_bytes());",
        "(void)far;",
        "fast",
        *_RECOVER,
    ),
    one(
        "proxy: a recovery clears the host's words of the first bank alone",
        _RECOVERY,
        "reinterpret_cast<u8*>(heap_base(options_.rank)) + heap.bank_offset(generation);",
        "reinterpret_cast<u8*>(heap_base(options_.rank)) + heap.bank_offset(0);",
        "fast",
        *_RECOVER,
    ),
    one(
        "proxy: totals of all generations in one bank",
        "host/network/proxy/progress.cpp",
        "place.layout.bank_offset(place.generation)",
        "place.layout.bank_offset(0)",
        "fast",
        *_RECOVER,
    ),
)
