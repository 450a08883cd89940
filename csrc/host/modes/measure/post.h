// Calls used only by measurements.
#pragma once

#include <memory>

#include "host/session/runtime.h"
#include "kernels/measure/post.h"

namespace deep_ep::host::measure {

// Launches a kernel that posts `posts.puts` puts of `posts.bytes` each, to be timed: see kernels/measure/post.h. Not an
// operation; `posts.call` is filled in here. The offsets are in arenas whose owners do not use that memory otherwise.
std::shared_ptr<Call> post(Runtime& runtime, PostArgs posts, unsigned blocks);

}  // namespace deep_ep::host::measure
