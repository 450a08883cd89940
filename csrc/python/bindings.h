// The parts of the extension module, each bound in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

namespace deep_ep::python {

void bind_executor(pybind11::module_& m);
void bind_vector(pybind11::module_& m);
void bind_runtime(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);

}  // namespace deep_ep::python
