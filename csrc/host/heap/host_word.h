// Words of kernels' formats as Memory takes them: of the same size, but another type to C++.
#pragma once

#include <cstdint>

#include "wire/types.h"

namespace deep_ep::host {

inline uint64_t* host_word(u64& word) { return reinterpret_cast<uint64_t*>(&word); }

}  // namespace deep_ep::host
