#include "host/cpu/kernel_table.h"

#include <stdexcept>
#include <string>

#include "kernels/measure/handshake.h"
#include "kernels/measure/post.h"
#include "kernels/normal/combine.h"
#include "kernels/normal/dispatch.h"
#include "kernels/normal/layout.h"
#include "kernels/normal/notify.h"

namespace deep_ep::host {
namespace {

template <class Args, void (*kKernel)(const Args)>
void call(const void* args) {
    kKernel(*static_cast<const Args*>(args));
}

struct Named {
    const char* name;
    cpu::Entry entry;
};

constexpr Named kKernels[] = {
    {"layout", call<LayoutArgs, layout<RuntimeShape>>},
    {"notify", call<NotifyArgs, notify<RuntimeShape>>},
    {"counts", call<NotifyArgs, counts<RuntimeShape>>},
    {"notify_cached", call<NotifyCachedArgs, notify_cached>},
    {"dispatch", call<DispatchArgs, dispatch<RuntimeShape>>},
    {"combine", call<CombineArgs, combine<RuntimeShape>>},
    {"post", call<PostArgs, post>},
    {"handshake", call<HandshakeArgs, handshake>},
};

}  // namespace

cpu::Entry find_kernel(const char* name) {
    for (const Named& kernel : kKernels) {
        if (std::string(kernel.name) == name) return kernel.entry;
    }
    throw std::out_of_range(std::string("no kernel named ") + name);
}

}  // namespace deep_ep::host
