// The state that NVSHMEM's host library keeps for the kernels of one PE, built from a golden file: the two state
// structs, and the tables in device memory that they point to. The caller decides where a table is, so that a test can
// invent addresses and a stand-in for the library can allocate.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "golden.h"

namespace nvshmem_double {

// The parts of a queue pair that the host library allocates.
struct Parts {
    uint64_t ring, record, doorbell, cqe, returned;
    uint32_t returned_key, number;
};

// Fabricated parts, by index in the table.
inline Parts made_up(uint64_t index) {
    const uint64_t at = 0x7e0000000000 + index * 0x100000;
    const auto low = static_cast<uint32_t>(index);
    return {at, at + 0x80004, at + 0x90000, at + 0xa0000, at + 0xb0000, 0x51000000 + low, 0x1000 + low};
}
inline uint32_t key_of(int chunk, int nic) { return 0xa0000000u + static_cast<uint32_t>(chunk << 8 | nic); }
inline uint32_t remote_key_of(int chunk, int pe, int nic) {
    return 0xb0000000u + static_cast<uint32_t>(chunk << 16 | pe << 4 | nic);
}
inline uint64_t remote_heap_of(int pe) { return 0x7d0000000000 + (static_cast<uint64_t>(pe) << 36); }

struct Job {
    int pes = 4;
    int pe = 1;
    int nics = 1;
    int rcs = 2;      // per PE and NIC, initially
    int created = 0;  // by nvshmemx_qp_create, per PE
    uint64_t heap = 0x7f2000000000;
    int chunk_log2 = 29;
    int chunks = 4;
    // Number of chunks that are registered at once, and so share a key.
    int chunks_of_key = 1;
    uint32_t blocks = 1024;
    int registered = -1;     // chunks that already have keys; -1: all
    bool cpu_rings = false;  // a host thread rings the doorbells
    uint8_t unnamed = 0;     // value of the bytes that no golden file names
    // Keys are big endian.
    std::function<Parts(uint64_t index, int pe, int nic)> parts = [](uint64_t index, int, int) {
        return made_up(index);
    };
    std::function<uint32_t(int chunk, int nic)> key = key_of;
    std::function<uint32_t(int chunk, int pe, int nic)> remote_key = remote_key_of;
    std::function<uint64_t(int pe)> remote_heap = remote_heap_of;
};

// Reserves device memory.
using Allocate = std::function<uint64_t(uint64_t bytes)>;
using Write = std::function<void(uint64_t address, const void* bytes, uint64_t count)>;
using Read = std::function<void(uint64_t address, void* bytes, uint64_t count)>;

class States {
  public:
    States(const Golden& golden, const Job& job, Allocate allocate, Write write)
        : device(golden.number("DeviceState"), job.unnamed),
          ibgda(golden.number("IbgdaState"), job.unnamed),
          golden_(golden),
          job_(job),
          allocate_(std::move(allocate)),
          write_(std::move(write)) {
        fill_device();
        fill_ibgda();
        allocate_keys();
        register_chunks(0, job_.registered < 0 ? job_.chunks : job_.registered);
        fill_queue_pairs();
    }

    // As the host library copies them to a module's symbols.
    Bytes device, ibgda;

    void put_device(const std::string& field, uint64_t value) { golden_.put(device, 0, "DeviceState." + field, value); }
    void put_ibgda(const std::string& field, uint64_t value) { golden_.put(ibgda, 0, "IbgdaState." + field, value); }

    // The index in NVSHMEM's table of the queue pair to a PE.
    uint64_t index(int pe, int queue, int nic) const {
        if (golden_.is_at_least(5)) return static_cast<uint64_t>((nic * job_.rcs + queue) * job_.pes + pe);
        return static_cast<uint64_t>((pe * job_.rcs + queue) * job_.nics + nic);
    }
    // The handle that nvshmemx_qp_create returns for its n-th queue pair.
    int handle(int n) const { return (job_.rcs * job_.nics + n) * job_.pes; }
    int created() const { return job_.created; }
    uint64_t queue_pairs() const { return queue_pairs_; }
    uint64_t queue_pairs_bytes() const { return table_.size(); }
    uint64_t address_of(uint64_t index) const { return queue_pairs_ + index * golden_.number("QueuePair"); }

    void put_queue_pair(uint64_t index, const std::string& field, uint64_t value) {
        const uint64_t size = golden_.number("QueuePair");
        golden_.put(table_, index * size, "QueuePair." + field, value);
        write_(address_of(index), table_.data() + index * size, size);
    }

    // The n-th key of a kind, whether in the state or in the table beyond it.
    void put_key(bool remote, uint64_t n, uint32_t key, uint64_t end) {
        const uint64_t near = golden_.number("kKeysInState"), size = golden_.number("Key");
        Bytes bytes(size, job_.unnamed);
        golden_.put(bytes, 0, "Key.key", key);
        golden_.put(bytes, 0, "Key.end", end);
        if (n < near) {
            const uint64_t at = golden_.offset(remote ? "IbgdaState.remote_keys" : "IbgdaState.keys") + n * size;
            std::copy(bytes.begin(), bytes.end(), ibgda.begin() + static_cast<std::ptrdiff_t>(at));
        } else {
            write_((remote ? more_remote_keys_ : more_keys_) + (n - near) * size, bytes.data(), size);
        }
    }

    // Adds the keys of chunks [first, end).
    void register_chunks(int first, int end) {
        for (int chunk = first; chunk < end; ++chunk) {
            const int begin = chunk - chunk % job_.chunks_of_key;
            const uint64_t ends = static_cast<uint64_t>(std::min(begin + job_.chunks_of_key, job_.chunks))
                                  << job_.chunk_log2;
            for (int nic = 0; nic < job_.nics; ++nic) {
                put_key(false, static_cast<uint64_t>(chunk * job_.nics + nic), job_.key(begin, nic), job_.heap + ends);
                for (int pe = 0; pe < job_.pes; ++pe) {
                    const auto n = static_cast<uint64_t>((chunk * job_.pes + pe) * job_.nics + nic);
                    put_key(true, n, job_.remote_key(begin, pe, nic), ends);
                }
            }
        }
    }

    // nvshmemx_qp_create: `count` more queue pairs to each PE. Afterwards the table is elsewhere, with the contents
    // that `read` found in the old one, which the caller must free.
    void create(int count, const Read& read) {
        const uint64_t old = queue_pairs_;
        Bytes kept(table_.size());
        read(old, kept.data(), kept.size());
        const int before = job_.created;
        job_.created += count;
        table_.assign(kept.size() + row_bytes() * static_cast<uint64_t>(count), job_.unnamed);
        std::copy(kept.begin(), kept.end(), table_.begin());
        for (int n = before; n < job_.created; ++n) fill_created(n);
        place_queue_pairs();
        put_rcs();
    }

  private:
    uint64_t row_bytes() const { return static_cast<uint64_t>(job_.pes) * golden_.number("QueuePair"); }
    uint64_t heap_bytes() const { return static_cast<uint64_t>(job_.chunks) << job_.chunk_log2; }

    void fill_device() {
        put_device("pe", static_cast<uint64_t>(job_.pe));
        put_device("pes", static_cast<uint64_t>(job_.pes));
        put_device("heap", job_.heap);
        put_device("heap_bytes", heap_bytes());
        put_device("by_rails", 0);
        put_device("has_ibgda", 1);
        if (golden_.has("kIbgda")) put_device("transport", golden_.number("kIbgda"));
        std::vector<uint64_t> heaps;
        for (int pe = 0; pe < job_.pes; ++pe) heaps.push_back(pe == job_.pe ? job_.heap : job_.remote_heap(pe));
        put_device("remote_heaps", place(heaps.data(), heaps.size() * sizeof(uint64_t)));
    }

    void fill_ibgda() {
        put_rcs();
        put_ibgda("default_rcs_per_pe", static_cast<uint64_t>(job_.rcs));
        put_ibgda("nics", static_cast<uint64_t>(job_.nics));
        put_ibgda("chunk_log2", static_cast<uint64_t>(job_.chunk_log2));
        put_ibgda("cpu_rings", job_.cpu_rings ? 1 : 0);
        put_ibgda("queue_pairs", 0);
    }
    // Created queue pairs count too, rounded down.
    void put_rcs() { put_ibgda("rcs_per_pe", static_cast<uint64_t>(job_.rcs + job_.created / job_.nics)); }

    void allocate_keys() {
        const uint64_t near = golden_.number("kKeysInState"), size = golden_.number("Key");
        for (const char* keys : {"IbgdaState.keys", "IbgdaState.remote_keys"}) {
            std::fill_n(ibgda.begin() + static_cast<std::ptrdiff_t>(golden_.offset(keys)), near * size, uint8_t{0});
        }
        const auto rest = [&](uint64_t count) { return count > near ? allocate_((count - near) * size) : 0; };
        const auto all = static_cast<uint64_t>(job_.chunks * job_.nics);
        more_keys_ = rest(all);
        more_remote_keys_ = rest(all * static_cast<uint64_t>(job_.pes));
        put_ibgda("more_keys", more_keys_);
        put_ibgda("more_remote_keys", more_remote_keys_);
    }

    void fill_queue_pairs() {
        const int rows = job_.rcs * job_.nics + job_.created;
        if (rows == 0) return;
        table_.assign(static_cast<uint64_t>(rows) * row_bytes(), job_.unnamed);
        for (int pe = 0; pe < job_.pes; ++pe) {
            for (int nic = 0; nic < job_.nics; ++nic) {
                for (int queue = 0; queue < job_.rcs; ++queue) fill_queue_pair(index(pe, queue, nic), pe, nic);
            }
        }
        for (int n = 0; n < job_.created; ++n) fill_created(n);
        place_queue_pairs();
    }
    void place_queue_pairs() {
        queue_pairs_ = place(table_.data(), table_.size());
        put_ibgda("queue_pairs", queue_pairs_);
    }
    void fill_created(int n) {
        for (int pe = 0; pe < job_.pes; ++pe) {
            fill_queue_pair(static_cast<uint64_t>(handle(n) + pe), pe, n % job_.nics);
        }
    }

    void fill_queue_pair(uint64_t index, int pe, int nic) {
        const auto put = [&](const char* field, uint64_t value) {
            golden_.put(table_, index * golden_.number("QueuePair"), std::string("QueuePair.") + field, value);
        };
        put("number", golden_.number("kNoNumber"));
        if (pe == job_.pe) return;  // no PE has a queue pair to itself
        const Parts parts = job_.parts(index, pe, nic);
        Bytes completions(golden_.number("CompletionQueue"), job_.unnamed);
        golden_.put(completions, 0, "CompletionQueue.cqe", parts.cqe);
        put("kind", golden_.number("kRc"));
        put("number", parts.number);
        put("nic", static_cast<uint64_t>(nic));
        put("returned", parts.returned);
        put("returned_key", parts.returned_key);
        put("blocks", job_.blocks);
        put("ring", parts.ring);
        put("record", parts.record);
        put("doorbell", parts.doorbell);
        put("completion", place(completions.data(), completions.size()));
        for (const char* counter : {"posting", "reserved", "filled", "rung", "completed"}) put(counter, 0);
    }

    uint64_t place(const void* bytes, uint64_t count) {
        const uint64_t address = allocate_(count);
        write_(address, bytes, count);
        return address;
    }

    const Golden& golden_;
    Job job_;
    const Allocate allocate_;
    const Write write_;
    uint64_t queue_pairs_ = 0, more_keys_ = 0, more_remote_keys_ = 0;
    Bytes table_;  // of queue pairs
};

}  // namespace nvshmem_double
