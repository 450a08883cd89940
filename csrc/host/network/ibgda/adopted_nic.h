// The NICs of this machine, used through queue pairs that another library has created (host/network/queue_pairs.h).
// Kernels post to them as they do to software NICs, and no thread of this process is involved. They cannot be created
// anew, so a Buffer that uses them does not recover.
#pragma once

#include "fabric/ibgda.h"
#include "host/network/network.h"

namespace deep_ep::host {

class AdoptedNic final : public Network {
  public:
    explicit AdoptedNic(const NetworkPlace& place);
    AdoptedNic(const AdoptedNic&) = delete;
    AdoptedNic& operator=(const AdoptedNic&) = delete;

    void* state() override { return device_.get(); }
    uint64_t max_put_bytes(uint32_t pieces) const override;
    bool idle() const override;
    bool works() const override;

  private:
    wire::mlx5::Cqe completion(const fabric::QueuePair& queue_pair) const;
    bool has_failed(const fabric::QueuePair& queue_pair) const;
    bool idle(const fabric::QueuePair& queue_pair) const;

    Memory& memory_;
    const MadeQueuePairs made_;
    std::vector<fabric::QueuePair> queue_pairs_;  // a copy of those in `kept_`
    // Used by kernels alone.
    std::shared_ptr<void> rings_;
    std::vector<std::shared_ptr<void>> kept_;
    std::shared_ptr<void> device_;
};

}  // namespace deep_ep::host
