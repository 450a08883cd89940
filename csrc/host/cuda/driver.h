// The CUDA driver, opened when it is first needed: importing and using the library on a CPU never touches it.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/cuda/driver_types.h"

namespace deep_ep::host::cuda {

// What the driver says, behind what we were doing; or that there is no driver.
class CudaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The driver's functions, by the names of DEEP_EP_CUDA_FUNCTIONS.
class Driver {
  public:
    // Opens the library and initialises it; throws CudaError, at every call, where that fails.
    static const Driver& get();

#define DEEP_EP_DECLARE(name, symbol, ...) Result (*name)(__VA_ARGS__) = nullptr;
    DEEP_EP_CUDA_FUNCTIONS(DEEP_EP_DECLARE)
    DEEP_EP_CUDA_OPTIONAL_FUNCTIONS(DEEP_EP_DECLARE)
#undef DEEP_EP_DECLARE

    // Throws CudaError with the driver's text where `result` is a failure.
    void check(Result result, const std::string& doing) const;

  private:
    Driver();
};

// A device's primary context, which torch uses too; current on the calling thread while a Current lives. Meanwhile that
// thread may do what a capture under way on some stream would forbid it, such as allocate: it is not done on that
// stream.
//
// No destructor or deleter of what belongs to a context throws, also where the driver has been shut down.
class PrimaryContext {
  public:
    explicit PrimaryContext(int ordinal);
    ~PrimaryContext();
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;

    class Current {
      public:
        explicit Current(const PrimaryContext& context);
        // For destructors, which must not throw: false where that cannot be done. Then the driver has been shut down,
        // as the process ends, and what it had is gone with it.
        Current(const PrimaryContext& context, std::nothrow_t) noexcept;
        ~Current();
        explicit operator bool() const { return entered_; }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        cuda::Result enter(const PrimaryContext& context) noexcept;

        bool entered_ = false;
        int capture_mode_ = kCaptureRelaxed;  // while current: the thread's own
    };

    int ordinal() const { return device_; }
    const std::string& name() const { return name_; }
    std::string architecture() const;  // as NVRTC wants it: "sm_90a"
    int multiprocessors() const { return attribute(kMultiprocessorCount); }
    int attribute(int which) const;
    // 32 hexadecimal digits that no other GPU has.
    std::string uuid() const;
    // Whether memory at a device address is this GPU's, and not another's.
    bool owns(uint64_t address) const;

    // How kernels of one GPU may use the memory of another.
    struct Peer {
        bool access;          // by loads and stores
        bool native_atomics;  // and by atomics that are atomic for the other too
    };
    // Nothing where this process does not see the other.
    std::optional<Peer> peer(const std::string& uuid) const;

    // Until all that runs in the context has ended, or so long: -> whether it has.
    static bool synchronize(const std::shared_ptr<const PrimaryContext>& context, uint64_t nanoseconds);

  private:
    Device device_ = 0;
    Context context_ = nullptr;
    std::string name_;
};

}  // namespace deep_ep::host::cuda
