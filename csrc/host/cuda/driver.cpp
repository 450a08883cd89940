#include "host/cuda/driver.h"

#include <dlfcn.h>

#include <chrono>
#include <future>
#include <thread>

namespace deep_ep::host::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

template <class F>
void find(void* library, const char* symbol, F& function) {
    function = reinterpret_cast<F>(dlsym(library, symbol));
    if (function == nullptr) {
        throw CudaError(std::string("the CUDA driver is too old: ") + kLibrary + " has no " + symbol);
    }
}

std::string text_of(const Uuid& uuid) {
    std::string text;
    for (const char byte : uuid.bytes) {
        constexpr const char* kDigits = "0123456789abcdef";
        text += {kDigits[(byte >> 4) & 15], kDigits[byte & 15]};
    }
    return text;
}

}  // namespace

Driver::Driver() {
    // Never closed, since threads of the driver outlive this object.
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw CudaError(std::string("there is no CUDA driver: ") + dlerror());
#define DEEP_EP_FIND(name, symbol, ...) find(library, #symbol, name);
    DEEP_EP_CUDA_FUNCTIONS(DEEP_EP_FIND)
#undef DEEP_EP_FIND
#define DEEP_EP_FIND(name, symbol, ...) name = reinterpret_cast<decltype(name)>(dlsym(library, #symbol));
    DEEP_EP_CUDA_OPTIONAL_FUNCTIONS(DEEP_EP_FIND)
#undef DEEP_EP_FIND
    check(init(0), "initializing the CUDA driver");
}

const Driver& Driver::get() {
    static const Driver driver;  // retried by the next call if the constructor throws
    return driver;
}

void Driver::check(Result result, const std::string& doing) const {
    if (result == kSuccess) return;
    if (result == kDeinitialized) {  // error_name() no longer works either
        throw CudaError(doing + ": the CUDA driver has been shut down, as it is when a process ends");
    }
    const char* name = nullptr;
    const char* text = nullptr;
    error_name(result, &name);
    error_string(result, &text);
    throw CudaError(doing + ": " + (name ? name : "unknown error") + " (" + std::to_string(result) + ")" +
                    (text ? std::string(": ") + text : ""));
}

PrimaryContext::PrimaryContext(int ordinal) {
    const Driver& driver = Driver::get();
    int count = 0;
    driver.check(driver.device_count(&count), "counting GPUs");
    if (ordinal < 0 || ordinal >= count) {
        throw CudaError("cuda:" + std::to_string(ordinal) + ": there are " + std::to_string(count) + " GPUs");
    }
    const std::string what = "cuda:" + std::to_string(ordinal);
    driver.check(driver.device_get(&device_, ordinal), "opening " + what);
    char name[256] = {};
    driver.check(driver.device_name(name, sizeof(name) - 1, device_), "naming " + what);
    name_ = name;
    driver.check(driver.primary_context_retain(&context_, device_), "making the context of " + what);
}

PrimaryContext::~PrimaryContext() { Driver::get().primary_context_release(device_); }

int PrimaryContext::attribute(int which) const {
    int value = 0;
    const Driver& driver = Driver::get();
    driver.check(driver.device_attribute(&value, which, device_),
                 "asking " + name_ + " for attribute " + std::to_string(which));
    return value;
}

bool PrimaryContext::may_have_mps() const {
    int value = 0;
    return Driver::get().device_attribute(&value, kMpsEnabled, device_) != kSuccess || value != 0;
}

std::string PrimaryContext::architecture() const {
    const int major = attribute(kComputeCapabilityMajor), minor = attribute(kComputeCapabilityMinor);
    // Hopper and later have instructions that only the architecture-specific target offers.
    return "sm_" + std::to_string(10 * major + minor) + (major >= 9 ? "a" : "");
}

std::string PrimaryContext::uuid() const {
    Uuid uuid{};
    const Driver& driver = Driver::get();
    driver.check(driver.device_uuid(&uuid, device_), "asking for the UUID of cuda:" + std::to_string(device_));
    return text_of(uuid);
}

bool PrimaryContext::owns(uint64_t address) const {
    int owner = 0;
    const Driver& driver = Driver::get();
    driver.check(driver.pointer_attribute(&owner, kPointerDevice, address), "asking whose memory an address is");
    return owner == device_;
}

std::optional<PrimaryContext::Peer> PrimaryContext::peer(const std::string& uuid) const {
    const Driver& driver = Driver::get();
    int count = 0;
    driver.check(driver.device_count(&count), "counting GPUs");
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        Device other = 0;
        Uuid name{};
        // A GPU that fails is not the one in question: the other rank was able to query the UUID of its own.
        if (driver.device_get(&other, ordinal) != kSuccess || driver.device_uuid(&name, other) != kSuccess) continue;
        if (text_of(name) != uuid) continue;
        if (other == device_) return Peer{true, true};
        const auto is = [&](int which) {
            int there = 0, back = 0;
            const std::string asking =
                "asking how " + name_ + " and cuda:" + std::to_string(ordinal) + " reach each other";
            driver.check(driver.peer_attribute(&there, which, device_, other), asking);
            driver.check(driver.peer_attribute(&back, which, other, device_), asking);
            return there != 0 && back != 0;
        };
        return Peer{is(kPeerAccess), is(kPeerNativeAtomics)};
    }
    return std::nullopt;
}

bool PrimaryContext::synchronize(const std::shared_ptr<const PrimaryContext>& context, uint64_t nanoseconds) {
    // The driver's wait is unbounded, so a dedicated thread waits and keeps the context alive.
    std::packaged_task<void()> task([context] {
        const Current current(*context);
        const Driver& driver = Driver::get();
        driver.check(driver.context_synchronize(), "waiting for " + context->name());
    });
    std::future<void> ended = task.get_future();
    std::thread(std::move(task)).detach();
    if (ended.wait_for(std::chrono::nanoseconds(nanoseconds)) != std::future_status::ready) return false;
    ended.get();
    return true;
}

Result PrimaryContext::Current::enter(const PrimaryContext& context) noexcept {
    const Driver& driver = Driver::get();  // exists, since there is a context
    const Result result = driver.context_push(context.context_);
    entered_ = result == kSuccess;
    if (entered_) driver.exchange_capture_mode(&capture_mode_);
    return result;
}

PrimaryContext::Current::Current(const PrimaryContext& context) {
    Driver::get().check(enter(context), "entering the context of " + context.name_);
}

PrimaryContext::Current::Current(const PrimaryContext& context, std::nothrow_t) noexcept { enter(context); }

PrimaryContext::Current::~Current() {
    if (!entered_) return;
    const Driver& driver = Driver::get();
    driver.exchange_capture_mode(&capture_mode_);
    Context popped = nullptr;
    driver.context_pop(&popped);
}

}  // namespace deep_ep::host::cuda
