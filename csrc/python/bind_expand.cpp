// Bindings of the expanded layout.
#include <pybind11/stl.h>

#include "host/modes/expand/calls.h"
#include "kernels/expand/slots.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {

void bind_expand(py::module_& module) {
    using host::expand::Layout;
    using host::expand::Tensors;
    using NoGil = py::call_guard<py::gil_scoped_release>;
    py::module_ m = module.def_submodule("expand", "The expanded layout of normal mode.");
    py::class_<Layout>(m, "Layout")
        .def(py::init([](uint64_t expert_rows, uint64_t slots, uint32_t experts, uint32_t alignment, uint32_t rows,
                         uint32_t expanded_rows) {
                 return Layout{expert_rows, slots, experts, alignment, rows, expanded_rows};
             }),
             py::kw_only(), py::arg("expert_rows"), py::arg("slots"), py::arg("experts"), py::arg("alignment"),
             py::arg("rows"), py::arg("expanded_rows"));
    py::class_<Tensors>(m, "Tensors")
        .def(py::init<>())
        .def_readwrite("x", &Tensors::x)
        .def_readwrite("scales", &Tensors::scales)
        .def_readwrite("topk_weights", &Tensors::topk_weights)
        .def_readwrite("expanded_x", &Tensors::expanded_x)
        .def_readwrite("expanded_scales", &Tensors::expanded_scales)
        .def_readwrite("expanded_weights", &Tensors::expanded_weights)
        .def_readwrite("scales_stride", &Tensors::scales_stride)
        .def_readwrite("bias", &Tensors::bias);
    m.def("number", &host::expand::number, py::arg("runtime"), py::arg("call"), py::arg("sizes"), py::arg("layout"),
          py::kw_only(), py::arg("topk_idx"), py::arg("received"), py::arg("counts"), py::arg("blocks"), NoGil());
    m.attr("CHOICE_CHUNKS") = kChoiceChunks;
    m.def("copy", &host::expand::copy, py::arg("runtime"), py::arg("call"), py::arg("sizes"), py::arg("layout"),
          py::arg("tensors"), py::kw_only(), py::arg("zero_padding"), py::arg("blocks"), NoGil());
    m.def("copy_scales", &host::expand::copy_scales, py::arg("runtime"), py::arg("call"), py::arg("sizes"),
          py::kw_only(), py::arg("rows"), py::arg("scales"), py::arg("columns"), py::arg("column_stride"),
          py::arg("blocks"), NoGil());
    m.def("fold", &host::expand::fold, py::arg("runtime"), py::arg("call"), py::arg("sizes"), py::arg("layout"),
          py::arg("tensors"), py::kw_only(), py::arg("blocks"), NoGil());
}

}  // namespace deep_ep::python
