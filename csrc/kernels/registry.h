// All kernels. deep_ep_py/device/jit/registry.py has the same list for GPUs.
#pragma once

#include "kernels/expand/columns.h"
#include "kernels/expand/fold.h"
#include "kernels/low_latency/combine.h"
#include "kernels/low_latency/dispatch.h"
#include "kernels/measure/handshake.h"
#include "kernels/measure/post.h"
#include "kernels/normal/combine.h"
#include "kernels/normal/dispatch.h"
#include "kernels/normal/layout.h"
#include "kernels/normal/notify.h"
#include "kernels/two_hops/combine.h"
#include "kernels/two_hops/dispatch.h"
#include "kernels/two_hops/notify.h"

namespace deep_ep {

template <class... Each>
struct Kernels {
    // Calls `visit(kernel)` with a value of each type.
    template <class Visit>
    static void each(Visit visit) {
        (visit(Each{}), ...);
    }
};

using AllKernels = Kernels<LayoutKernel, NotifyKernel, CountsKernel, DispatchKernel, CombineKernel,
                           two_hops::NotifyKernel, two_hops::CountsKernel, two_hops::DispatchKernel,
                           two_hops::CombineKernel, ExpandSlotsKernel, ExpandRowsKernel, ScaleColumnsKernel, FoldKernel,
                           low_latency::DispatchKernel, low_latency::CombineKernel, PostKernel, HandshakeKernel>;

}  // namespace deep_ep
