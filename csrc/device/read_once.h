// A value loaded from memory that others may write.
#pragma once

#include "device/anywhere.h"
#include "wire/types.h"

namespace deep_ep::device {

// Returns the value itself. The compiler loses track of its origin, so it cannot load it a second time.
DEEP_EP_ANYWHERE u32 read_once(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace deep_ep::device
