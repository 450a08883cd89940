// Adopts queue pairs and keys from fabricated states of an NVSHMEM, with the layout of a golden file:
//
//   nvshmem_adoption tests/support/data/nvshmem/VERSION.json
//
// Prints each failure on a line, and the number of cases.
#include <algorithm>
#include <cstdio>

#include "host/nvshmem/adoption.h"
#include "nvshmem_double/states.h"

using namespace deep_ep;
using namespace nvshmem_double;
namespace nv = deep_ep::host::nvshmem;
using nv::Refusal;

namespace {

// Fabricated device memory: only allocated memory may be read.
class PretendMemory {
  public:
    u64 allocate(u64 bytes) {
        const u64 address = next_;
        blocks_[address] = Bytes(bytes, 0xee);
        next_ += bytes + 4096;
        return address;
    }
    void write(u64 address, const void* bytes, u64 count) { std::memcpy(find(address, count), bytes, count); }
    void read(u64 address, void* bytes, u64 count) { std::memcpy(bytes, find(address, count), count); }

  private:
    u8* find(u64 address, u64 count) {
        const auto behind = blocks_.upper_bound(address);
        if (behind != blocks_.begin()) {
            auto& [begin, block] = *std::prev(behind);
            if (address - begin + count <= block.size()) return block.data() + (address - begin);
        }
        throw std::runtime_error("reaches outside of device memory");
    }

    u64 next_ = 0x7c0000000000;
    std::map<u64, Bytes> blocks_;
};

// An NVSHMEM as seen by one PE, and the queue pairs and heap to adopt from it.
struct Scene {
    Scene(const Golden& golden_file, const Job& of)
        : golden(golden_file),
          job(of),
          allocate([this](u64 bytes) { return memory.allocate(bytes); }),
          write([this](u64 address, const void* bytes, u64 count) { memory.write(address, bytes, count); }),
          states(golden, job, allocate, write) {
        wanted.version = wire::nvshmem::version(static_cast<u32>(golden.major()), static_cast<u32>(golden.minor()),
                                                static_cast<u32>(golden.patch()));
        for (int pe = 0; pe < job.pes; ++pe) wanted.pes.push_back(static_cast<u32>(pe));
        wanted.rank = static_cast<u32>(job.pe);
        wanted.heap_offset = 0x40000;
        wanted.heap_bytes = 1 << 20;
        wanted.queues = static_cast<u32>(job.rcs * job.nics);
    }

    deep_ep::host::MadeQueuePairs adopt() { return nv::adopt(as_filled_in(), reader()); }
    void check() { nv::check(as_filled_in(), reader()); }

    const nv::Wanted& as_filled_in() {
        wanted.device_state = states.device;
        wanted.ibgda_state = states.ibgda;
        return wanted;
    }
    nv::Read reader() {
        return [this](u64 address, void* bytes, size_t count) { memory.read(address, bytes, count); };
    }

    const Golden& golden;
    const Job job;
    PretendMemory memory;
    const Allocate allocate;
    const Write write;
    States states;
    nv::Wanted wanted{};
};

class Cases {
  public:
    explicit Cases(const Golden& golden) : golden_(golden) {}

    int run() {
        adoptions();
        group_in_another_order();
        created_queue_pairs();
        some_are_not_reached();
        for (const bool several : {false, true}) keys_beyond_the_state(several);
        not_before_ibgda();
        not_without_their_parts();
        not_of_another_order();
        not_of_unknown_versions();
        not_with_wrong_arguments();
        not_with_keys_that_end_early();
        std::printf("%d cases, %d wrong\n", cases_, wrong_);
        return wrong_ != 0;
    }

  private:
    // Releases from 3.5 to before 3.7 mix them up.
    bool serves_several_nics() const { return !golden_.is_at_least(5) || golden_.is_at_least(7); }

    void expect(bool holds, const std::string& what) {
        if (holds) return;
        ++wrong_;
        std::printf("%s\n", what.c_str());
    }

    // --- what is adopted --------------------------------------------------------------------------------------------

    void check(const std::string& name, Scene& scene) {
        ++cases_;
        try {
            compare(name, scene, scene.adopt());
        } catch (const std::exception& error) {
            expect(false, name + ": " + error.what());
        }
    }

    void compare(const std::string& name, Scene& scene, const deep_ep::host::MadeQueuePairs& adopted) {
        const Job& job = scene.job;
        const nv::Wanted& wanted = scene.wanted;
        const auto same = [&](const std::string& what, u64 got, u64 expected) {
            if (got != expected) {
                expect(false, name + ": " + what + " is " + std::to_string(got) + ", not " + std::to_string(expected));
            }
        };
        const u64 first = wanted.heap_offset >> job.chunk_log2;
        const u64 chunks = ((wanted.heap_offset + wanted.heap_bytes - 1) >> job.chunk_log2) - first + 1;
        same("nics", adopted.nics, static_cast<u64>(job.nics));
        same("chunks", adopted.chunks, chunks);
        same("chunk_log2", adopted.chunk_log2, static_cast<u64>(job.chunk_log2));
        same("key_offset", adopted.key_offset, wanted.heap_offset - (first << job.chunk_log2));
        same("max_bytes", adopted.max_bytes, 1 << 30);
        same("heap", adopted.heap, job.heap + wanted.heap_offset);
        same("queue pairs", adopted.queue_pairs.size(), wanted.pes.size() * wanted.queues);
        for (size_t rank = 0; rank < wanted.pes.size(); ++rank) {
            const int pe = static_cast<int>(wanted.pes[rank]);
            const u64 heap = pe == job.pe ? job.heap : remote_heap_of(pe);
            same("heap of a rank", adopted.heaps[rank], heap + wanted.heap_offset);
            for (u32 queue = 0; queue < wanted.queues; ++queue) {
                const deep_ep::host::MadeQueuePair& pair = adopted.queue_pairs[rank * wanted.queues + queue];
                const int nic = static_cast<int>(queue) % job.nics, of_nic = static_cast<int>(queue) / job.nics;
                const u64 index = wanted.handles.empty() ? scene.states.index(pe, of_nic, nic)
                                                         : static_cast<u64>(wanted.handles[queue] + pe);
                if (pe == job.pe) {
                    same("number of none", pair.number, 0);
                    continue;
                }
                const Parts parts = made_up(index);
                const u64 address = scene.states.address_of(index);
                same("ring", pair.ring, parts.ring);
                same("record", pair.record, parts.record);
                same("doorbell", pair.doorbell, parts.doorbell);
                same("cqe", pair.cqe, parts.cqe);
                same("returned", pair.returned, parts.returned);
                same("returned_key", pair.returned_key, parts.returned_key);
                same("number", pair.number, parts.number);
                same("blocks", pair.blocks, job.blocks);
                same("nic", pair.nic, static_cast<u64>(nic));
                const bool own = !wanted.handles.empty();
                const u64 place = queue * static_cast<u64>(job.pes) + static_cast<u64>(pe);
                const auto counted = [&](const char* name, u64 in_own) {
                    return own ? wanted.counts + place * 64 + in_own : address + golden_.offset(name);
                };
                same("reserved", pair.reserved, counted("QueuePair.reserved", 0));
                same("filled", pair.filled, counted("QueuePair.filled", 8));
                same("rung", pair.rung, counted("QueuePair.rung", 16));
                same("completed", pair.completed, counted("QueuePair.completed", 24));
                same("ringing", pair.ringing, counted("QueuePair.posting", 32));
            }
            for (u64 chunk = 0; chunk < chunks; ++chunk) {
                const int all = static_cast<int>(first + chunk), key = all - all % job.chunks_of_key;
                for (int nic = 0; nic < job.nics; ++nic) {
                    const u64 at = chunk * static_cast<u64>(job.nics) + static_cast<u64>(nic);
                    same("key", adopted.keys[at], key_of(key, nic));
                    same("remote key", adopted.remote_keys[rank * chunks * static_cast<u64>(job.nics) + at],
                         remote_key_of(key, pe, nic));
                }
            }
        }
    }

    void adoptions() {
        Scene plain(golden_, {});
        check("two queue pairs to each of four PEs", plain);

        Scene few(golden_, {.rcs = 8, .blocks = 128});
        few.wanted.queues = 3;
        check("fewer queue pairs than there are", few);

        Scene two(golden_, {.pes = 2, .pe = 0, .rcs = 3, .blocks = 32768});
        check("two PEs", two);

        Scene across(golden_, {.chunks = 5});
        across.wanted.heap_offset = (1ull << 29) + 4096;
        across.wanted.heap_bytes = 3ull << 29;
        check("a heap that begins within a chunk", across);

        Scene whole(golden_, {.chunks = 5});
        whole.wanted.heap_offset = 1ull << 29;
        whole.wanted.heap_bytes = 4ull << 29;
        check("a heap that ends with NVSHMEM's", whole);

        Scene at_once(golden_, {.chunks = 6, .chunks_of_key = 3});
        at_once.wanted.heap_offset = 2ull << 29;
        at_once.wanted.heap_bytes = 2ull << 29;
        check("chunks that were registered at once", at_once);

        if (serves_several_nics()) {
            Scene nics(golden_, {.pes = 3, .nics = 4, .rcs = 2, .chunks = 3});
            nics.wanted.heap_bytes = 2ull << 29;
            check("four NICs", nics);
        } else {
            Scene nics(golden_, {.nics = 2});
            refused("two NICs", nics, Refusal::kNics, "NVSHMEM_IBGDA_ENABLE_MULTI_PORT");
        }
    }

    void group_in_another_order() {
        Scene group(golden_, {.pes = 6, .pe = 4, .rcs = 3, .chunks = 12});
        group.wanted.pes = {5, 0, 4, 2};
        group.wanted.rank = 2;
        group.wanted.heap_offset = 7ull << 29;
        group.wanted.heap_bytes = 4ull << 29;
        check("ranks that are some of the PEs in another order", group);
    }

    void created_queue_pairs() {
        Scene own(golden_, {.created = 3});
        own.wanted.queues = 3;
        for (int n = 0; n < 3; ++n) own.wanted.handles.push_back(own.states.handle(n));
        if (golden_.is_at_least(5)) {
            refused("without memory for counts", own, Refusal::kQueues, "without memory for their counts");
            own.wanted.counts = 0x7b0000000000;
            check("queue pairs that were created", own);
            for (const i32 handle : {1, -4, own.states.handle(0) - 4, own.states.handle(1) + 1, own.states.handle(5)}) {
                own.wanted.handles[1] = handle;
                refused("handle " + std::to_string(handle), own, Refusal::kQueues, "a smaller num_qps_per_rank");
            }
        } else {
            refused("handles", own, Refusal::kQueues, "no handles");
        }
        if (golden_.is_at_least(7)) {
            Scene nics(golden_, {.nics = 2, .created = 3});
            nics.wanted.queues = 3;
            nics.wanted.counts = 0x7b0000000000;
            for (int n = 0; n < 3; ++n) nics.wanted.handles.push_back(nics.states.handle(n));
            check("queue pairs that were created, in turn on two NICs", nics);
        }
        if (golden_.is_at_least(5)) {
            Scene both(golden_, {.created = 5});
            both.wanted.queues = 3;
            refused("shared ones, though only others' own are left", both, Refusal::kQueues,
                    "NVSHMEM_IBGDA_NUM_RC_PER_PE");
        }
    }

    // A PE that need not be reached may lack queue pairs, heap and keys; before there is a heap, keys may be missing
    // too.
    void some_are_not_reached() {
        Scene near(golden_, {});
        const u64 lacking = near.states.index(3, 0, 0);
        near.states.put_queue_pair(lacking, "number", golden_.number("kNoNumber"));
        refused("a queue pair that is not there", near, Refusal::kQueuePair, "not initialized");
        near.wanted.reached = {true, true, true};
        refused("of too few ranks", near, Refusal::kRanks, "3 entries for 4 ranks");
        near.wanted.reached = {true, true, true, false};
        near.states.put_key(true, 3, 0, 0);
        ++cases_;
        const deep_ep::host::MadeQueuePairs adopted = near.adopt();
        expect(adopted.queue_pairs[6].number == 0 && adopted.queue_pairs[4].number != 0,
               "the way to rank 3 is left out");

        Scene early(golden_, {});
        early.wanted.heap_bytes = 0;
        early.states.put_key(false, 0, 0, 0);
        ++cases_;
        early.check();
        early.states.put_ibgda("cpu_rings", 1);
        try {
            early.check();
            expect(false, "doorbells by the CPU pass before there is a heap");
        } catch (const nv::Refused& refused) {
            expect(refused.refusal() == Refusal::kCpuDoorbells, refused.what());
        }
        expect(nv::heap_of(early.states.device) == early.job.heap, "where the heap is");
        expect(nv::heap_of({}) == 0, "where no heap is");
        const nv::SharedQueues shared = nv::shared_queues(early.wanted.version, early.states.ibgda);
        expect(shared.nics * shared.per_nic == 2, "how many are shared");
    }

    // 64 keys of each kind are in the state.
    void keys_beyond_the_state(bool several) {
        if (several && !serves_several_nics()) return;
        const int nics = several ? 3 : 1;
        Scene far(golden_, {.nics = nics, .chunks = 100});
        for (const u64 begin : {0, 10, 20, 21, 30, 63, 64, 90}) {
            far.wanted.heap_offset = (begin << 29) + 8192;
            far.wanted.heap_bytes = 9ull << 29;
            check("keys from chunk " + std::to_string(begin) + " on", far);
        }
        far.states.put_ibgda("more_keys", 0);
        refused("no table of more keys", far, Refusal::kKeys, "no keys beyond");
    }

    // --- what is refused --------------------------------------------------------------------------------------------

    void refused(const std::string& name, Scene& scene, Refusal refusal, const std::string& advice) {
        ++cases_;
        try {
            scene.adopt();
            expect(false, name + ": was adopted");
        } catch (const nv::Refused& error) {
            const std::string said = error.what();
            expect(error.refusal() == refusal && said.find(advice) != std::string::npos, name + ": " + said);
        } catch (const std::exception& error) {
            expect(false, name + ": " + error.what());
        }
    }

    void not_before_ibgda() {
        Scene off(golden_, {.rcs = 0});
        std::fill(off.states.ibgda.begin(), off.states.ibgda.end(), u8{0});
        off.states.put_device("has_ibgda", 0);
        off.states.put_device("transport", 0);
        refused("IBGDA is off", off, Refusal::kIbgda, "NVSHMEM_IB_ENABLE_IBGDA=1");

        Scene unset(golden_, {});
        std::fill(unset.states.ibgda.begin(), unset.states.ibgda.end(), u8{0});
        refused("the state of IBGDA was not copied", unset, Refusal::kIbgda, "NVSHMEM_IB_ENABLE_IBGDA=1");

        Scene no_table(golden_, {});
        no_table.states.put_ibgda("queue_pairs", 0);
        refused("no table", no_table, Refusal::kIbgda, "NVSHMEM_IB_ENABLE_IBGDA=1");

        Scene blank(golden_, {});
        std::fill(blank.states.device.begin(), blank.states.device.end(), u8{0});
        refused("no state", blank, Refusal::kState, "nvshmemx_cumodule_init");

        if (golden_.has("kGpuNetIo")) {
            Scene gdaki(golden_, {});
            gdaki.states.put_device("transport", golden_.number("kGpuNetIo"));
            refused("GPUNetIO", gdaki, Refusal::kIbgda, "NVSHMEM_GPUNETIO_ENABLE_GDAKI");
        }
        // Which of the two fields counts depends on the version.
        const bool by_transport = golden_.has("DeviceState.transport");
        Scene other(golden_, {});
        other.states.put_device(by_transport ? "has_ibgda" : "transport", 0);
        check("the field that does not count", other);
        Scene one(golden_, {});
        one.states.put_device(by_transport ? "transport" : "has_ibgda", 0);
        refused("the field that counts", one, Refusal::kIbgda, "NVSHMEM_IB_ENABLE_IBGDA=1");

        Scene dci(golden_, {.rcs = 0});
        refused("DCIs alone", dci, Refusal::kRcs, "NVSHMEM_IBGDA_NUM_RC_PER_PE");

        Scene assisted(golden_, {});
        assisted.states.put_ibgda("cpu_rings", 1);
        refused("a CPU rings", assisted, Refusal::kCpuDoorbells, "NVSHMEM_IBGDA_NIC_HANDLER=gpu");

        Scene rails(golden_, {});
        rails.states.put_device("by_rails", 1);
        refused("rails", rails, Refusal::kRails, "NVSHMEM_ENABLE_RAIL_OPT");

        Scene crowd(golden_, {});
        crowd.states.put_ibgda("nics", 16);
        refused("16 NICs", crowd, Refusal::kNics, "at most 15");
    }

    void not_without_their_parts() {
        const auto with = [&](const char* field, u64 value, const std::string& advice) {
            Scene scene(golden_, {});
            scene.states.put_queue_pair(scene.states.index(3, 1, 0), field, value);
            refused(std::string(field) + " " + std::to_string(value), scene, Refusal::kQueuePair, advice);
        };
        with("kind", golden_.number("kDci"), "not an RC");
        with("number", golden_.number("kNoNumber"), "NVSHMEM_IBGDA_NUM_RC_PER_PE");
        with("number", 0, "not initialized");
        with("number", 1 << 24, "not initialized");
        for (const u64 blocks : {0, 96, 1000, 65535}) with("blocks", blocks, "NVSHMEM_QP_DEPTH");
        with("nic", 1, "on NIC 1");
        for (const char* field : {"ring", "record", "doorbell", "completion", "returned"}) {
            with(field, 0, "NVSHMEM_IBGDA_NIC_HANDLER=gpu");
        }
    }

    // A state of one layout read as the other.
    void not_of_another_order() {
        Scene scene(golden_, {.pes = 4, .pe = 1, .rcs = 3});
        if (golden_.is_at_least(5)) {
            scene.wanted.version = wire::nvshmem::version(3, 4, 5);
            refused("a table by queue, read as one by PE", scene, Refusal::kTable, "another one");
        } else {
            scene.wanted.version = wire::nvshmem::version(3, 8, 0);
            refused("a state without a transport, read as one with", scene, Refusal::kIbgda,
                    "NVSHMEM_IB_ENABLE_IBGDA=1");
        }

        Scene loop(golden_, {});
        loop.states.put_queue_pair(loop.states.index(loop.job.pe, 1, 0), "number", 77);
        refused("a queue pair to this PE itself", loop, Refusal::kTable, "another one");
    }

    void not_of_unknown_versions() {
        const auto with = [&](u32 major, u32 minor, u32 patch) {
            Scene scene(golden_, {});
            scene.wanted.version = wire::nvshmem::version(major, minor, patch);
            refused("version " + std::to_string(major) + "." + std::to_string(minor), scene, Refusal::kVersion,
                    "3.4.5");
        };
        with(2, 11, 0);
        with(3, 4, 4);
        with(3, 3, 24);
        with(4, 0, 0);
        if (golden_.is_at_least(8)) {
            Scene next(golden_, {});
            next.wanted.version = wire::nvshmem::version(3, 11, 2);
            check("a later release of this major version", next);
        }
    }

    void not_with_wrong_arguments() {
        const auto with = [&](const char* name, Refusal refusal, const char* advice, const auto& change) {
            Scene scene(golden_, {});
            change(scene);
            refused(name, scene, refusal, advice);
        };
        with("too short a device state", Refusal::kState, "nvshmemi_device_state_d has 775 bytes",
             [](Scene& scene) { scene.states.device.resize(775); });
        with("too short a state of IBGDA", Refusal::kState, "nvshmemi_ibgda_device_state_d has 64 bytes",
             [](Scene& scene) { scene.states.ibgda.resize(64); });
        with("another PE's rank", Refusal::kRanks, "is not PE 1", [](Scene& scene) { scene.wanted.rank = 2; });
        with("no such rank", Refusal::kRanks, "is not PE 1", [](Scene& scene) { scene.wanted.rank = 4; });
        with("no such PE", Refusal::kRanks, "below 4", [](Scene& scene) { scene.wanted.pes[3] = 4; });
        with("a PE twice", Refusal::kRanks, "of its own", [](Scene& scene) { scene.wanted.pes[3] = 0; });
        with("too many queues", Refusal::kQueues, "NVSHMEM_IBGDA_NUM_RC_PER_PE",
             [](Scene& scene) { scene.wanted.queues = 3; });
        with("too few handles", Refusal::kQueues, "1 handles for 2",
             [](Scene& scene) { scene.wanted.handles = {scene.states.handle(0)}; });
        with("no heap", Refusal::kHeap, "nvshmem_malloc", [](Scene& scene) { scene.wanted.heap_bytes = 0; });
        with("beyond the heap", Refusal::kHeap, "nvshmem_malloc",
             [](Scene& scene) { scene.wanted.heap_offset = 4ull << 29; });
        with("across the heap's end", Refusal::kHeap, "nvshmem_malloc",
             [](Scene& scene) { scene.wanted.heap_offset = (4ull << 29) - 8; });
        with("no heaps", Refusal::kState, "heaps of other PEs",
             [](Scene& scene) { scene.states.put_device("remote_heaps", 0); });
        with("no heap of a PE", Refusal::kHeap, "heap of PE 2", [](Scene& scene) {
            std::vector<u64> heaps = {remote_heap_of(0), scene.job.heap, 0, remote_heap_of(3)};
            const u64 address = scene.allocate(heaps.size() * sizeof(u64));
            scene.write(address, heaps.data(), heaps.size() * sizeof(u64));
            scene.states.put_device("remote_heaps", address);
        });
    }

    void not_with_keys_that_end_early() {
        const auto with = [&](const std::string& name, const char* advice, const auto& change) {
            Scene scene(golden_, {});
            scene.wanted.heap_bytes = 2ull << 29;
            change(scene);
            refused(name, scene, Refusal::kKeys, advice);
        };
        const u64 chunk = 1ull << 29;
        with("a local key that ends within the chunk", "in parts",
             [&](Scene& scene) { scene.states.put_key(false, 1, 5, scene.job.heap + 2 * chunk - 1); });
        with("a local key for nothing", "not registered", [&](Scene& scene) { scene.states.put_key(false, 0, 0, 0); });
        with("a remote key that ends within the chunk", "to PE 3",
             [&](Scene& scene) { scene.states.put_key(true, 4 + 3, 5, 2 * chunk - 1); });
        with("a remote key for nothing", "not registered", [&](Scene& scene) { scene.states.put_key(true, 2, 0, 0); });
        with("too many keys", "NVSHMEM_CUMEM_GRANULARITY", [&](Scene& scene) {
            scene.states.put_ibgda("chunk_log2", 12);
            scene.states.put_device("heap_bytes", 1ull << 46);
            scene.wanted.heap_bytes = 1ull << 40;
        });
        // The last chunk's key need only extend to the heap's end, and keys to this PE are not used.
        Scene last(golden_, {});
        last.states.put_key(false, 0, key_of(0, 0), last.job.heap + last.wanted.heap_offset + last.wanted.heap_bytes);
        last.states.put_key(true, 1, remote_key_of(0, 1, 0), 0);
        check("keys that end where the heap does", last);

        for (const u64 log2 : {0, 11, 48}) {
            Scene scene(golden_, {});
            scene.states.put_ibgda("chunk_log2", log2);
            refused("chunks of 2^" + std::to_string(log2), scene, Refusal::kState, "2^12 to 2^47");
        }
    }

    const Golden& golden_;
    int cases_ = 0, wrong_ = 0;
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return std::fprintf(stderr, "usage: nvshmem_adoption GOLDEN\n"), 2;
    return Cases(Golden(arguments[1])).run();
}
