// Calls that only measurements make.
#pragma once

#include <memory>

#include "host/session/runtime.h"
#include "kernels/measure/post.h"

namespace deep_ep::host::measure {

// Puts `posts.puts` times `posts.bytes`, as kernels/measure/post.h says: to time it. No operation; `posts.call` is
// filled in here. The offsets lie in arenas, whose owners use them for nothing else.
std::shared_ptr<Call> post(Runtime& runtime, PostArgs posts, unsigned blocks);

}  // namespace deep_ep::host::measure
