// How whatever stands for a network moves bytes.
#pragma once

#include "wire/types.h"

namespace deep_ep::nic {

// Plain accesses, of 16 bytes where they fit, so that sanitizers see them. What orders them is the atomic that follows.
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
