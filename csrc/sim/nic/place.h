// How the software networks move bytes.
#pragma once

#include "wire/types.h"

namespace deep_ep::nic {

// Uses plain accesses, of 16 bytes where possible, so that sanitizers see them. The atomic that follows orders them.
inline void place(u8* target, const u8* source, u64 bytes) {
    struct alignas(16) Line {
        u64 words[2];
    };
    u64 at = 0;
    for (; at + sizeof(Line) <= bytes; at += sizeof(Line)) {
        *reinterpret_cast<Line*>(target + at) = *reinterpret_cast<const Line*>(source + at);
    }
    for (; at < bytes; ++at) target[at] = source[at];
}

}  // namespace deep_ep::nic
