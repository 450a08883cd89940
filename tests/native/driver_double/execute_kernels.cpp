// The library's kernels run on the executor, found by the symbols that NVRTC gave them.
#include <cctype>
#include <map>
#include <stdexcept>

#include "cpu/executor/executor.h"
#include "execute.h"
#include "host/cpu/kernel_table.h"
#include "kernels/args.h"

namespace driver_double {
namespace {

using deep_ep::cpu::Executor;

const std::map<std::string, size_t> kArgumentBytes = {
    {"layout", sizeof(deep_ep::LayoutArgs)},     {"notify", sizeof(deep_ep::NotifyArgs)},
    {"dispatch", sizeof(deep_ep::DispatchArgs)}, {"notify_cached", sizeof(deep_ep::NotifyCachedArgs)},
    {"combine", sizeof(deep_ep::CombineArgs)},   {"post", sizeof(deep_ep::PostArgs)},
};

// "_ZN7deep_ep8dispatchI..." -> "dispatch"
std::string name_of(const std::string& symbol) {
    const std::string prefix = "_ZN7deep_ep";
    if (symbol.compare(0, prefix.size(), prefix) != 0) throw std::invalid_argument(symbol);
    size_t digits = 0;
    const size_t length = std::stoul(symbol.substr(prefix.size()), &digits);
    return symbol.substr(prefix.size() + digits, length);
}

}  // namespace

uint64_t run(const std::string& symbol, const deep_ep::host::cuda::LaunchConfig& config, const void* args) {
    static std::map<deep_ep::host::cuda::Stream, int> streams;
    if (streams.count(config.stream) == 0) streams[config.stream] = Executor::get().new_stream();
    const std::string name = name_of(symbol);
    deep_ep::cpu::Launch launch{};
    launch.name = kArgumentBytes.find(name)->first.c_str();
    launch.stream = streams[config.stream];
    launch.blocks = config.grid[0];
    launch.threads = config.block[0];
    launch.shared_bytes = config.shared_bytes;
    launch.entry = deep_ep::host::find_kernel(launch.name);
    launch.args = args;
    launch.args_bytes = kArgumentBytes.at(name);
    return Executor::get().launch(launch);
}

std::string copy_of_args(const std::string& symbol, const void* args) {
    return {static_cast<const char*>(args), kArgumentBytes.at(name_of(symbol))};
}

void share(const void* memory, size_t bytes) { Executor::get().share_memory(memory, bytes, -1); }
void unshare(const void* memory) { Executor::get().unshare_memory(memory); }

// Lets kernels run for a while: a GPU needs nobody for that.
bool ended(uint64_t serial) {
    if (serial == 0) return true;
    Executor& executor = Executor::get();
    constexpr uint64_t kTurn = 200'000;  // ns
    return executor.wait([&] { return executor.finished(serial); }, "event", executor.now_ns() + kTurn);
}

}  // namespace driver_double
