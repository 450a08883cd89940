// The extension module. Independent of torch: tensors are passed as addresses and sizes, outputs as DLPack capsules.
#include "python/bindings.h"
#include "sim/executor/executor.h"
#include "wire/signals.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "The native part of deep_ep_py.";
    m.attr("WARP_SIZE") = deep_ep::cpu::Executor::warp_size();
    m.attr("SIGNAL_UNIT") = deep_ep::wire::kUnit;
    m.attr("CHUNK_SLOTS") = deep_ep::wire::kSlots;
    deep_ep::python::bind_adoption(m);
    deep_ep::python::bind_executor(m);
    deep_ep::python::bind_vector(m);
    deep_ep::python::bind_timeline(m);
    deep_ep::python::bind_runtime(m);
    deep_ep::python::bind_modes(m);
    deep_ep::python::bind_proxy(m);
    deep_ep::python::bind_cuda(m);
    deep_ep::python::bind_nvshmem(m);
    if (deep_ep::python::bind_ptx != nullptr) deep_ep::python::bind_ptx(m);
}

// Python calls the entry that is named after the file. All variants link this object, and each has a file of its own.
#define DEEP_EP_ENTRY(variant) \
    extern "C" PYBIND11_EXPORT PyObject* PyInit__C_##variant() { return PyInit__C(); }
DEEP_EP_ENTRY(fast)
DEEP_EP_ENTRY(exact)
DEEP_EP_ENTRY(asan)
DEEP_EP_ENTRY(tsan)
#undef DEEP_EP_ENTRY
