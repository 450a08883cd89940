#include "host/cuda/launcher.h"

#include <algorithm>

#include "host/cuda/graph_watch.h"

namespace deep_ep::host {

using cuda::CudaError;
using cuda::Driver;
using Current = cuda::PrimaryContext::Current;

namespace {

constexpr unsigned kWarpThreads = 32;
constexpr size_t kTimedEvents = 64;  // for 32 launches

}  // namespace

CudaLauncher::CudaLauncher(std::shared_ptr<const cuda::PrimaryContext> context, unsigned sharers, unsigned warps,
                           uint32_t copies_bytes, bool cooperative, std::function<void()> interrupt_check)
    : context_(std::move(context)),
      sharers_(sharers),
      warps_(warps),
      copies_bytes_(copies_bytes),
      cooperative_(cooperative),
      interrupt_check_(std::move(interrupt_check)) {
    const Current current(*context_);
    if (cooperative_ && context_->attribute(cuda::kCooperativeLaunch) == 0) {
        throw CudaError(context_->name() +
                        " cannot launch kernels whose blocks wait for each other; DEEP_EP_LAUNCH=plain "
                        "does not require that");
    }
    stream_.emplace(context_, sharers_ == 1);
    const Driver& driver = Driver::get();
    driver.check(driver.event_create(&launched_.behind, cuda::kEventDisableTiming), "making an event");
    const cuda::Result result = driver.event_create(&captured_.behind, cuda::kEventDisableTiming);
    if (result != cuda::kSuccess) driver.event_destroy(launched_.behind);
    driver.check(result, "making an event");
}

CudaLauncher::~CudaLauncher() {
    const Driver& driver = Driver::get();
    const Current current(*context_, std::nothrow);
    if (!current) return;
    for (const cuda::Event event : {launched_.behind, captured_.behind}) driver.event_destroy(event);
    forget_timed();
    for (const cuda::Event event : spare_timed_) driver.event_destroy(event);
    for (const auto& entry : kernels_) driver.module_unload(entry.second.module);
}

bool CudaLauncher::loaded(const std::string& name, const RuntimeShape& shape) const {
    return kernels_.count(key(name, shape)) != 0;
}

void CudaLauncher::load(const std::string& name, const RuntimeShape& shape, std::string_view cubin,
                        const std::string& symbol) {
    if (loaded(name, shape)) throw std::invalid_argument("kernel " + name + " is loaded already");
    const Driver& driver = Driver::get();
    const Current current(*context_);
    Kernel kernel{};
    driver.check(driver.module_load(&kernel.module, cubin.data()), "loading kernel " + name);
    try {
        driver.check(driver.module_function(&kernel.function, kernel.module, symbol.c_str()),
                     "finding " + symbol + " in kernel " + name);
        make_resident(kernel, name);
        kernels_.emplace(key(name, shape), kernel);
    } catch (...) {
        driver.module_unload(kernel.module);
        throw;
    }
}

void CudaLauncher::make_resident(Kernel& kernel, const std::string& name) {
    const Driver& driver = Driver::get();
    const auto attribute = [&](int which) {
        int value = 0;
        driver.check(driver.function_attribute(&value, which, kernel.function),
                     "asking what kernel " + name + " needs");
        return static_cast<size_t>(value);
    };
    // Dynamic shared memory beyond 48 KiB must be allowed per function; this allows all there is.
    const size_t most = static_cast<size_t>(context_->attribute(cuda::kMaxSharedPerBlockOptin));
    kernel.shared_allowed = most - std::min(attribute(cuda::kSharedSizeBytes), most);
    driver.check(driver.function_set_attribute(kernel.function, cuda::kMaxDynamicSharedSizeBytes,
                                               static_cast<int>(kernel.shared_allowed)),
                 "allowing " + name + " " + std::to_string(kernel.shared_allowed) + " bytes of shared memory");
    // If a thread needs more local memory than any before it, the driver waits for the GPU in order to make room.
    const size_t local = attribute(cuda::kLocalSizeBytes);
    size_t limit = 0;
    driver.check(driver.context_limit(&limit, cuda::kLimitStackSize), "asking for the limit of local memory");
    if (local > limit) {
        driver.check(driver.context_set_limit(cuda::kLimitStackSize, local),
                     "providing " + std::to_string(local) + " bytes of local memory for each thread of " + name);
    }
    // With lazy loading the code itself is loaded on demand; what triggers that has changed between versions.
    if (driver.function_load != nullptr) driver.check(driver.function_load(kernel.function), "loading kernel " + name);
    max_blocks(kernel, name, warps_, 0);
}

size_t CudaLauncher::max_shared_bytes() const {
    constexpr size_t kStatic = 2048;  // more than the static shared memory of any kernel here
    return static_cast<size_t>(context_->attribute(cuda::kMaxSharedPerBlockOptin)) - kStatic;
}

CudaLauncher::Kernel& CudaLauncher::find(const std::string& name, const RuntimeShape& shape) {
    const auto found = kernels_.find(key(name, shape));
    if (found == kernels_.end()) {
        throw std::out_of_range("no kernel named " + name + " is loaded for this shape: Engine.prepare comes first");
    }
    return found->second;
}

unsigned CudaLauncher::max_blocks(const std::string& name, const RuntimeShape& shape, unsigned warps,
                                  size_t shared_bytes) {
    const Current current(*context_);
    return max_blocks(find(name, shape), name, warps, shared_bytes);
}

unsigned CudaLauncher::max_blocks(Kernel& kernel, const std::string& name, unsigned warps, size_t shared_bytes) {
    if (kernel.max_blocks != 0 && kernel.warps == warps && kernel.shared_bytes == shared_bytes) {
        return kernel.max_blocks;
    }
    if (shared_bytes > kernel.shared_allowed) {
        throw CudaError(name + " with " + std::to_string(shared_bytes) + " bytes of shared memory for each block: " +
                        context_->name() + " has " + std::to_string(kernel.shared_allowed));
    }
    const Driver& driver = Driver::get();
    int per_multiprocessor = 0;
    driver.check(
        driver.occupancy(&per_multiprocessor, kernel.function, static_cast<int>(warps * kWarpThreads), shared_bytes),
        "asking how many blocks of " + name + " fit");
    kernel.warps = warps;
    kernel.shared_bytes = shared_bytes;
    return kernel.max_blocks = static_cast<unsigned>(per_multiprocessor * context_->multiprocessors()) / sharers_;
}

uint64_t CudaLauncher::launch(const char* name, const RuntimeShape& shape, unsigned blocks, unsigned warps,
                              size_t shared_bytes, const void* args, size_t) {
    return launch_grid(name, shape, blocks, 1, warps, shared_bytes, args);
}

uint64_t CudaLauncher::launch_for_ranks(const std::string& name, const RuntimeShape& shape, unsigned blocks,
                                        unsigned ranks, unsigned warps, size_t shared_bytes, const void* args) {
    return launch_grid(name, shape, blocks, ranks, warps, shared_bytes, &args);
}

bool CudaLauncher::capturing() const {
    const Current current(*context_);
    return captured();
}

GraphGone CudaLauncher::watch_graph() {
    const Current current(*context_);
    return captured() ? host::watch_graph(next_stream()) : nullptr;
}

bool CudaLauncher::captured() const { return capture_of(next_stream()) != 0; }

unsigned long long CudaLauncher::capture_of(cuda::Stream stream) {
    const Driver& driver = Driver::get();
    int status = cuda::kCaptureNone;
    driver.check(driver.stream_is_capturing(stream, &status), "asking whether a graph is being captured");
    if (status == cuda::kCaptureNone) return 0;
    unsigned long long id = 0;
    cuda::Graph graph = nullptr;
    const cuda::GraphNode* nodes = nullptr;
    size_t count = 0;
    driver.check(driver.capture_info(stream, &status, &id, &graph, &nodes, &count), "asking for the captured graph");
    return id;
}

void CudaLauncher::order_behind(Latest& latest, cuda::Stream stream) {
    if (!latest.stream || (*latest.stream == stream && !latest.ends)) return;
    const Driver& driver = Driver::get();
    if (!latest.recorded && latest.ends) throw CudaError("recording the end of the last launch has failed");
    if (!latest.recorded) {
        // Later than the launch, so that the wait covers what the caller has queued there since. Usually only the first
        // change of streams comes here.
        if (latest.capture == 0 && capture_of(*latest.stream) != 0) {
            throw CudaError(
                "the stream of the last call is being captured into a graph, so that a call on another "
                "stream cannot be ordered after it: end the capture first");
        }
        driver.check(driver.event_record(latest.behind, *latest.stream), "recording the end of a launch");
        latest.recorded = true;
    }
    several_streams_ = several_streams_ || latest.capture == 0;
    driver.check(driver.stream_wait_event(stream, latest.behind, 0), "ordering a launch after the last one");
}

uint64_t CudaLauncher::launch_grid(const std::string& name, const RuntimeShape& shape, unsigned blocks, unsigned ranks,
                                   unsigned warps, size_t shared_bytes, const void* parameter) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    Kernel& kernel = find(name, shape);
    const auto what = [&] {
        return name + ", " + std::to_string(blocks) + " blocks of " + std::to_string(warps * kWarpThreads) +
               " threads with " + std::to_string(shared_bytes) + " bytes of shared memory";
    };
    const unsigned most = max_blocks(kernel, name, warps, shared_bytes);
    if (blocks > most) {
        throw CudaError(what() + ": they wait for each other, and " + context_->name() + " holds at most " +
                        std::to_string(most) + " at once" +
                        (sharers_ > 1 ? " for each of " + std::to_string(sharers_) + " ranks" : ""));
    }
    cuda::LaunchAttribute cooperative{};
    cooperative.id = cuda::kLaunchCooperative;
    cooperative.value.cooperative = 1;
    const cuda::Stream stream = next_stream();
    const cuda::LaunchConfig config{
        {blocks, ranks, 1}, {warps * kWarpThreads, 1, 1}, static_cast<unsigned>(shared_bytes), stream,
        &cooperative,       cooperative_ ? 1u : 0u};
    void* parameters[] = {const_cast<void*>(parameter)};  // one, by value; the driver knows its size and copies it
    const unsigned long long capture = capture_of(stream);
    Latest& latest = capture == 0 ? launched_ : captured_;
    if (latest.capture != capture) latest.stream.reset();  // the launches of another graph are no part of this one
    order_behind(latest, stream);
    const bool timed = timing_ && capture == 0;
    if (timed) {
        while (spare_timed_.size() < 2) make_timed_event(driver);
        timed_.push_back({name, take_timed_event(), take_timed_event()});
        const cuda::Result result = driver.event_record(timed_.back().begin, stream);
        if (result != cuda::kSuccess) forget_timed();
        driver.check(result, "recording when " + name + " runs");
    }
    const cuda::Result result = driver.launch(&config, kernel.function, parameters, nullptr);
    if (result != cuda::kSuccess) {
        forget_timed();
        driver.check(result, (capture == 0 ? "launching " : "capturing ") + what());
    }
    // The kernel runs from now on, so nothing may keep the caller from counting it. If the event behind it fails,
    // order_behind() records it again, or throws.
    if (timed && driver.event_record(timed_.back().end, stream) != cuda::kSuccess) forget_timed();
    latest.stream = stream;
    latest.capture = capture;
    // In a graph this is no node: it only marks the place.
    latest.recorded =
        (capture != 0 || several_streams_ || ends_) && driver.event_record(latest.behind, stream) == cuda::kSuccess;
    latest.ends = ends_;
    return capture != 0 ? 0 : ++latest_;
}

void CudaLauncher::time_launches(bool timed) {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    while (timed && spare_timed_.size() < kTimedEvents) make_timed_event(driver);
    timing_ = timed;
}

void CudaLauncher::make_timed_event(const Driver& driver) {
    cuda::Event event = nullptr;
    driver.check(driver.event_create(&event, cuda::kEventTimed), "making an event that takes the time");
    spare_timed_.push_back(event);
}

cuda::Event CudaLauncher::take_timed_event() {
    const cuda::Event event = spare_timed_.back();
    spare_timed_.pop_back();
    return event;
}

std::vector<CudaLauncher::LaunchTime> CudaLauncher::take_launch_times() {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    if (!timed_.empty()) {
        driver.check(driver.event_synchronize(timed_.back().end), "waiting for the launches that are timed");
    }
    std::vector<LaunchTime> times;
    for (const Timed& timed : timed_) {
        float begin = 0, end = 0;
        driver.check(driver.event_elapsed(&begin, timed_.front().begin, timed.begin), "timing " + timed.kernel);
        driver.check(driver.event_elapsed(&end, timed_.front().begin, timed.end), "timing " + timed.kernel);
        times.push_back({timed.kernel, begin, end});
    }
    forget_timed();
    return times;
}

void CudaLauncher::forget_timed() {
    for (const Timed& timed : timed_) {
        for (const cuda::Event event : {timed.begin, timed.end}) {
            if (event != nullptr) spare_timed_.push_back(event);
        }
    }
    timed_.clear();
}

bool CudaLauncher::finished(uint64_t) const {
    const Driver& driver = Driver::get();
    const Current current(*context_);
    const cuda::Result result = driver.stream_query(stream());
    if (result != cuda::kNotReady) driver.check(result, "running kernels");
    return result == cuda::kSuccess;
}

void CudaLauncher::check() {
    finished(latest_);  // throws if a kernel has failed, which would never end the wait
    if (interrupt_check_) interrupt_check_();
}

}  // namespace deep_ep::host
