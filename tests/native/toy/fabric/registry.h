// Replaces the library's registry: adds one fabric.
#pragma once

#include "fabric/ibgda.h"
#include "fabric/toy.h"
#include "fabric/weak.h"

namespace deep_ep::fabric {

using Registry = Fabrics<Ibgda, WeakQueue, Toy>;

}  // namespace deep_ep::fabric
