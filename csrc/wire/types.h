// Fixed-width integers without system headers: NVRTC ships none, and every layer includes this file.
#pragma once

namespace deep_ep {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "integer widths");
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "integer widths");
static_assert(sizeof(void*) == 8, "addresses cross the wire as 64-bit words");

}  // namespace deep_ep
