// Posting from the host as NVSHMEM's kernels post: by the counters in its table of queue pairs, which all kernels that
// use the same queue pairs follow.
#pragma once

#include <cstdint>

#include "golden.h"
#include "wire/mlx5.h"

namespace nvshmem_double {

// A row of NVSHMEM's table, found by the golden file's offsets. Valid until the table moves.
class QueueRow {
  public:
    QueueRow(const Golden& golden, uint64_t address);

    // Hands out WQEBBs and waits until they are free. Returns the index of the first.
    uint64_t reserve(uint64_t blocks, double seconds);
    void write(uint64_t index, const deep_ep::wire::mlx5::Block& block);
    // Makes WQEBBs [begin, end) valid after all earlier ones, and notifies the NIC unless a later thread will.
    void submit(uint64_t begin, uint64_t end, double seconds);
    // Waits until the NIC has completed everything that is valid now.
    void quiet(double seconds);

    uint32_t number() const { return number_; }
    uint64_t returned() const { return returned_; }
    uint32_t returned_key() const { return returned_key_; }  // big endian
    uint32_t nic() const { return nic_; }

  private:
    void await_completed(uint64_t count, double seconds);
    void ring(uint64_t end, double seconds);

    uint32_t number_, returned_key_, nic_, blocks_;
    uint64_t returned_;
    deep_ep::wire::mlx5::Block* ring_;
    uint32_t* record_;  // null: a host thread rings, and `doorbell_` is the word that it polls
    uint64_t* doorbell_;
    const deep_ep::wire::mlx5::Cqe* cqe_;
    uint64_t *reserved_, *filled_, *rung_, *completed_;
    uint32_t* posting_;
};

}  // namespace nvshmem_double
