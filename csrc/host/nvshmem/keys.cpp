#include "host/nvshmem/keys.h"

#include <algorithm>

namespace deep_ep::host::nvshmem {
namespace {

namespace nv = wire::nvshmem;

constexpr u64 kMinChunkLog2 = 12, kMaxChunkLog2 = 47;
// Maximum number of remote keys, 4 bytes each. With chunks of 512 MiB, NVSHMEM's usual size, no machine comes near it.
constexpr u64 kMaxKeys = 1ull << 28;

[[noreturn]] void refuse(const std::string& why) { throw Refused(Refusal::kKeys, why); }

std::string number(u64 value) { return std::to_string(value); }

}  // namespace

std::vector<nv::Key> Keys::read(const Key* in_state, u64 more, u64 first, u64 count) const {
    std::vector<Key> keys(count);
    const u64 near = std::min(count, nv::kKeysInState - std::min<u64>(first, nv::kKeysInState));
    std::copy_n(in_state + std::min<u64>(first, nv::kKeysInState), near, keys.begin());
    if (near < count) {
        if (more == 0)
            refuse("NVSHMEM has no keys beyond its first " + number(nv::kKeysInState) +
                   ", but the heap reaches further: allocate it before NVSHMEM's state is read");
        read_(more + (first + near - nv::kKeysInState) * sizeof(Key), keys.data() + near, (count - near) * sizeof(Key));
    }
    return keys;
}

void Keys::adopt(const Wanted& wanted, MadeQueuePairs& adopted) const {
    if (ibgda_.chunk_log2 < kMinChunkLog2 || ibgda_.chunk_log2 > kMaxChunkLog2) {
        throw Refused(Refusal::kState, "NVSHMEM's keys are for chunks of 2^" + number(ibgda_.chunk_log2) +
                                           " bytes: expected 2^" + number(kMinChunkLog2) + " to 2^" +
                                           number(kMaxChunkLog2));
    }
    const u64 chunk_log2 = ibgda_.chunk_log2, nics = ibgda_.nics, begin = wanted.heap_offset;
    const u64 end = begin + wanted.heap_bytes;
    const u64 first = begin >> chunk_log2, chunks = ((end - 1) >> chunk_log2) - first + 1, ranks = wanted.pes.size();
    // The end that a key must reach: requests are cut only at the ends of chunks.
    const auto needed = [&](u64 chunk) { return std::min((first + chunk + 1) << chunk_log2, end); };
    if (chunks > kMaxKeys / nics / ranks) {
        refuse("the heap needs " + number(chunks) + " keys for each of " + number(ranks) + " ranks and " +
               number(nics) + " NICs: set NVSHMEM_CUMEM_GRANULARITY to larger chunks than 2^" + number(chunk_log2) +
               " bytes");
    }
    const auto check = [&](const Key& key, u64 reaches, u64 chunk, const std::string& whose) {
        if (reaches >= needed(chunk)) return;
        refuse(whose + " for chunk " + number(first + chunk) + " of NVSHMEM's heap ends at byte " + number(reaches) +
               ", before byte " + number(needed(chunk)) +
               (key.end == 0 ? ": the chunk is not registered" : ": the chunk is registered in parts") +
               "; allocate this library's heap by one call of nvshmem_malloc or nvshmem_align");
    };

    adopted.nics = static_cast<u32>(nics);
    adopted.chunks = static_cast<u32>(chunks);
    adopted.chunk_log2 = static_cast<u32>(chunk_log2);
    adopted.key_offset = begin - (first << chunk_log2);

    adopted.keys.resize(chunks * nics);
    const std::vector<Key> local = read(ibgda_.keys, ibgda_.more_keys, first * nics, chunks * nics);
    for (u64 i = 0; i < local.size(); ++i) {
        // A local key ends at an address, a remote one at an offset.
        const u64 reaches = local[i].end < device_.heap ? 0 : local[i].end - device_.heap;
        check(local[i], reaches, i / nics, "NVSHMEM's local key");
        adopted.keys[i] = local[i].key;
    }

    adopted.remote_keys.resize(ranks * chunks * nics);
    for (u64 chunk = 0; chunk < chunks; ++chunk) {
        const u64 of_chunk = static_cast<u64>(device_.pes) * nics;
        const std::vector<Key> remote =
            read(ibgda_.remote_keys, ibgda_.more_remote_keys, (first + chunk) * of_chunk, of_chunk);
        for (u64 rank = 0; rank < ranks; ++rank) {
            for (u64 nic = 0; nic < nics; ++nic) {
                const Key& key = remote[wanted.pes[rank] * nics + nic];
                // This rank stores to its own heap directly, so NVSHMEM need not have a key for it.
                if (reaches(wanted, rank))
                    check(key, key.end, chunk, "NVSHMEM's key to PE " + number(wanted.pes[rank]));
                adopted.remote_keys[(rank * chunks + chunk) * nics + nic] = key.key;
            }
        }
    }
}

}  // namespace deep_ep::host::nvshmem
