// The fabrics that carry puts to ranks that are not mapped: each has an include and a name in the list below. It has a
// header here, for kernels, and a folder in host/network/ that makes the objects to which kernels post.
//
// A fabric is the type of its state in device memory, with a name (`kName`). It has these functions:
//
//   post(peers, state, waiter, completion, to, pieces, count, word)
//       one thread: takes the pieces, of which there may be none, and the signal. Returns false if a bounded wait for
//       room has ended without room; that holds up no other poster. The pieces' bytes are ordered before the call. The
//       delivering side copies them into the far part of the peer's heap, then adds wire::kUnit to the word there
//       (release, system scope), or stores the total if it is the receiver's host (P18). `completion` is for a
//       fabric without counts of its own: `posted` grows by 1 here, `completed` when the word has been added to
//   quiet(peers, state, waiter, completion)
//       the block: local memory that puts read from may be written again once its next barrier is passed
//   fault(peers, state, found)
//       one thread: returns whether a request has failed, and which one
#pragma once

#include "fabric/ibgda.h"
#include "fabric/proxy.h"
#include "fabric/weak.h"

namespace deep_ep::fabric {

using Registry = Fabrics<Ibgda, WeakQueue, Proxy>;

}  // namespace deep_ep::fabric
