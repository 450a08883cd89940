// The fabrics that carry puts to ranks that are not mapped: an include and a name in the list for each. It has a header
// here, for kernels, and a folder in host/network/ that makes what kernels post to.
//
// A fabric is a type, of what it keeps in device memory, with a name (`kName`). Where the receiver's host stores the
// signal words, as totals, it has a `kHostStoresWords`, and they lie where wire/host_words.h says. For it there are:
//
//   post(peers, state, waiter, completion, to, pieces, count, word)
//       one thread: takes the pieces, of which there may be none, and the signal. False: a bounded wait for room has
//       ended without, and others that post are not held up by it. The pieces' bytes are ordered before it. What
//       delivers them copies them, then adds wire::kUnit to the word (release, system scope). `completion` is for a
//       fabric without counts of its own: `posted` grows by 1 here, `completed` when the word has been added to
//   quiet(peers, state, waiter, completion)
//       the block: own memory that puts read from may be written again, once its next barrier is passed
//   fault(peers, state, found)
//       one thread: whether a request has failed, and which
#pragma once

#include "fabric/ibgda.h"
#include "fabric/proxy.h"
#include "fabric/weak.h"

namespace deep_ep::fabric {

using Registry = Fabrics<Ibgda, WeakQueue, Proxy>;

}  // namespace deep_ep::fabric
