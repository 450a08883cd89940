// Converts words of kernels' formats for Memory: the same size, but a different C++ type.
#pragma once

#include <cstdint>

#include "wire/types.h"

namespace deep_ep::host {

inline uint64_t* host_word(u64& word) { return reinterpret_cast<uint64_t*>(&word); }

}  // namespace deep_ep::host
