// Prints the tables of wire/nvshmem.h in the format of scripts/nvshmem_layouts.py for NVSHMEM's: a line for the size of
// each, for the offset and size of each field, for each value; and for each later addition, the first version that has
// it.
#include <cstddef>
#include <cstdio>

#include "wire/nvshmem.h"

using namespace deep_ep;
using namespace deep_ep::wire::nvshmem;

#define TABLE(type) std::printf(#type " %zu\n", sizeof(type))
#define FIELD(type, field) std::printf(#type "." #field " %zu %zu\n", offsetof(type, field), sizeof(type::field))
#define VALUE(name) std::printf(#name " %u\n", static_cast<u32>(name))

namespace {

void since(const char* name, u32 version) {
    std::printf("since %s %u.%u.%u\n", name, version >> 20, version >> 10 & 1023, version & 1023);
}

}  // namespace

int main() {
    TABLE(DeviceState);
    FIELD(DeviceState, pe);
    FIELD(DeviceState, pes);
    FIELD(DeviceState, heap);
    FIELD(DeviceState, heap_bytes);
    FIELD(DeviceState, remote_heaps);
    FIELD(DeviceState, by_rails);
    FIELD(DeviceState, has_ibgda);
    FIELD(DeviceState, transport);
    TABLE(Key);
    FIELD(Key, key);
    FIELD(Key, end);
    TABLE(IbgdaState);
    FIELD(IbgdaState, rcs_per_pe);
    FIELD(IbgdaState, chunk_log2);
    FIELD(IbgdaState, nics);
    FIELD(IbgdaState, cpu_rings);
    FIELD(IbgdaState, keys);
    FIELD(IbgdaState, remote_keys);
    FIELD(IbgdaState, queue_pairs);
    FIELD(IbgdaState, more_keys);
    FIELD(IbgdaState, more_remote_keys);
    FIELD(IbgdaState, default_rcs_per_pe);
    TABLE(QueuePair);
    FIELD(QueuePair, kind);
    FIELD(QueuePair, number);
    FIELD(QueuePair, nic);
    FIELD(QueuePair, returned);
    FIELD(QueuePair, returned_key);
    FIELD(QueuePair, blocks);
    FIELD(QueuePair, ring);
    FIELD(QueuePair, record);
    FIELD(QueuePair, doorbell);
    FIELD(QueuePair, completion);
    FIELD(QueuePair, posting);
    FIELD(QueuePair, reserved);
    FIELD(QueuePair, filled);
    FIELD(QueuePair, rung);
    FIELD(QueuePair, completed);
    TABLE(CompletionQueue);
    FIELD(CompletionQueue, cqe);
    VALUE(kProxy);
    VALUE(kIbgda);
    VALUE(kGpuNetIo);
    VALUE(kDci);
    VALUE(kDct);
    VALUE(kRc);
    VALUE(kNoNumber);
    VALUE(kNotInitialized);
    VALUE(kBootstrapped);
    VALUE(kInitialized);
    VALUE(kLimitedMpg);
    VALUE(kFullMpg);
    VALUE(kMaxNics);
    VALUE(kKeysInState);
    VALUE(kMaxBlocks);
    VALUE(kSlotBytes);
    since("IbgdaState.default_rcs_per_pe", kDefaultRcsSince);
    since("DeviceState.transport", kTransportSince);
}
