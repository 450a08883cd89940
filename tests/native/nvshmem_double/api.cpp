// The functions of NVSHMEM's host library that are called by this library or by nvshmem4py, and what tests call.
//
//   NVSHMEM_DOUBLE_FOLDER   where the PEs meet and the heaps lie; required
//   NVSHMEM_DOUBLE_VERSION  of the host library, one of tests/data/nvshmem
//   NVSHMEM_DOUBLE_SECONDS  that a collective call waits for the others: 60
//   NVSHMEM_DOUBLE_PES_PER_NODE  PEs in a row that are near each other: all
//   NVSHMEM_DOUBLE_NICS     of each PE: 1
//   NVSHMEM_DOUBLE_CHUNK_LOG2    bytes of the heap under one key: 20
//   NVSHMEM_DOUBLE_CPU_DOORBELLS a thread of the host rings
//   NVSHMEM_DOUBLE_NIC_{MTU,IN_FLIGHT,MOST_DELAY,RELAXED,SEED}   of csrc/nic/options.h
//   NVSHMEM_DOUBLE_FAULT    "PE,PEER,AFTER,SYNDROME": that queue pair fails, as csrc/nic/options.h says
//   NVSHMEM_DOUBLE_FAIL     "nvshmemx_hostlib_init_attr=7": that call returns that status, or null
//   NVSHMEM_DOUBLE_STRICT   version words of arguments are looked at, which NVSHMEM itself does not do
//
// Of NVSHMEM's own it reads NVSHMEM_SYMMETRIC_SIZE (64M), NVSHMEM_DISABLE_P2P, NVSHMEM_IB_ENABLE_IBGDA,
// NVSHMEM_IBGDA_NUM_RC_PER_PE (2) and NVSHMEM_QP_DEPTH (1024).
#include "api.h"

#include <sys/random.h>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

namespace nvshmem_double {

std::shared_ptr<Pe>& the_pe = *new std::shared_ptr<Pe>;
std::mutex& one_call_at_a_time = *new std::mutex;

namespace {

constexpr unsigned kWithUniqueId = 1u << 3;
int initialisations = 0;
std::set<std::string>& used_ids = *new std::set<std::string>;

Golden golden() { return Golden(std::string(NVSHMEM_DOUBLE_GOLDEN) + "/" + version() + ".json"); }

// The first version of a struct, as its initialiser says it: of so many bytes.
uint32_t version_word(const Golden& layout, const char* table) {
    return 1u << 16 | static_cast<uint32_t>(layout.number(table));
}

template <class T>
T read(const Golden& layout, const void* table, const std::string& field) {
    T value;
    std::memcpy(&value, static_cast<const char*>(table) + layout.offset(field), sizeof(value));
    return value;
}
template <class T>
void write(const Golden& layout, void* table, const std::string& field, T value) {
    std::memcpy(static_cast<char*>(table) + layout.offset(field), &value, sizeof(value));
}

void expect_word(uint32_t is, uint32_t expected, const std::string& name) {
    if (is == expected) return;
    throw Failure(kInvalidValue, name + " is " + std::to_string(is >> 16) + "<<16|" + std::to_string(is & 0xffff) +
                                     ", expected 1<<16|" + std::to_string(expected & 0xffff));
}

struct Arguments {
    std::string id;
    int pe, pes;
};

Arguments read_arguments(const Golden& layout, unsigned flags, const void* arguments) {
    if ((flags & kWithUniqueId) == 0) {
        throw Failure(kNotSupported, "flags " + std::to_string(flags) + " without that of a unique id");
    }
    if (arguments == nullptr) throw Failure(kInvalidValue, "no arguments");
    if (strict()) {
        const auto word = [&](const char* field) { return read<uint32_t>(layout, arguments, field); };
        const uint32_t whole = version_word(layout, "InitArguments");
        const auto offset = static_cast<uint32_t>(layout.offset("InitArguments.arguments_version"));
        expect_word(word("InitArguments.version"), whole, "the arguments' version");
        expect_word(word("InitArguments.arguments_version"), whole - offset, "the version of their inner part");
        expect_word(word("InitArguments.unique_id_version"), version_word(layout, "UniqueIdArguments"),
                    "the version of their part for the unique id");
    }
    const auto* const id = read<const char*>(layout, arguments, "InitArguments.unique_id");
    if (id == nullptr) throw Failure(kInvalidValue, "no unique id: nvshmemx_set_attr_uniqueid_args comes before");
    expect_word(read<uint32_t>(layout, id, "UniqueId.version"), version_word(layout, "UniqueId"),
                "the unique id's version");
    const size_t bytes = layout.number("UniqueId") - sizeof(uint32_t);
    Arguments read_of{std::string(id + sizeof(uint32_t), strnlen(id + sizeof(uint32_t), bytes)),
                      read<int>(layout, arguments, "InitArguments.pe"),
                      read<int>(layout, arguments, "InitArguments.pes")};
    if (read_of.id.rfind("job_", 0) != 0) throw Failure(kInvalidValue, "not a unique id of nvshmemx_get_uniqueid");
    if (read_of.pes < 1 || read_of.pe < 0 || read_of.pe >= read_of.pes) {
        throw Failure(kInvalidValue,
                      "PE " + std::to_string(read_of.pe) + " of " + std::to_string(read_of.pes) + " PEs");
    }
    return read_of;
}

void initialise(unsigned flags, const void* given) {
    const Arguments arguments = read_arguments(golden(), flags, given);
    if (the_pe != nullptr) {
        if (arguments.pe != the_pe->number() || arguments.pes != the_pe->pes()) {
            throw Failure(kInvalidValue, "PE " + std::to_string(arguments.pe) + " of " + std::to_string(arguments.pes) +
                                             " cannot join: it is PE " + std::to_string(the_pe->number()) + " of " +
                                             std::to_string(the_pe->pes()) + " already");
        }
        ++initialisations;
        return;
    }
    if (!used_ids.insert(arguments.id).second) throw Failure(kInvalidValue, "the unique id has been used before");
    auto pe = std::make_shared<Pe>(arguments.id, arguments.pe, arguments.pes);
    if (Gpu::Context context = Gpu::current_context(); context != nullptr) pe->initialise(context);
    the_pe = std::move(pe);
    initialisations = 1;
}

}  // namespace

int carry_out(const std::string& call, const std::function<void()>& body) {
    if (const int wanted = wanted_failure(call); wanted != 0) return wanted;
    try {
        body();
        return kSuccess;
    } catch (const Failure& failure) {
        const std::string why = failure.what();
        complain(why.rfind(call, 0) == 0 ? why : call + ": " + why);
        return failure.status();
    } catch (const std::exception& error) {
        complain(call + ": " + error.what());
        return kInternal;
    }
}

int carry_out_on_device(const std::string& call, const std::function<void(Pe&)>& body) {
    return carry_out(call, [&] {
        const std::lock_guard<std::mutex> lock(one_call_at_a_time);
        if (the_pe == nullptr) throw Failure(kInvalidValue, "before nvshmemx_hostlib_init_attr");
        if (!the_pe->initialised()) the_pe->initialise(Gpu::current_context());
        body(*the_pe);
    });
}

}  // namespace nvshmem_double

using namespace nvshmem_double;

#pragma GCC visibility push(default)
extern "C" {

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
    carry_out("nvshmemx_vendor_get_version_info", [&] {
        const Golden layout = golden();
        *major = layout.major();
        *minor = layout.minor();
        *patch = layout.patch();
    });
}
void nvshmem_info_get_version(int* major, int* minor) {
    *major = 1;
    *minor = 3;
}
void nvshmem_info_get_name(char* name) { std::strcpy(name, "the stand-in for NVSHMEM"); }
void nvshmem_query_thread(int* provided) { *provided = 2; }  // serialised

int nvshmemx_init_status() {
    const std::lock_guard<std::mutex> lock(one_call_at_a_time);
    return the_pe == nullptr ? 0 : the_pe->initialised() ? 2 : 1;
}

int nvshmemx_get_uniqueid(void* id) {
    return carry_out("nvshmemx_get_uniqueid", [&] {
        const Golden layout = golden();
        uint64_t random[2] = {};
        if (getrandom(random, sizeof(random), 0) != sizeof(random)) throw Failure(kInternal, "no random numbers");
        std::memset(id, 0, layout.number("UniqueId"));
        write(layout, id, "UniqueId.version", version_word(layout, "UniqueId"));
        std::snprintf(static_cast<char*>(id) + sizeof(uint32_t), 40, "job_%016llx%016llx",
                      static_cast<unsigned long long>(random[0]), static_cast<unsigned long long>(random[1]));
    });
}

// Neither looks at version words nor writes them, and keeps the id's address only: as NVSHMEM.
int nvshmemx_set_attr_uniqueid_args(int pe, int pes, const void* id, void* arguments) {
    return carry_out("nvshmemx_set_attr_uniqueid_args", [&] {
        const Golden layout = golden();
        write(layout, arguments, "InitArguments.unique_id", id);
        write(layout, arguments, "InitArguments.pe", pe);
        write(layout, arguments, "InitArguments.pes", pes);
    });
}

int nvshmemx_hostlib_init_attr(unsigned flags, void* arguments) {
    return carry_out("nvshmemx_hostlib_init_attr", [&] {
        const std::lock_guard<std::mutex> lock(one_call_at_a_time);
        initialise(flags, arguments);
    });
}

void nvshmemx_hostlib_finalize() {
    carry_out("nvshmemx_hostlib_finalize", [] {
        const std::lock_guard<std::mutex> lock(one_call_at_a_time);
        if (the_pe == nullptr) throw Failure(kInvalidValue, "more often than nvshmemx_hostlib_init_attr");
        if (--initialisations > 0) return;
        const std::shared_ptr<Pe> last = std::exchange(the_pe, nullptr);
        last->finalise();
    });
}

int nvshmem_my_pe() {
    const std::lock_guard<std::mutex> lock(one_call_at_a_time);
    return the_pe == nullptr ? -1 : the_pe->number();
}
int nvshmem_n_pes() {
    const std::lock_guard<std::mutex> lock(one_call_at_a_time);
    return the_pe == nullptr ? -1 : the_pe->pes();
}

void* nvshmem_malloc(size_t bytes) {
    void* address = nullptr;
    carry_out_on_device("nvshmem_malloc",
                        [&](Pe& pe) { address = pe.allocate("nvshmem_malloc", Heap::kAlignment, bytes, 0xcd); });
    return address;
}
void* nvshmem_calloc(size_t count, size_t bytes) {
    void* address = nullptr;
    carry_out_on_device("nvshmem_calloc",
                        [&](Pe& pe) { address = pe.allocate("nvshmem_calloc", Heap::kAlignment, count * bytes, 0); });
    return address;
}
void* nvshmem_align(size_t alignment, size_t bytes) {
    void* address = nullptr;
    carry_out_on_device("nvshmem_align",
                        [&](Pe& pe) { address = pe.allocate("nvshmem_align", alignment, bytes, 0xcd); });
    return address;
}
void nvshmem_free(void* address) {
    if (address == nullptr) return;
    carry_out_on_device("nvshmem_free", [&](Pe& pe) { pe.free(address); });
}
void* nvshmem_ptr(const void* address, int pe) {
    void* there = nullptr;
    carry_out_on_device("nvshmem_ptr", [&](Pe& here) { there = here.near(address, pe); });
    return there;
}
void nvshmem_barrier_all() {
    carry_out_on_device("nvshmem_barrier_all", [](Pe& pe) { pe.barrier(); });
}

int nvshmemx_cumodule_init(void* module) {
    return carry_out("nvshmemx_cumodule_init", [&] {
        const std::lock_guard<std::mutex> lock(one_call_at_a_time);
        if (the_pe == nullptr || !the_pe->initialised())
            throw Failure(kInvalidValue, "before the device is initialised");
        the_pe->add_module(module);
    });
}
int nvshmemx_cumodule_finalize(void* module) {
    return carry_out_on_device("nvshmemx_cumodule_finalize", [&](Pe& pe) { pe.remove_module(module); });
}

#if NVSHMEM_DOUBLE_CREATES
int nvshmemx_qp_create(int count, int** handles) {
    return carry_out_on_device("nvshmemx_qp_create", [&](Pe& pe) { *handles = pe.create_queue_pairs(count); });
}
#endif

// As many posts to each far PE as NVSHMEM's own kernels may make beside ours; from any thread.
int nvshmem_double_foreign_posts(int count) {
    return carry_out("nvshmem_double_foreign_posts", [&] {
        std::unique_lock<std::mutex> lock(one_call_at_a_time);
        const std::shared_ptr<Pe> pe = the_pe;
        lock.unlock();
        if (pe == nullptr || !pe->initialised()) throw Failure(kInvalidValue, "before the device is initialised");
        pe->post_foreign(count);
    });
}

}  // extern "C"
#pragma GCC visibility pop
