// Detects when a captured graph can no longer run: it and everything instantiated from it have been destroyed.
#pragma once

#include "host/cuda/driver.h"
#include "host/launch/launcher.h"

namespace deep_ep::host {

// `stream` is being captured, and its context is current.
GraphGone watch_graph(cuda::Stream stream);

}  // namespace deep_ep::host
