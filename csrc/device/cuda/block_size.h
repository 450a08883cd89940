// How large a block is on a GPU.
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// One block fills a multiprocessor's share of the memory system: 16 warps of 4 loads of 16 bytes per lane have 32 KiB
// under way, and a multiprocessor needs about 20 KiB (30 bytes per ns for 700 ns) to do its part of an H200's
// bandwidth. It leaves each thread 128 registers. Not yet measured.
constexpr u32 kBlockWarps = 16;
constexpr u32 kBlockThreads = 32 * kBlockWarps;

}  // namespace deep_ep::device
