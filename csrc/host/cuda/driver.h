// The CUDA driver, opened on first use: importing the library and using it on a CPU never touches the driver.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "host/cuda/driver_types.h"

namespace deep_ep::host::cuda {

// An error of the driver, preceded by what was being done; or the absence of a driver.
class CudaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The driver's functions, under the names in DEEP_EP_CUDA_FUNCTIONS.
class Driver {
  public:
    // Opens the library and initializes it. Throws CudaError, at every call, if that fails.
    static const Driver& get();

#define DEEP_EP_DECLARE(name, symbol, ...) Result (*name)(__VA_ARGS__) = nullptr;
    DEEP_EP_CUDA_FUNCTIONS(DEEP_EP_DECLARE)
    DEEP_EP_CUDA_OPTIONAL_FUNCTIONS(DEEP_EP_DECLARE)
#undef DEEP_EP_DECLARE

    // Throws CudaError with the driver's text if `result` is a failure.
    void check(Result result, const std::string& doing) const;

  private:
    Driver();
};

// A device's primary context, which torch uses too. It is current on the calling thread while a Current lives.
// Meanwhile the thread may do things, such as allocate, that a capture in progress on some stream would otherwise
// forbid; they are not done on that stream.
//
// No destructor or deleter of objects that belong to a context throws, even if the driver has been shut down.
class PrimaryContext {
  public:
    explicit PrimaryContext(int ordinal);
    ~PrimaryContext();
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;

    class Current {
      public:
        explicit Current(const PrimaryContext& context);
        // For destructors, which must not throw: the object is false if it cannot be done. In that case the driver has
        // been shut down because the process ends, and its resources no longer exist.
        Current(const PrimaryContext& context, std::nothrow_t) noexcept;
        ~Current();
        explicit operator bool() const { return entered_; }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        cuda::Result enter(const PrimaryContext& context) noexcept;

        bool entered_ = false;
        int capture_mode_ = kCaptureRelaxed;  // while current: the original mode of the thread
    };

    int ordinal() const { return device_; }
    const std::string& name() const { return name_; }
    std::string architecture() const;  // as NVRTC expects it: "sm_90a"
    int multiprocessors() const { return attribute(kMultiprocessorCount); }
    int attribute(int which) const;
    // Whether processes share the GPU by MPS, so that their kernels run at the same time; also if an old driver cannot
    // tell.
    bool may_have_mps() const;
    // 32 hexadecimal digits, unique to the GPU.
    std::string uuid() const;
    // Whether the memory at a device address belongs to this GPU.
    bool owns(uint64_t address) const;

    // How the kernels of each of two GPUs may use the memory of the other.
    struct Peer {
        bool access;          // by loads and stores
        bool native_atomics;  // by atomics that are atomic for the other GPU too
    };
    // Returns nothing if this process does not see the other GPU.
    std::optional<Peer> peer(const std::string& uuid) const;

    // Waits until all work in the context has ended, for at most `nanoseconds`. Returns whether it has.
    static bool synchronize(const std::shared_ptr<const PrimaryContext>& context, uint64_t nanoseconds);

  private:
    Device device_ = 0;
    Context context_ = nullptr;
    std::string name_;
};

}  // namespace deep_ep::host::cuda
