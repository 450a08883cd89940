// Tells when a captured graph cannot run any more: it is gone, and so is all that was instantiated from it.
#pragma once

#include "host/cuda/driver.h"
#include "host/launch/launcher.h"

namespace deep_ep::host {

// `stream` is being captured, and its context is current.
GraphGone watch_graph(cuda::Stream stream);

}  // namespace deep_ep::host
