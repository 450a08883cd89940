// The parts of the extension module, each bound in a file of its own.
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

// Stopping an agent waits for its last puts, which other ranks' threads may have to run for.
struct DeleteWithoutGil {
    pid_t maker = getpid();

    void operator()(host::Runtime* runtime) const {
        // A forked child has a copy without the threads of it, and what these had locked stays locked: it is left as it
        // is, until the child ends.
        if (getpid() != maker) return;
        pybind11::gil_scoped_release release;
        delete runtime;
    }
};
using RuntimePointer = std::unique_ptr<host::Runtime, DeleteWithoutGil>;

// Ends a wait that has lasted so long that signals would be looked at: a Runner goes on with it.
struct WaitsLong {};
inline thread_local bool stops_at_waits_long = false;

// Lets Ctrl-C end a wait for a rank that will never come. Signals are the main thread's; another one that ran kernels
// would only wait for the GIL here, and the kernels with it, as long as another thread holds it. So would the main
// thread: where it runs kernels, a Runner takes over.
inline void check_signals() {
    if (host::Runner::cancelled()) throw host::Runner::Cancelled{};
    if (gettid() != getpid()) return;
    if (stops_at_waits_long) throw WaitsLong{};
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// Python's times are seconds and C++'s nanoseconds: here they meet.
inline uint64_t nanoseconds(double seconds) {
    constexpr double kMax = 1e9;
    if (!(seconds >= 0 && seconds <= kMax)) {
        throw std::invalid_argument("seconds=" + std::to_string(seconds) + ": expected 0 to 1e9");
    }
    return static_cast<uint64_t>(seconds * 1e9);
}

// What the networks of a Buffer are like.
struct NetworkOptions {
    nic::Options nic;                  // software NICs
    bool in_process;                   // all ranks are threads of this process
    std::string provider;              // of libfabric, for the proxy; empty: the best there is
    std::string address;               // see host::NetworkPlace
    std::vector<int> cpus;             // likewise
    std::shared_ptr<host::Mesh> mesh;  // to ranks on other machines; null: there are none
    host::MakeQueuePairs queue_pairs;  // see host::NetworkPlace
};

enum class Kernels { kOnCpu, kOnGpu };

// Every rank's control pages as the heaps have them.
std::vector<std::shared_ptr<uint8_t>> pages_of(const std::vector<std::shared_ptr<host::Heap>>& heaps);
// `make_memory`: for threads that store into them beside the launching one.
host::MakeControl control_over(const host::BufferOptions& options, std::vector<std::shared_ptr<uint8_t>> pages,
                               host::SharedControl::MakeTeller make_teller, std::shared_ptr<host::Mesh> mesh,
                               std::function<std::unique_ptr<host::Memory>()> make_memory);
host::MakeNetworks networks_over(const host::BufferOptions& options, const NetworkOptions& network,
                                 const std::vector<std::shared_ptr<host::Heap>>& heaps, Kernels kernels);

void bind_executor(pybind11::module_& m);
void bind_vector(pybind11::module_& m);
void bind_mesh(pybind11::module_& m);
void bind_ptx(pybind11::module_& m);  // before what takes kernels
void bind_runtime(pybind11::module_& m);
void bind_modes(pybind11::module_& m);
void bind_low_latency(pybind11::module_& m);
void bind_proxy(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_adoption(pybind11::module_& m);  // before what takes Wanted
void bind_nvshmem(pybind11::module_& m);   // behind heaps and contexts

}  // namespace deep_ep::python
