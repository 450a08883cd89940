#include "host/nvshmem/adoption.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "host/nvshmem/keys.h"

namespace deep_ep::host::nvshmem {
namespace {

namespace nv = wire::nvshmem;

constexpr const char* kMoreRcs = "set NVSHMEM_IBGDA_NUM_RC_PER_PE to at least as many, on every PE";

std::string text(u32 version) {
    return std::to_string(version >> 20) + "." + std::to_string(version >> 10 & 1023) + "." +
           std::to_string(version & 1023);
}

class Adoption {
  public:
    Adoption(const Wanted& wanted, const Read& read) : wanted_(wanted), read_(read) {}

    MadeQueuePairs check() {
        check_version();
        copy_states();
        check_ibgda();
        check_nics();
        check_ranks();
        check_queues();
        MadeQueuePairs adopted{};
        adopted.queues = wanted_.queues;
        adopt_queue_pairs(adopted);
        return adopted;
    }
    MadeQueuePairs run() {
        MadeQueuePairs adopted = check();
        adopt_heaps(adopted);
        Keys(device_, ibgda_, read_).adopt(wanted_, adopted);
        return adopted;
    }

  private:
    void check_version() const {
        if (wanted_.version >> 20 != nv::kMajor || wanted_.version < nv::kOldest) {
            throw Refused(Refusal::kVersion, "NVSHMEM " + text(wanted_.version) +
                                                 " is loaded, whose queue pairs this " +
                                                 "library does not know: install nvidia-nvshmem " + text(nv::kOldest) +
                                                 " or a newer one of version " + std::to_string(nv::kMajor));
        }
    }

    void copy_states() {
        const auto copy = [](const std::vector<u8>& bytes, void* state, size_t size, const char* name) {
            if (bytes.size() < size) {
                throw Refused(Refusal::kState, std::string(name) + " has " + std::to_string(bytes.size()) +
                                                   " bytes: expected at least " + std::to_string(size));
            }
            std::memcpy(state, bytes.data(), size);
        };
        copy(wanted_.device_state, &device_, sizeof(device_), "nvshmemi_device_state_d");
        copy(wanted_.ibgda_state, &ibgda_, sizeof(ibgda_), "nvshmemi_ibgda_device_state_d");
        if (device_.pes == 0 || device_.pe >= device_.pes || device_.heap == 0) {
            throw Refused(Refusal::kState,
                          "NVSHMEM has filled no state for this module: initialize NVSHMEM with a CUDA device, then "
                          "register the module (nvshmemx_cumodule_init), then read its symbols");
        }
    }

    void check_ibgda() const {
        if (wanted_.version >= nv::kTransportSince && device_.transport == nv::kGpuNetIo) {
            throw Refused(Refusal::kIbgda,
                          "NVSHMEM's kernels use GPUNetIO (GDAKI): unset NVSHMEM_GPUNETIO_ENABLE_GDAKI, and "
                          "NVSHMEM_REMOTE_TRANSPORT if it is gpunetio, and set NVSHMEM_IB_ENABLE_IBGDA=1");
        }
        const bool in_use =
            wanted_.version >= nv::kTransportSince ? device_.transport == nv::kIbgda : device_.has_ibgda != 0;
        if (!in_use || ibgda_.nics == 0) {
            throw Refused(
                Refusal::kIbgda,
                "NVSHMEM's IBGDA is not initialized: set NVSHMEM_IB_ENABLE_IBGDA=1 on every PE before NVSHMEM "
                "is initialized; if it is set, NVSHMEM_DEBUG=INFO shows why there is no usable mlx5 NIC");
        }
        if (ibgda_.rcs_per_pe == 0) {
            throw Refused(
                Refusal::kRcs,
                "NVSHMEM has no RC queue pairs, only DCIs and DCTs: set NVSHMEM_IBGDA_NUM_RC_PER_PE to at least "
                "1 on every PE");
        }
        if (ibgda_.queue_pairs == 0) {
            throw Refused(Refusal::kIbgda,
                          "NVSHMEM has no table of RC queue pairs: set NVSHMEM_IB_ENABLE_IBGDA=1 on every PE before "
                          "NVSHMEM is initialized");
        }
        if (ibgda_.cpu_rings != 0) {
            throw Refused(Refusal::kCpuDoorbells,
                          "a thread of NVSHMEM rings the doorbells, but kernels here ring them themselves: set "
                          "NVSHMEM_IBGDA_NIC_HANDLER=gpu; the NVIDIA driver must map a NIC's registers for that: "
                          "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"");
        }
        if (device_.by_rails != 0) {
            throw Refused(
                Refusal::kRails,
                "NVSHMEM sends by rails, through other PEs of a target's node: unset NVSHMEM_ENABLE_RAIL_OPT");
        }
    }

    void check_nics() const {
        if (ibgda_.nics > nv::kMaxNics) {
            throw Refused(Refusal::kNics, "NVSHMEM names " + std::to_string(ibgda_.nics) +
                                              " NICs for a PE: expected at " + "most " + std::to_string(nv::kMaxNics));
        }
        const bool mixed_up =
            wanted_.version >= nv::kTableByQueueSince && wanted_.version < nv::kSeveralNicsSince && ibgda_.nics > 1;
        if (mixed_up) {
            throw Refused(Refusal::kNics, "NVSHMEM " + text(wanted_.version) + " mixes up the queue pairs of a PE's " +
                                              std::to_string(ibgda_.nics) +
                                              " NICs: unset NVSHMEM_IBGDA_ENABLE_MULTI_PORT, or install NVSHMEM " +
                                              text(nv::kSeveralNicsSince) + " or newer");
        }
    }

    void check_ranks() const {
        if (!wanted_.reached.empty() && wanted_.reached.size() != wanted_.pes.size()) {
            throw Refused(Refusal::kRanks, "reached has " + std::to_string(wanted_.reached.size()) + " entries for " +
                                               std::to_string(wanted_.pes.size()) + " ranks");
        }
        const std::vector<u32>& pes = wanted_.pes;
        if (wanted_.rank >= pes.size() || pes[wanted_.rank] != device_.pe) {
            throw Refused(Refusal::kRanks, "rank " + std::to_string(wanted_.rank) + " is not PE " +
                                               std::to_string(device_.pe) + ", whose state was read");
        }
        std::vector<bool> taken(device_.pes);
        for (size_t rank = 0; rank < pes.size(); ++rank) {
            if (pes[rank] >= device_.pes || taken[pes[rank]]) {
                throw Refused(Refusal::kRanks, "rank " + std::to_string(rank) + " is PE " + std::to_string(pes[rank]) +
                                                   ": expected a PE of its own, below " + std::to_string(device_.pes));
            }
            taken[pes[rank]] = true;
        }
    }

    // The number of queue pairs of one NIC to one PE, without those of nvshmemx_qp_create.
    u32 shared_per_nic() const {
        return wanted_.version >= nv::kDefaultRcsSince ? ibgda_.default_rcs_per_pe : ibgda_.rcs_per_pe;
    }

    void check_queues() const {
        const u64 there = static_cast<u64>(ibgda_.rcs_per_pe) * ibgda_.nics;
        const u64 shared = static_cast<u64>(shared_per_nic()) * ibgda_.nics;
        // nvshmemx_qp_create distributes its queue pairs to the NICs in turn, and `rcs_per_pe` is rounded down.
        const u64 behind_all = (there + ibgda_.nics) * device_.pes;
        if (shared > there) {
            throw Refused(Refusal::kState, "NVSHMEM names " + std::to_string(shared) + " shared queue pairs for a " +
                                               "PE, but only " + std::to_string(there) + " in total");
        }
        if (wanted_.handles.empty()) {
            if (wanted_.queues > shared) {
                throw Refused(Refusal::kQueues, std::to_string(wanted_.queues) +
                                                    " queue pairs per peer are requested, but NVSHMEM has " +
                                                    std::to_string(shared) + ": " + kMoreRcs);
            }
            return;
        }
        if (wanted_.handles.size() != wanted_.queues) {
            throw Refused(Refusal::kQueues, std::to_string(wanted_.handles.size()) + " handles for " +
                                                std::to_string(wanted_.queues) + " queue pairs per peer");
        }
        if (wanted_.version < nv::kTableByQueueSince) {
            throw Refused(Refusal::kQueues, "NVSHMEM " + text(wanted_.version) + " has no handles of queue pairs");
        }
        if (wanted_.counts == 0) {
            throw Refused(Refusal::kQueues, "dedicated queue pairs were given without memory for their counts");
        }
        for (const i32 handle : wanted_.handles) {
            // nvshmemx_qp_create leaves 1 if it has created none.
            const u64 place = static_cast<u32>(handle);
            if (handle < 0 || place % device_.pes != 0 || place < shared * device_.pes || place >= behind_all) {
                throw Refused(
                    Refusal::kQueues,
                    "handle " + std::to_string(handle) +
                        " is not that of a dedicated queue pair, so nvshmemx_qp_create has created none, for example "
                        "because a NIC has no more: give the Buffer a smaller num_qps_per_rank");
            }
        }
    }

    // The index of a queue pair to a PE in NVSHMEM's table. Consecutive queues belong to different NICs.
    u64 place(u32 queue, u32 pe) const {
        if (!wanted_.handles.empty()) return static_cast<u64>(wanted_.handles[queue]) + pe;
        const u64 nic = queue % ibgda_.nics, of_nic = queue / ibgda_.nics;
        if (wanted_.version < nv::kTableByQueueSince) {
            return (static_cast<u64>(pe) * ibgda_.rcs_per_pe + of_nic) * ibgda_.nics + nic;
        }
        return (nic * shared_per_nic() + of_nic) * device_.pes + pe;
    }

    nv::QueuePair read_queue_pair(u64 address) const {
        nv::QueuePair found;
        read_(address, &found, sizeof(found));
        return found;
    }
    static bool has_number(const nv::QueuePair& found) { return found.number != 0 && found.number < 1u << 24; }

    MadeQueuePair adopt_queue_pair(u32 queue, u32 pe) const {
        const u64 address = ibgda_.queue_pairs + place(queue, pe) * sizeof(nv::QueuePair);
        const nv::QueuePair found = read_queue_pair(address);
        const std::string which = "NVSHMEM's queue pair " + std::to_string(queue) + " to PE " + std::to_string(pe);
        if (found.kind != nv::kRc || !has_number(found)) {
            throw Refused(Refusal::kQueuePair,
                          which + " is " + (found.kind == nv::kRc ? "not initialized" : "not an RC") + " (number " +
                              std::to_string(found.number) + ", kind " + std::to_string(found.kind) +
                              "): use the same NVSHMEM_IBGDA_NUM_RC_PER_PE on every PE, and the NVSHMEM whose version "
                              "was read (" +
                              text(wanted_.version) + ")");
        }
        if (!std::has_single_bit(found.blocks) || found.blocks > nv::kMaxBlocks) {
            throw Refused(Refusal::kQueuePair, which + " has a ring of " + std::to_string(found.blocks) +
                                                   " WQEBBs: set NVSHMEM_QP_DEPTH to a power of two, at most " +
                                                   std::to_string(nv::kMaxBlocks));
        }
        if (found.nic >= ibgda_.nics) {
            throw Refused(Refusal::kQueuePair,
                          which + " is on NIC " + std::to_string(found.nic) + ", of " + std::to_string(ibgda_.nics));
        }
        const bool whole =
            found.ring != 0 && found.record != 0 && found.doorbell != 0 && found.completion != 0 && found.returned != 0;
        nv::CompletionQueue completions{};
        if (whole) read_(found.completion, &completions, sizeof(completions));
        if (!whole || completions.cqe == 0) {
            throw Refused(Refusal::kQueuePair, which + " lacks a part that kernels access, perhaps its doorbell: set " +
                                                   "NVSHMEM_IBGDA_NIC_HANDLER=gpu");
        }
        MadeQueuePair made{};
        made.ring = found.ring;
        made.record = found.record;
        made.doorbell = found.doorbell;
        made.cqe = completions.cqe;
        made.returned = found.returned;
        made.returned_key = found.returned_key;
        made.number = found.number;
        made.blocks = found.blocks;
        made.nic = found.nic;
        if (wanted_.handles.empty()) {
            made.reserved = address + offsetof(nv::QueuePair, reserved);
            made.filled = address + offsetof(nv::QueuePair, filled);
            made.rung = address + offsetof(nv::QueuePair, rung);
            made.completed = address + offsetof(nv::QueuePair, completed);
            made.ringing = address + offsetof(nv::QueuePair, posting);
        } else {
            const u64 counts = wanted_.counts + (static_cast<u64>(queue) * device_.pes + pe) * sizeof(OwnCounts);
            made.reserved = counts + offsetof(OwnCounts, reserved);
            made.filled = counts + offsetof(OwnCounts, filled);
            made.rung = counts + offsetof(OwnCounts, rung);
            made.completed = counts + offsetof(OwnCounts, completed);
            made.ringing = counts + offsetof(OwnCounts, ringing);
        }
        return made;
    }

    void adopt_queue_pairs(MadeQueuePairs& adopted) const {
        adopted.queue_pairs.resize(wanted_.pes.size() * wanted_.queues);
        for (u32 queue = 0; queue < wanted_.queues; ++queue) {
            // No PE has a queue pair to itself. In a table of another order this entry would belong to another PE, and
            // rows would go to the wrong PE.
            if (has_number(read_queue_pair(ibgda_.queue_pairs + place(queue, device_.pe) * sizeof(nv::QueuePair)))) {
                throw Refused(Refusal::kTable, "NVSHMEM " + text(wanted_.version) +
                                                   " does not have its queue pairs in " +
                                                   "the order known for its version: install another one");
            }
            for (size_t rank = 0; rank < wanted_.pes.size(); ++rank) {
                if (!reaches(wanted_, rank)) continue;
                adopted.queue_pairs[rank * wanted_.queues + queue] = adopt_queue_pair(queue, wanted_.pes[rank]);
            }
        }
    }

    void adopt_heaps(MadeQueuePairs& adopted) const {
        if (wanted_.heap_bytes == 0 || wanted_.heap_offset > device_.heap_bytes ||
            wanted_.heap_bytes > device_.heap_bytes - wanted_.heap_offset) {
            throw Refused(Refusal::kHeap, "bytes " + std::to_string(wanted_.heap_offset) + " to " +
                                              std::to_string(wanted_.heap_offset + wanted_.heap_bytes) +
                                              " are not within NVSHMEM's heap of " +
                                              std::to_string(device_.heap_bytes) +
                                              ": allocate with nvshmem_malloc or nvshmem_align");
        }
        if (device_.remote_heaps == 0) throw Refused(Refusal::kState, "NVSHMEM names no heaps of other PEs");
        std::vector<u64> of_pes(device_.pes);
        read_(device_.remote_heaps, of_pes.data(), of_pes.size() * sizeof(u64));
        for (size_t rank = 0; rank < wanted_.pes.size(); ++rank) {
            const u32 pe = wanted_.pes[rank];
            if (of_pes[pe] == 0 && reaches(wanted_, rank)) {
                throw Refused(Refusal::kHeap, "NVSHMEM does not name the heap of PE " + std::to_string(pe));
            }
            adopted.heaps.push_back(of_pes[pe] + wanted_.heap_offset);
        }
        adopted.heap = device_.heap + wanted_.heap_offset;
        adopted.max_bytes = nv::kMaxBytes;
    }

    const Wanted& wanted_;
    const Read& read_;
    nv::DeviceState device_{};
    nv::IbgdaState ibgda_{};
};

}  // namespace

bool reaches(const Wanted& wanted, size_t rank) {
    return rank != wanted.rank && (wanted.reached.empty() || wanted.reached[rank]);
}

MadeQueuePairs adopt(const Wanted& wanted, const Read& read) { return Adoption(wanted, read).run(); }

void check(const Wanted& wanted, const Read& read) { Adoption(wanted, read).check(); }

MakeQueuePairs adopting(Wanted wanted) {
    return [wanted = std::move(wanted)](Memory& memory, const std::vector<bool>& reached) mutable -> MadeQueuePairs {
        wanted.reached = reached;
        return adopt(wanted, [&memory](u64 address, void* bytes, size_t count) {
            memory.read(bytes, reinterpret_cast<const void*>(address), count);
        });
    };
}

SharedQueues shared_queues(u32 version, const std::vector<u8>& ibgda_state) {
    nv::IbgdaState state{};
    std::memcpy(&state, ibgda_state.data(), std::min(ibgda_state.size(), sizeof(state)));
    return {state.nics, version >= nv::kDefaultRcsSince ? state.default_rcs_per_pe : state.rcs_per_pe};
}

u64 heap_of(const std::vector<u8>& device_state) {
    nv::DeviceState state{};
    std::memcpy(&state, device_state.data(), std::min(device_state.size(), sizeof(state)));
    return state.heap;
}

}  // namespace deep_ep::host::nvshmem
