// Host memory with delayed stores.
#pragma once

#include <atomic>

#include "../program.h"
#include "sim/host/memory.h"

namespace protocol {

using namespace deep_ep;

// The maximum number of other fibers' turns before the first of several stores, and before each later one.
struct Delays {
    u32 first, later;
};

// Host memory as seen over a bus: stores are posted, and arrive one after the other with a delay. The highest rank's
// words are written in the order of the ranks, so its own kernels are notified last.
class SlowMemory final : public host::CpuMemory {
  public:
    // `due`: the first store may arrive.
    SlowMemory(int rank, Delays delays, std::function<bool()> due) : delays_(delays), due_(std::move(due)) {
        agent_ = cpu::Executor::get().add_agent(rank, "posted stores", [this] { serve(); });
    }
    ~SlowMemory() override { cpu::Executor::get().remove_agent(agent_); }

    void store_words(const std::vector<uint64_t*>& words, uint64_t value) override {
        if (words.size() == 1) return CpuMemory::store_words(words, value);
        words_ = words;
        value_ = value;
        posted_.store(posted_ + 1, std::memory_order_release);
        cpu::Executor::get().wait([this] { return stored_.load(std::memory_order_acquire) == posted_; }, "stores");
    }

  private:
    void serve() {
        for (;;) {
            cpu::wait_until([this] { return stored_ != posted_.load(std::memory_order_acquire); }, "posted stores");
            cpu::wait_until(due_, "posted stores");
            for (uint64_t* word : words_) {
                const u32 most = word == words_.front() ? delays_.first : delays_.later;
                for (u64 turns = cpu::Executor::get().random() % most; turns != 0; --turns) cpu::yield();
                CpuMemory::store_words({word}, value_);
            }
            stored_.store(posted_, std::memory_order_release);
        }
    }

    const Delays delays_;
    const std::function<bool()> due_;
    std::vector<uint64_t*> words_;
    uint64_t value_ = 0;
    std::atomic<u32> posted_{0}, stored_{0};
    int agent_ = -1;
};

// The same for a host thread that does nothing else meanwhile.
class LateMemory final : public host::CpuMemory {
  public:
    explicit LateMemory(u32 max_turns) : max_turns_(max_turns) {}
    void store_words(const std::vector<uint64_t*>& words, uint64_t value) override {
        for (u64 turns = cpu::Executor::get().random() % max_turns_; turns != 0; --turns) cpu::yield();
        CpuMemory::store_words(words, value);
    }

  private:
    const u32 max_turns_;
};

}  // namespace protocol
