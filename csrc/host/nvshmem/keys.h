// Copies of NVSHMEM's keys for the chunks that overlap this library's heap.
#pragma once

#include "host/nvshmem/adoption.h"

namespace deep_ep::host::nvshmem {

class Keys {
  public:
    Keys(const wire::nvshmem::DeviceState& device, const wire::nvshmem::IbgdaState& ibgda, const Read& read)
        : device_(device), ibgda_(ibgda), read_(read) {}

    // Fills in `nics`, the fields about chunks, and the keys. Throws Refused.
    void adopt(const Wanted& wanted, MadeQueuePairs& adopted) const;

  private:
    using Key = wire::nvshmem::Key;

    // Reads `count` keys from `first` on: the first kKeysInState are in the state, the others in a table in device
    // memory.
    std::vector<Key> read(const Key* in_state, u64 more, u64 first, u64 count) const;

    const wire::nvshmem::DeviceState& device_;
    const wire::nvshmem::IbgdaState& ibgda_;
    const Read& read_;
};

}  // namespace deep_ep::host::nvshmem
