// The size of a thread block on a GPU.
#pragma once

#include "wire/types.h"

namespace deep_ep::device {

// One block saturates a multiprocessor's share of the memory system: 16 warps with 4 loads of 16 bytes per lane have 32
// KiB in flight, and a multiprocessor needs about 20 KiB (30 bytes per ns for 700 ns) to reach its part of an H200's
// bandwidth. This leaves each thread 128 registers. Not yet measured.
constexpr u32 kBlockWarps = 16;
constexpr u32 kBlockThreads = 32 * kBlockWarps;

}  // namespace deep_ep::device
