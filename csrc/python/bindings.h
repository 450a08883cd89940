// The parts of the extension module, each bound in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "host/runtime.h"

namespace deep_ep::python {

// Stopping an agent waits for its last puts, which other ranks' threads may have to run for.
struct DeleteWithoutGil {
    void operator()(host::Runtime* runtime) const {
        pybind11::gil_scoped_release release;
        delete runtime;
    }
};
using RuntimePointer = std::unique_ptr<host::Runtime, DeleteWithoutGil>;

// Lets Ctrl-C end a wait for a rank that will never come.
inline void check_signals() {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

void bind_executor(pybind11::module_& m);
void bind_vector(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);

}  // namespace deep_ep::python
