// Notifies ranks that are not mapped of failures that this rank's kernels have claimed (P15). Kernels notify the mapped
// ones themselves, but never through a queue pair, which may be what has failed. It also relays failures from hosts
// that cannot reach this rank's near part.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "host/heap/memory.h"

namespace deep_ep::host {

class Teller {
  public:
    struct Others {
        int rank;  // the rank whose kernels claim the failures
        uint32_t generation;
        std::vector<uint64_t*> words;                // the abort words of ranks on this machine
        std::function<void(uint64_t word)> further;  // notifies ranks on other machines; null: there are none
        const uint64_t* told;  // header word written by hosts that cannot reach the near part; null: all can
        uint64_t* own;         // this rank's abort word, into which that goes
    };

    virtual ~Teller() = default;
    Teller(const Teller&) = delete;
    Teller& operator=(const Teller&) = delete;

  protected:
    // `claimed`: Context::claimed. `memory`: exclusive to this object, so that launches of kernels and waits for them
    // do not delay it.
    Teller(const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory)
        : claimed_(claimed), others_(std::move(others)), memory_(std::move(memory)) {}

    // Whether a kernel has claimed a failure, or a host has told of one, that has not been passed on.
    bool due() const;
    // Never throws: a rank that cannot be notified finds out by its timeout.
    void tell() noexcept;

  private:
    const uint64_t* const claimed_;
    const Others others_;
    const std::unique_ptr<Memory> memory_;
    bool claims() const;
    uint64_t hears() const;

    uint64_t told_ = 0;
    uint64_t heard_ = 0;
};

// A host thread that polls every few milliseconds.
class TellerThread final : public Teller {
  public:
    TellerThread(const uint64_t* claimed, Others others, std::unique_ptr<Memory> memory);
    ~TellerThread() override;

  private:
    void serve();

    std::atomic<bool> stopping_{false};
    std::thread thread_;  // last: it uses the others
};

}  // namespace deep_ep::host
