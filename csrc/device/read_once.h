// A value that was loaded from memory which others may write.
#pragma once

#include "device/anywhere.h"
#include "wire/types.h"

namespace deep_ep::device {

// The value itself. The compiler loses sight of where it came from, so it cannot load it a second time.
DEEP_EP_ANYWHERE u32 read_once(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace deep_ep::device
