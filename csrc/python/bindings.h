// The parts of the extension module; each is bound in its own file.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/control/machines/mesh.h"
#include "host/control/shared_control.h"
#include "host/launch/runner.h"
#include "host/session/runtime.h"

namespace deep_ep::python {

// Stopping an agent waits for its last puts, for which the threads of other ranks may have to run.
struct DeleteWithoutGil {
    pid_t maker = getpid();

    void operator()(host::Runtime* runtime) const {
        // A forked child has a copy without its threads, and locks that they held stay locked: it is never destroyed.
        if (getpid() != maker) return;
        pybind11::gil_scoped_release release;
        delete runtime;
    }
};
using RuntimePointer = std::unique_ptr<host::Runtime, DeleteWithoutGil>;

// Thrown out of a wait when a check of signals is due: a Runner continues the wait.
struct WaitsLong {};
inline thread_local bool stops_at_waits_long = false;

// Lets Ctrl-C end a wait for a rank that will never arrive. Only the main thread handles signals: any other thread
// would just wait for the GIL here, and the kernels that it runs would wait with it for as long as another thread holds
// the GIL. The main thread has the same problem, so when it runs kernels a Runner takes over.
inline void check_signals() {
    if (host::Runner::cancelled()) throw host::Runner::Cancelled{};
    if (gettid() != getpid()) return;
    if (stops_at_waits_long) throw WaitsLong{};
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// Converts seconds, as used in Python, to nanoseconds, as used in C++.
inline uint64_t nanoseconds(double seconds) {
    constexpr double kMax = 1e9;
    if (!(seconds >= 0 && seconds <= kMax)) {
        throw std::invalid_argument("seconds=" + std::to_string(seconds) + ": expected 0 to 1e9");
    }
    return static_cast<uint64_t>(seconds * 1e9);
}

// The options of a Buffer's networks.
struct NetworkOptions {
    nic::Options nic;                  // for software NICs
    bool in_process;                   // all ranks are threads of this process
    std::string provider;              // libfabric provider for the proxy; empty: the best available
    std::string address;               // see host::NetworkPlace
    std::vector<int> cpus;             // see host::NetworkPlace
    std::shared_ptr<host::Mesh> mesh;  // to ranks on other machines; null: there are none
    host::MakeQueuePairs queue_pairs;  // see host::NetworkPlace
};

enum class Kernels { kOnCpu, kOnGpu };

// `own`: by rank; empty, or none where it is not reached: see host::NearParts.
host::NearParts near_parts_of(const std::vector<std::shared_ptr<host::Heap>>& heaps,
                              const std::vector<std::optional<std::shared_ptr<host::Heap>>>& own);
// The control pages of all ranks, as mapped in the heaps.
std::vector<std::shared_ptr<uint8_t>> pages_of(const std::vector<std::shared_ptr<host::Heap>>& heaps);
// `make_memory`: for threads other than the launching one that store into the pages.
host::MakeControl control_over(const host::BufferOptions& options, std::vector<std::shared_ptr<uint8_t>> pages,
                               const host::NearParts& near, host::SharedControl::MakeTeller make_teller,
                               std::shared_ptr<host::Mesh> mesh,
                               std::function<std::unique_ptr<host::Memory>()> make_memory);
host::MakeNetworks networks_over(const host::BufferOptions& options, const NetworkOptions& network,
                                 const std::vector<std::shared_ptr<host::Heap>>& heaps, Kernels kernels);

void bind_executor(pybind11::module_& m);
void bind_vector(pybind11::module_& m);
void bind_timeline(pybind11::module_& m);
void bind_mesh(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);
void bind_modes(pybind11::module_& m);
void bind_low_latency(pybind11::module_& m);
void bind_expand(pybind11::module_& m);
void bind_proxy(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_adoption(pybind11::module_& m);  // before bindings that take Wanted
void bind_nvshmem(pybind11::module_& m);   // after heaps and contexts
// After kernels. Null in builds without the interpreter, which needs warps of 32 lanes.
[[gnu::weak]] void bind_ptx(pybind11::module_& m);

}  // namespace deep_ep::python
