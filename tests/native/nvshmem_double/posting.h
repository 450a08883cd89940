// Posting from the host as NVSHMEM's kernels post: by the counters in its table of queue pairs, which every kernel that
// uses the same queue pairs goes by too.
#pragma once

#include <cstdint>

#include "golden.h"
#include "wire/mlx5.h"

namespace nvshmem_double {

// A row of NVSHMEM's table, found by the golden file's offsets. Valid as long as the table lies where it is.
class QueueRow {
  public:
    QueueRow(const Golden& golden, uint64_t address);

    // Hands out blocks and waits until they are free: -> the first.
    uint64_t reserve(uint64_t blocks, double seconds);
    void write(uint64_t index, const deep_ep::wire::mlx5::Block& block);
    // Makes blocks [begin, end) valid, behind those of all others before, and tells the NIC where no thread behind
    // will.
    void submit(uint64_t begin, uint64_t end, double seconds);
    // Until the NIC has done all that is valid now.
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
    uint32_t* record_;  // null: a thread of the host rings, and `doorbell_` is the word that it looks at
    uint64_t* doorbell_;
    const deep_ep::wire::mlx5::Cqe* cqe_;
    uint64_t *reserved_, *filled_, *rung_, *completed_;
    uint32_t* posting_;
};

}  // namespace nvshmem_double
