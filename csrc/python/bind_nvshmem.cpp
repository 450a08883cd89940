// Bindings for what is adopted from NVSHMEM: heaps in its symmetric heap, and its queue pairs.
#include <pybind11/stl.h>

#include "host/cuda/memory.h"
#include "host/cuda/module.h"
#include "host/nvshmem/adoption.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::CudaMemory;
using host::Heap;
using host::cuda::LoadedModule;
using host::cuda::PrimaryContext;
using host::nvshmem::Wanted;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Context = std::shared_ptr<const PrimaryContext>;

std::vector<u8> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// A part of memory allocated elsewhere, and whether it is still used.
struct Lease {
    std::shared_ptr<Heap> heap;
    std::weak_ptr<void> use;
};

struct Counts {
    std::shared_ptr<void> memory;
};

Lease lease(const Context& context, uint64_t address, size_t bytes, size_t cleared) {
    auto* const base = reinterpret_cast<uint8_t*>(address);
    if (cleared != 0) CudaMemory(context).fill(base, 0, cleared);
    // Tracks use of the memory without owning it.
    const std::shared_ptr<void> use(base, [](void*) {});
    return {std::make_shared<Heap>(base, bytes, -1, use), use};
}

void check(const Context& context, const Wanted& wanted) {
    CudaMemory memory(context);
    host::nvshmem::check(wanted, [&memory](u64 address, void* bytes, size_t count) {
        memory.read(bytes, reinterpret_cast<const void*>(address), count);
    });
}

}  // namespace

void bind_adoption(py::module_& module) {
    py::module_ m = module.def_submodule("nvshmem", "NVSHMEM's queue pairs and its symmetric heap.");
    py::register_local_exception<host::nvshmem::Refused>(m, "Refused");
    m.attr("INITIALIZED") = static_cast<u32>(wire::nvshmem::kInitialized);
    m.attr("STATE_BYTES") = sizeof(wire::nvshmem::DeviceState);
    m.attr("IBGDA_STATE_BYTES") = sizeof(wire::nvshmem::IbgdaState);
    m.def("version", &wire::nvshmem::version, py::arg("major"), py::arg("minor"), py::arg("patch"),
          "Return a version as a number, in the order of releases.");
    m.attr("QUEUE_PAIRS_OF_ONES_OWN_SINCE") = wire::nvshmem::kTableByQueueSince;
    m.def(
        "heap_of", [](const py::bytes& device_state) { return host::nvshmem::heap_of(bytes_of(device_state)); },
        py::arg("device_state"),
        "Return where this PE's symmetric heap begins; 0: NVSHMEM has not filled in the state.");
    py::class_<Wanted>(m, "Wanted",
                       "The queue pairs of NVSHMEM that a Buffer adopts, and the part of its heap that it uses.")
        .def(py::init([](uint32_t version, const py::bytes& device_state, const py::bytes& ibgda_state,
                         std::vector<uint32_t> pes, std::vector<bool> reached, uint32_t rank, uint64_t heap_offset,
                         uint64_t heap_bytes, uint32_t queues, std::vector<int32_t> handles, uint64_t counts) {
                 return Wanted{version,
                               bytes_of(device_state),
                               bytes_of(ibgda_state),
                               std::move(pes),
                               std::move(reached),
                               rank,
                               heap_offset,
                               heap_bytes,
                               queues,
                               std::move(handles),
                               counts};
             }),
             py::kw_only(), py::arg("version"), py::arg("device_state"), py::arg("ibgda_state"), py::arg("pes"),
             py::arg("reached"), py::arg("rank"), py::arg("heap_offset"), py::arg("heap_bytes"), py::arg("queues"),
             py::arg("handles"), py::arg("counts"));
    m.def(
        "shared_queues",
        [](uint32_t version, const py::bytes& ibgda_state) {
            const auto found = host::nvshmem::shared_queues(version, bytes_of(ibgda_state));
            return std::pair(found.nics, found.per_nic);
        },
        py::arg("version"), py::arg("ibgda_state"),
        "Return how many NICs NVSHMEM uses, and how many queue pairs to each PE its kernels share on each NIC.");
}

void bind_nvshmem(py::module_& module) {
    py::module_ m = module.def_submodule("nvshmem");
    m.def("check", &check, py::arg("context"), py::arg("wanted"), NoGil(),
          "Raise Refused, with what to change, if the queue pairs cannot be adopted. Does not check the heap.");
    py::class_<Counts>(m, "Counts", "Counters of what kernels post to dedicated queue pairs.")
        .def(py::init([](const Context& context, uint32_t pes, uint32_t queues) {
                 CudaMemory memory(context);
                 return Counts{memory.make_private(sizeof(host::nvshmem::OwnCounts) * pes * queues)};
             }),
             py::arg("context"), py::arg("pes"), py::arg("queues"))
        .def_property_readonly("address",
                               [](const Counts& counts) { return reinterpret_cast<uint64_t>(counts.memory.get()); });
    py::class_<LoadedModule>(m, "LoadedModule", "A module that was loaded for its symbols.")
        .def(py::init([](const Context& context, const py::bytes& image) {
                 return std::make_unique<LoadedModule>(context, static_cast<std::string>(image));
             }),
             py::arg("context"), py::arg("image"))
        .def_property_readonly("handle",
                               [](const LoadedModule& loaded) { return reinterpret_cast<uint64_t>(loaded.handle()); })
        .def(
            "read",
            [](const LoadedModule& loaded, const std::string& symbol) {
                const std::vector<uint8_t> held = loaded.read(symbol);
                return py::bytes(reinterpret_cast<const char*>(held.data()), held.size());
            },
            py::arg("symbol"), "Return the contents of a symbol.");
    py::class_<Lease>(m, "Lease", "A heap in memory that was allocated elsewhere.")
        .def(
            "take", [](Lease& lease) { return std::exchange(lease.heap, nullptr); },
            "Return the heap, once; afterwards the lease does not keep it in use.")
        .def_property_readonly(
            "ended", [](const Lease& lease) { return lease.use.expired(); },
            "Whether nothing uses it any longer, neither its Buffer nor an output.");
    m.def("lease", &lease, py::arg("context"), py::arg("address"), py::arg("bytes"), py::arg("cleared"), NoGil(),
          "Make a heap at an address of GPU memory, whose first `cleared` bytes are set to 0.");
}

}  // namespace deep_ep::python
