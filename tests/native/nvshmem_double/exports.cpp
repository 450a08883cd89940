// The functions of NVSHMEM's host library that this library or nvshmem4py calls, and functions for tests.
//
//   NVSHMEM_DOUBLE_FOLDER   where the PEs meet and the heaps are; required
//   NVSHMEM_DOUBLE_LAYOUTS  tests/support/data/nvshmem; required
//   NVSHMEM_DOUBLE_VERSION  of the host library, one that is laid out there; required
//   NVSHMEM_DOUBLE_SECONDS  timeout of a collective call: 60
//   NVSHMEM_DOUBLE_PES_PER_NODE  consecutive PEs that are near each other: all
//   NVSHMEM_DOUBLE_NICS     per PE: 1
//   NVSHMEM_DOUBLE_CHUNK_LOG2    bytes of the heap per key: 20
//   NVSHMEM_DOUBLE_CPU_DOORBELLS a host thread rings the doorbells
//   NVSHMEM_DOUBLE_NIC_{MTU,MAX_DELAY,RELAXED}   of csrc/host/network/nic_options.h
//   NVSHMEM_DOUBLE_FAULT    "PE,PEER,AFTER,SYNDROME": makes that queue pair fail, see csrc/host/network/nic_options.h
//   NVSHMEM_DOUBLE_FAIL     "nvshmemx_hostlib_init_attr=7": makes that call return that status, or null
//   NVSHMEM_DOUBLE_STRICT   version words of arguments are checked, which NVSHMEM itself does not do
//
// Of NVSHMEM's own variables it reads NVSHMEM_SYMMETRIC_SIZE (64M), NVSHMEM_DISABLE_P2P, NVSHMEM_IB_ENABLE_IBGDA,
// NVSHMEM_IBGDA_NUM_RC_PER_PE (2) and NVSHMEM_QP_DEPTH (1024).
#include "arguments.h"
#include "calls.h"

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

int nvshmemx_init_status() {
    const std::shared_ptr<Pe> pe = the_pe();
    return pe == nullptr ? 0 : pe->initialised() ? 2 : 1;
}

int nvshmemx_get_uniqueid(void* id) {
    return carry_out("nvshmemx_get_uniqueid", [&] { make_unique_id(golden(), id); });
}
int nvshmemx_set_attr_uniqueid_args(int pe, int pes, const void* id, void* arguments) {
    return carry_out("nvshmemx_set_attr_uniqueid_args", [&] { set_arguments(golden(), arguments, pe, pes, id); });
}
int nvshmemx_hostlib_init_attr(unsigned flags, void* arguments) {
    return carry_out("nvshmemx_hostlib_init_attr", [&] { initialise(flags, arguments); });
}
void nvshmemx_hostlib_finalize() { carry_out("nvshmemx_hostlib_finalize", finalise); }

int nvshmem_my_pe() {
    const std::shared_ptr<Pe> pe = the_pe();
    return pe == nullptr ? -1 : pe->number();
}
int nvshmem_n_pes() {
    const std::shared_ptr<Pe> pe = the_pe();
    return pe == nullptr ? -1 : pe->pes();
}

void* nvshmem_malloc(size_t bytes) {
    void* address = nullptr;
    carry_out_collectively("nvshmem_malloc",
                           [&](Pe& pe) { address = pe.allocate("nvshmem_malloc", Heap::kAlignment, bytes, 0xcd); });
    return address;
}
void* nvshmem_calloc(size_t count, size_t bytes) {
    void* address = nullptr;
    carry_out_collectively(
        "nvshmem_calloc", [&](Pe& pe) { address = pe.allocate("nvshmem_calloc", Heap::kAlignment, count * bytes, 0); });
    return address;
}
void* nvshmem_align(size_t alignment, size_t bytes) {
    void* address = nullptr;
    carry_out_collectively("nvshmem_align",
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
    carry_out_collectively("nvshmem_barrier_all", [](Pe& pe) { pe.barrier(); });
}

int nvshmemx_cumodule_init(void* module) {
    return carry_out_on_device("nvshmemx_cumodule_init", [&](Pe& pe) { pe.add_module(module); });
}
int nvshmemx_cumodule_finalize(void* module) {
    return carry_out_on_device("nvshmemx_cumodule_finalize", [&](Pe& pe) { pe.remove_module(module); });
}

// Posts as many requests to each other PE as NVSHMEM's own kernels may post beside ours; from any thread.
int nvshmem_double_foreign_posts(int count) {
    return carry_out("nvshmem_double_foreign_posts", [&] {
        const std::shared_ptr<Pe> pe = the_pe();
        if (pe == nullptr || !pe->initialised()) throw Failure(kInvalidValue, "before the device is initialized");
        pe->post_foreign(count);
    });
}

}  // extern "C"
#pragma GCC visibility pop
