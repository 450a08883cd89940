// Messages are copied once and then checked: between two reads they could change (P15).
#pragma once

#include "device/device.h"

namespace deep_ep {

// One thread: copies a message that has arrived. The reads are volatile so that the compiler reads no part of it twice;
// they are ordered by the signal that was acquired before.
template <class Message>
DEEP_EP_DEVICE Message copy_once(const void* from) {
    static_assert(sizeof(Message) % sizeof(u64) == 0, "messages consist of words");
    Message message;
    const auto* words = static_cast<const volatile u64*>(from);
    for (u32 i = 0; i < sizeof(Message) / sizeof(u64); ++i) reinterpret_cast<u64*>(&message)[i] = words[i];
    return message;
}

}  // namespace deep_ep
