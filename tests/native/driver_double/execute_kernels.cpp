// Kernels run on the executor: PTX is interpreted; other kernels are the library's, found by the symbols that NVRTC
// gave them.
#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "execute.h"
#include "interpret.h"
#include "sim/executor/executor.h"
#include "sim/host/kernel_table.h"

#include "device/of_each_rank.h"

#include "kernels/registry.h"

namespace driver_double {
namespace {

using deep_ep::RuntimeShape;
using deep_ep::cpu::Executor;
using deep_ep::device::of_each_rank;

// Those of other programs, such as the probes of benchmarks/gpu_lab, have no code here: they end at once and do
// nothing.
bool is_ours(const Code& code) { return code.program != nullptr || code.symbol.rfind("_ZN7deep_ep", 0) == 0; }

// Finds a rank's arguments in an array.
using ForRanks = void (*)(const void* array);

// A kernel, as launches on the stand-in find it.
struct Known {
    ForRanks for_ranks;
    size_t argument_bytes;
};

std::map<std::string, Known> known() {
    std::map<std::string, Known> by_name;
    deep_ep::AllKernels::each([&]<class Kernel>(Kernel) {
        by_name[Kernel::kName] = {of_each_rank<Kernel::template kEntry<RuntimeShape>>, sizeof(typename Kernel::Args)};
    });
    return by_name;
}
const std::map<std::string, Known> kKernels = known();

// One rank's blocks of a launch. The array is not copied, so it must live as long as they run.
struct RankOfGrid {
    ForRanks entry;
    const void* array;
    unsigned rank;
};

void enter(const void* args) {
    const auto& here = *static_cast<const RankOfGrid*>(args);
    blockIdx.y = here.rank;  // the entry reads it first; no other thread runs in between
    here.entry(here.array);
}

// "_ZN7deep_ep8dispatchI..." -> "dispatch"; "_ZN7deep_ep6device12of_each_rankIXadL_ZNS_8dispatchI..." too. A mode's
// namespace is a part of the name: "_ZN7deep_ep11low_latency8dispatchI..." -> "low_latency_dispatch".
std::string name_of(const std::string& symbol) {
    const std::string prefix = for_ranks(symbol) ? "IXadL_ZNS_" : "_ZN7deep_ep";
    size_t at = symbol.find(prefix);
    if (at == std::string::npos) throw std::invalid_argument(symbol);
    std::string name;
    for (at += prefix.size(); at < symbol.size() && std::isdigit(symbol[at]) != 0;) {
        size_t digits = 0;
        const size_t length = std::stoul(symbol.substr(at), &digits);
        name += (name.empty() ? "" : "_") + symbol.substr(at + digits, length);
        at += digits + length;
    }
    if (kKernels.count(name) == 0) throw std::invalid_argument(symbol);
    return name;
}

std::mutex run_mutex;                                // guards everything below
std::map<std::pair<int, unsigned>, int> streams;     // executor streams, by queue and rank
std::map<uint64_t, std::vector<uint64_t>> launches;  // executor launches, by the number passed to ended()
uint64_t latest_number = 0;
std::vector<uint64_t> running;         // executor launches that may not have ended
constexpr uint64_t kTurn = 1'000'000;  // ns: shorter ones wake the threads of all ranks too often
std::set<uint64_t> users;              // kernels of the program that run
// A launch that waits for others, or for one before it that does.
struct Held {
    Code code;
    deep_ep::host::cuda::LaunchConfig config;
    int queue;
    int stream;
    std::string args;
    Before before;
    uint64_t number;
};
std::vector<Held> held;
std::vector<std::shared_ptr<const Program>> programs;  // kernels of modules that have been unloaded may still run

}  // namespace

namespace {

bool is_held(uint64_t number) {
    return std::any_of(held.begin(), held.end(), [&](const Held& one) { return one.number == number; });
}

bool has_ended(uint64_t number) {
    if (users.count(number) != 0 || is_held(number)) return false;
    const auto found = launches.find(number);
    const auto finished = [](uint64_t serial) { return Executor::get().finished(serial); };
    return found == launches.end() || std::all_of(found->second.begin(), found->second.end(), finished);
}

bool may_start(const Before& before) {
    if (users.count(before.in_stream) != 0 || is_held(before.in_stream)) return false;
    return std::all_of(before.awaited.begin(), before.awaited.end(), has_ended);
}

// A rank's blocks are ordered only after that rank's earlier ones in the queue. A GPU gives more order: there the next
// launch begins after the blocks of all ranks.
void start(const Code& code, const deep_ep::host::cuda::LaunchConfig& config, int queue, int stream, const void* args,
           uint64_t number) {
    const std::string name = name_of(code.symbol);
    const bool for_all = for_ranks(code.symbol);
    std::vector<uint64_t> parts;
    for (unsigned rank = 0; rank < config.grid[1]; ++rank) {
        int& of_executor = streams[{queue, rank}];
        if (of_executor == 0) of_executor = Executor::get().new_stream();
        deep_ep::cpu::Launch launch{};
        launch.name = kKernels.find(name)->first.c_str();
        launch.stream = of_executor;
        launch.blocks = config.grid[0];
        launch.threads = config.block[0];
        launch.shared_bytes = config.shared_bytes;
        launch.args = args;
        launch.args_bytes = kKernels.at(name).argument_bytes;
        std::string held;
        const RankOfGrid here{for_all ? kKernels.at(name).for_ranks : nullptr, args, rank};
        if (code.program != nullptr) {
            if (rank == 0 && (programs.empty() || programs.back() != code.program)) programs.push_back(code.program);
            if (for_all) {  // their parameter is the array's address
                launch.args = &args;
                launch.args_bytes = sizeof(args);
            }
            // A stream belongs to a rank, except a stream in which all ranks launch: there the row of blocks is the
            // rank.
            interpret(*code.program, code.symbol, for_all ? static_cast<int>(rank) : stream, rank, launch, held);
        } else if (for_all) {
            launch.entry = enter;
            launch.args = &here;
            launch.args_bytes = sizeof(here);
        } else {
            launch.entry = deep_ep::host::find_kernel(launch.name);
        }
        parts.push_back(Executor::get().launch(launch));
    }
    running.insert(running.end(), parts.begin(), parts.end());
    launches[number] = std::move(parts);
}

void start_held() {
    for (size_t i = 0; i < held.size();) {
        if (!may_start(held[i].before)) {
            ++i;
            continue;
        }
        const Held next = std::move(held[i]);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
        start(next.code, next.config, next.queue, next.stream, next.args.data(), next.number);
        i = 0;
    }
}

}  // namespace

uint64_t run(const Code& code, const deep_ep::host::cuda::LaunchConfig& config, int queue, int stream, const void* args,
             const Before& before) {
    const std::lock_guard<std::mutex> lock(run_mutex);
    if (!is_ours(code)) return before.in_stream;
    const uint64_t number = ++latest_number;
    if (may_start(before)) {
        start(code, config, queue, stream, args, number);
    } else {
        if (for_ranks(code.symbol)) throw std::logic_error("a launch of all ranks waits for others");
        const auto* const bytes = static_cast<const char*>(args);
        held.push_back({code, config, queue, stream, {bytes, argument_bytes(code.symbol)}, before, number});
    }
    return number;
}

uint64_t run_users() {
    const std::lock_guard<std::mutex> lock(run_mutex);
    users.insert(++latest_number);
    return latest_number;
}

void end_users(uint64_t number) {
    const std::lock_guard<std::mutex> lock(run_mutex);
    users.erase(number);
    start_held();
}

size_t argument_bytes(const std::string& symbol) { return kKernels.at(name_of(symbol)).argument_bytes; }

void share(const void* memory, size_t bytes) { Executor::get().share_memory(memory, bytes, -1); }
void unshare(const void* memory) { Executor::get().unshare_memory(memory); }

void run_for_a_while() {
    std::unique_lock<std::mutex> lock(run_mutex);
    start_held();
    std::erase_if(running, [](uint64_t serial) { return Executor::get().finished(serial); });
    if (running.empty()) return;
    const std::vector<uint64_t> serials = running;
    lock.unlock();
    Executor& executor = Executor::get();
    const auto any_ended = [&] {
        return std::any_of(serials.begin(), serials.end(), [&](uint64_t serial) { return executor.finished(serial); });
    };
    executor.wait(any_ended, "kernels", executor.now_ns() + kTurn);
}

// Lets kernels run meanwhile.
bool ended(uint64_t number) {
    if (number == 0) return true;
    std::unique_lock<std::mutex> lock(run_mutex);
    start_held();
    const auto found = launches.find(number);
    const bool started = found != launches.end();
    const std::vector<uint64_t> parts = started ? found->second : std::vector<uint64_t>();
    if (!started && has_ended(number)) return true;
    lock.unlock();
    Executor& executor = Executor::get();
    const auto all_ended = [&] {
        return started &&
               std::all_of(parts.begin(), parts.end(), [&](uint64_t serial) { return executor.finished(serial); });
    };
    return executor.wait(all_ended, "event", executor.now_ns() + kTurn);
}

}  // namespace driver_double
