// The stand-in's modules, streams, events, launches and captures.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "double.h"
#include "execute.h"
#include "globals.h"
#include "machine.h"
#include "memory.h"

using namespace driver_double;

namespace {

std::mutex one_at_a_time;                              // see DOUBLE_SERIAL
int queries = number("DOUBLE_QUERIES", 0);             // how many more times a stream reports that its kernels run
std::map<const void*, uint64_t> event_launches;        // the launch that a recorded event waits for
std::map<const void*, uint64_t> event_captures;        // the capture that the event is recorded in; 0: none
std::map<const void*, std::vector<uint64_t>> awaited;  // by stream: launches that the next one there waits for
std::map<const void*, uint64_t> latest_launches;       // by stream
using Clock = std::chrono::steady_clock;
std::map<const void*, Clock::time_point> recorded_at;            // events that take the time
std::set<const void*> resident;                                  // functions whose code is loaded
std::map<const void*, int> queues;                               // by stream
std::map<const void*, Code> codes;                               // by function
std::map<const void*, std::shared_ptr<const Program>> programs;  // by module; null: an ELF file
std::map<const void*, int> numbers;                              // by stream
int streams_made = 0;

size_t local_bytes() {
    const char* given = std::getenv("DOUBLE_LOCAL_BYTES");
    return given ? std::strtoull(given, nullptr, 10) : 0;
}
size_t stack_limit = 1024;

struct Captured {
    Code code;
    LaunchConfig config;
    int queue;
    std::string args;
};
bool is_cooperative(const LaunchConfig& config) {
    return config.attribute_count == 1 && config.attributes[0].id == kLaunchCooperative &&
           config.attributes[0].value.cooperative == 1;
}
int queue_of(const LaunchConfig& config) {
    if (is_cooperative(config) && std::getenv("DOUBLE_COOPERATIVE_SERIAL")) return -1;
    return queues[config.stream];
}

// A resource that a graph keeps until it is destroyed.
struct UserObjectKept {
    HostFunction destroy;
    void* value;
};
struct CapturedGraph {
    std::vector<Captured> launches;
    std::vector<UserObjectKept> kept;
};
std::vector<CapturedGraph> graphs;
thread_local CapturedGraph capture;

// Work in a stream runs in order: copies after its kernels, and before kernels that are launched later. Meanwhile other
// calls get in, because kernels take time and may wait for those of other streams.
void settle(Stream stream, std::unique_lock<std::recursive_mutex>& lock) {
    const uint64_t latest = latest_launches[stream];
    lock.unlock();
    while (!ended(latest)) continue;
    lock.lock();
    finish_copies(stream);
}

// The null stream always exists.
bool is_stream(Stream stream) { return stream == nullptr || alive.count(stream) != 0; }

// Of the capture in progress on this thread; 0: none.
uint64_t capture_number() { return capturing ? graphs.size() + 1 : 0; }

std::string hex_word(const void* place) {
    unsigned long long word = 0;
    std::memcpy(&word, place, sizeof(word));
    char text[2 * sizeof(word) + 1];
    std::snprintf(text, sizeof(text), "%llx", word);
    return text;
}

}  // namespace

namespace driver_double {

void wait_for_kernels() {
    for (const auto& [stream, launch] : latest_launches) {
        while (!ended(launch)) continue;
    }
}

}  // namespace driver_double

#pragma GCC visibility push(default)
extern "C" {

Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    BEGIN(enter_in_context("cuCtxGetStreamPriorityRange"));
    *least = 0;
    *greatest = -5;
    return kSuccess;
}
Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
    BEGIN(enter_in_context("cuStreamCreateWithPriority"));
    RETURN_IF_FAILED(enter("stream", "flags=%u priority=%d", flags, priority));
    *stream = make<Stream>();
    queues[*stream] = streams_made % hardware_queues;
    numbers[*stream] = streams_made++;
    return kSuccess;
}
Result cuStreamDestroy_v2(Stream stream) {
    BEGIN(enter_in_context("cuStreamDestroy"));
    if (has_copies(stream)) settle(stream, lock);
    return forget(stream);
}
Result cuStreamQuery(Stream stream) {
    BEGIN(enter_outside_capture("cuStreamQuery"));
    if (!is_stream(stream)) return kInvalidHandle;
    if (queries-- > 0) return kNotReady;
    const uint64_t latest = latest_launches[stream];
    lock.unlock();  // kernels take time
    const bool idle = driver_double::ended(latest);
    if (idle) run_for_a_while();  // those of other streams, for hosts that wait for what kernels store
    return idle ? kSuccess : kNotReady;
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
    BEGIN(enter_in_context("cuStreamWaitEvent"));
    if (!alive.count(event) || !is_stream(stream)) return kInvalidHandle;
    if (flags != 0) return kInvalidValue;
    if (const uint64_t theirs = event_captures[event]; theirs != capture_number()) {
        return theirs == 0 ? kCaptureIsolation : kCapturedEvent;
    }
    if (!capturing) awaited[stream].push_back(event_launches[event]);
    return kSuccess;
}
Result cuModuleLoadData(Module* module, const void* image) {
    BEGIN(enter_in_context("cuModuleLoadData"));
    const auto* const text = static_cast<const char*>(image);
    const bool is_elf = std::memcmp(image,
                                    "\x7f"
                                    "ELF",
                                    4) == 0;
    std::shared_ptr<const Program> program;
    if (!is_elf && std::strncmp(text, "//", 2) != 0) return kInvalidImage;
    if (!is_elf && (program = load_ptx(text)) == nullptr) return kInvalidPtx;
    *module = make<Module>();
    if (is_elf) remember_globals(*module, image);
    programs[*module] = std::move(program);
    return kSuccess;
}
Result cuModuleUnload(Module module) {
    BEGIN(enter_in_context("cuModuleUnload"));
    forget_globals(module);
    std::erase_if(codes, [&](const auto& code) { return code.second.module == module; });
    programs.erase(module);
    return forget(module);
}
Result cuModuleGetFunction(Function* function, Module module, const char* symbol) {
    BEGIN(enter_in_context("cuModuleGetFunction"));
    if (!alive.count(module)) return kInvalidHandle;
    if (std::strncmp(symbol, "_Z", 2) != 0) return kNotFound;
    const auto& program = programs.at(module);
    if (program != nullptr && !has(*program, symbol)) return kNotFound;
    *function = reinterpret_cast<Function>(next_handle += 0x10);
    codes[*function] = {symbol, program, module};
    return kSuccess;
}
Result cuFuncLoad(Function function) {
    BEGIN(enter_in_context("cuFuncLoad"));
    if (!codes.count(function)) return kInvalidHandle;
    resident.insert(function);
    return kSuccess;
}
Result cuFuncGetAttribute(int* value, int which, Function function) {
    BEGIN(enter_in_context("cuFuncGetAttribute"));
    if (!codes.count(function)) return kInvalidHandle;
    constexpr int kStaticShared = 2048;
    *value = which == kLocalSizeBytes ? static_cast<int>(local_bytes()) : kStaticShared;
    return which == kLocalSizeBytes || which == kSharedSizeBytes ? kSuccess : kInvalidValue;
}
Result cuFuncSetAttribute(Function function, int which, int value) {
    BEGIN(enter_in_context("cuFuncSetAttribute"));
    if (!codes.count(function)) return kInvalidHandle;
    return enter("attribute", "%d=%d", which, value);
}
Result cuCtxGetLimit(size_t* value, int which) {
    BEGIN(enter_in_context("cuCtxGetLimit"));
    *value = stack_limit;
    return which == kLimitStackSize ? kSuccess : kInvalidValue;
}
Result cuCtxSetLimit(int which, size_t value) {
    BEGIN(enter_in_context("cuCtxSetLimit"));
    if (which != kLimitStackSize) return kInvalidValue;
    wait_for_kernels();
    stack_limit = value;
    return enter("limit", "%zu", value);
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function function, int threads, size_t) {
    BEGIN(enter_in_context("cuOccupancyMaxActiveBlocksPerMultiprocessor"));
    if (!codes.count(function)) return kInvalidHandle;
    // Whether asking loads the code depends on the version of the driver.
    if (std::getenv("DOUBLE_LOADS_WHEN_ASKED")) resident.insert(function);
    *blocks = threads <= 1024 ? kBlocksEach : 0;
    return kSuccess;
}
Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters, void** extra) {
    std::unique_lock<std::mutex> turn(one_at_a_time, std::defer_lock);
    if (std::getenv("DOUBLE_SERIAL")) turn.lock();
    BEGIN(enter_in_context("cuLaunchKernelEx"));
    if (extra != nullptr || !is_stream(config->stream) || !codes.count(function)) return kInvalidValue;
    if (resident.insert(function).second || local_bytes() > stack_limit) {
        RETURN_IF_FAILED(enter("loads at a launch"));
        wait_for_kernels();
        stack_limit = std::max(stack_limit, local_bytes());
    }
    const bool cooperative = is_cooperative(*config);
    const unsigned *grid = config->grid, *block = config->block;
    if (grid[0] == 0 || grid[1] == 0 || grid[2] != 1) return kInvalidValue;
    if (uint64_t{grid[0]} * grid[1] > static_cast<unsigned>(multiprocessors() * kBlocksEach)) return kTooLarge;
    const Code code = codes[function];  // while this waits for copies, its module may be unloaded
    const std::string& symbol = code.symbol;
    std::string first_words;
    const void* args = parameters[0];
    if (driver_double::for_ranks(symbol)) {
        // The parameter is the address of an array, with as many elements as the grid has rows.
        std::memcpy(&args, parameters[0], sizeof(args));
        const size_t all = host_allocation_bytes(args);
        if (all == 0 || all % grid[1] != 0) return kInvalidValue;
        const size_t each = all / grid[1], expected = driver_double::argument_bytes(symbol);
        if (expected != 0 && each != expected) return kInvalidValue;
        first_words = hex_word(&args) + ":";
        for (unsigned rank = 0; rank < grid[1]; ++rank) {
            first_words += (rank ? "," : "") + hex_word(static_cast<const char*>(args) + rank * each);
        }
        if (capturing) return kCaptureUnsupported;
    } else {
        if (grid[1] != 1) return kInvalidValue;
        first_words = hex_word(args);
    }
    if (capturing) {
        const char* bytes = static_cast<const char*>(args);
        capture.launches.push_back({code, *config, queue_of(*config), {bytes, driver_double::argument_bytes(symbol)}});
    } else {
        if (has_copies(config->stream)) settle(config->stream, lock);
        const Before before{latest_launches[config->stream], std::exchange(awaited[config->stream], {})};
        latest_launches[config->stream] =
            driver_double::run(code, *config, queue_of(*config), numbers[config->stream], args, before);
    }
    RETURN_IF_FAILED(enter("launch", "grid=%u,%u,%u block=%u,%u,%u shared=%u cooperative=%d args=%s", grid[0], grid[1],
                           grid[2], block[0], block[1], block[2], config->shared_bytes, cooperative,
                           first_words.c_str()));
    const uint64_t latest = latest_launches[config->stream];
    lock.unlock();  // kernels take time
    while (turn && !capturing && !driver_double::ended(latest)) continue;
    return kSuccess;
}
Result cuEventCreate(Event* event, unsigned flags) {
    BEGIN(enter_in_context("cuEventCreate"));
    if (flags != kEventDisableTiming && flags != kEventTimed) return kInvalidValue;
    *event = make<Event>();
    if (flags == kEventTimed) recorded_at[*event] = {};
    return kSuccess;
}
Result cuEventDestroy_v2(Event event) {
    BEGIN(enter_in_context("cuEventDestroy"));
    recorded_at.erase(event);
    return forget(event);
}
Result cuEventRecord(Event event, Stream stream) {
    BEGIN(enter_in_context("cuEventRecord"));
    if (!alive.count(event) || !is_stream(stream)) return kInvalidHandle;
    event_captures[event] = capture_number();
    if (capturing) return kSuccess;
    if (has_copies(stream)) settle(stream, lock);
    event_launches[event] = latest_launches[stream];
    if (const auto timed = recorded_at.find(event); timed != recorded_at.end()) timed->second = Clock::now();
    return kSuccess;
}
Result cuEventSynchronize(Event event) {
    BEGIN(enter_outside_capture("cuEventSynchronize"));
    if (!alive.count(event)) return kInvalidHandle;
    const uint64_t launch = event_launches[event];
    lock.unlock();  // kernels take time
    while (!driver_double::ended(launch)) continue;
    return kSuccess;
}
// The time between the calls that recorded the two: kernels take time only while they are waited for.
Result cuEventElapsedTime(float* milliseconds, Event begin, Event end) {
    BEGIN(enter_outside_capture("cuEventElapsedTime"));
    for (const Event event : {begin, end}) {
        const auto timed = recorded_at.find(event);
        if (!alive.count(event) || timed == recorded_at.end() || timed->second == Clock::time_point{}) {
            return kInvalidHandle;
        }
        if (!driver_double::ended(event_launches[event])) return kNotReady;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(recorded_at[end] - recorded_at[begin]).count();
    return kSuccess;
}

Result cuStreamIsCapturing(Stream, int* status) {
    BEGIN(enter_in_context("cuStreamIsCapturing"));
    *status = capturing;
    return kSuccess;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
    if (shut_down) return kDeinitialized;
    std::swap(*mode, capture_mode);
    return kSuccess;
}
int double_capture(int begin) {
    capturing = begin != 0;
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!capturing) graphs.push_back(std::exchange(capture, {}));
    return static_cast<int>(graphs.size()) - 1;
}
Result cuStreamGetCaptureInfo_v2(Stream, int* status, unsigned long long* id, Graph* graph, const GraphNode** nodes,
                                 size_t* count) {
    BEGIN(enter_in_context("cuStreamGetCaptureInfo"));
    *status = capturing;
    *id = capture_number();
    *graph = reinterpret_cast<Graph>(&capture);
    *nodes = nullptr;
    *count = 0;
    return kSuccess;
}
Result cuUserObjectCreate(UserObject* object, void* value, HostFunction destroy, unsigned references, unsigned flags) {
    BEGIN(enter_in_context("cuUserObjectCreate"));
    if (references != 1 || flags != kNoDestructorSync) return kInvalidValue;
    *object = reinterpret_cast<UserObject>(new UserObjectKept{destroy, value});
    return kSuccess;
}
Result cuGraphRetainUserObject(Graph graph, UserObject object, unsigned references, unsigned flags) {
    BEGIN(enter_in_context("cuGraphRetainUserObject"));
    if (reinterpret_cast<CapturedGraph*>(graph) != &capture || references != 1 || flags != kRetainMove) {
        return kInvalidValue;
    }
    auto* kept = reinterpret_cast<UserObjectKept*>(object);
    capture.kept.push_back(*kept);
    delete kept;
    return kSuccess;
}
// Begins a kernel of the program in a stream; returns a number that ends it.
uint64_t double_begin_kernel(Stream stream) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    return latest_launches[stream] = run_users();
}
void double_end_kernel(uint64_t number) { end_users(number); }
// Destroys the graph and everything instantiated from it.
void double_drop(int number) {
    std::unique_lock<std::recursive_mutex> lock(mutex);
    const CapturedGraph dropped = std::exchange(graphs.at(static_cast<size_t>(number)), {});
    lock.unlock();
    for (const UserObjectKept& kept : dropped.kept) kept.destroy(kept.value);
}
void double_replay(int number) {
    uint64_t latest = 0;  // each launch waits for the one before it, also in another stream
    std::unique_lock<std::recursive_mutex> lock(mutex);
    for (const Captured& launch : graphs.at(static_cast<size_t>(number)).launches) {
        const int stream = numbers[launch.config.stream];
        const Before before{latest_launches[launch.config.stream], {latest}};
        latest = driver_double::run(launch.code, launch.config, launch.queue, stream, launch.args.data(), before);
        latest_launches[launch.config.stream] = latest;
    }
    lock.unlock();
    while (!driver_double::ended(latest)) continue;
}
Result cuCtxSynchronize() {
    BEGIN(enter_outside_capture("cuCtxSynchronize"));
    const auto launches = latest_launches;
    for (const auto& [stream, launch] : launches) settle(static_cast<Stream>(const_cast<void*>(stream)), lock);
    return kSuccess;
}
Result cuStreamSynchronize(Stream stream) {
    BEGIN(enter_outside_capture("cuStreamSynchronize"));
    if (!alive.count(stream)) return kInvalidHandle;
    settle(stream, lock);
    return kSuccess;
}
}  // extern "C"
#pragma GCC visibility pop
