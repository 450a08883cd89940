// The calls of low-latency mode.
#include "host/modes/low_latency/calls.h"

#include "device/logfmt.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::Runtime;
using host::low_latency::CombineTensors;
using host::low_latency::DispatchTensors;
using host::low_latency::Origins;
using host::low_latency::Sizes;
using NoGil = py::call_guard<py::gil_scoped_release>;

Origins make_origins(uint64_t tokens, uint64_t ranges, uint64_t positions, uint64_t first_result, uint64_t own_slots) {
    return {reinterpret_cast<i32*>(tokens), reinterpret_cast<i64*>(ranges), reinterpret_cast<u32*>(positions),
            reinterpret_cast<u32*>(first_result), reinterpret_cast<u32*>(own_slots)};
}

void bind_types(py::module_& m) {
    py::enum_<Scales>(m, "Scales")
        .value("NONE", Scales::kNone)
        .value("FLOAT", Scales::kFloat)
        .value("POWERS", Scales::kPowers)
        .value("EXPONENTS", Scales::kExponents);
    py::class_<Sizes>(m, "Sizes")
        .def(py::init([](uint32_t most_tokens, uint32_t hidden, uint32_t topk, uint32_t experts, uint32_t id_bytes,
                         Scales scales,
                         bool logfmt) { return Sizes{most_tokens, hidden, topk, experts, id_bytes, scales, logfmt}; }),
             py::kw_only(), py::arg("most_tokens"), py::arg("hidden"), py::arg("topk"), py::arg("experts"),
             py::arg("id_bytes"), py::arg("scales"), py::arg("logfmt"));
    py::class_<DispatchTensors>(m, "DispatchTensors")
        .def(py::init<>())
        .def_readwrite("x", &DispatchTensors::x)
        .def_readwrite("topk_idx", &DispatchTensors::topk_idx)
        .def_readwrite("recv_x", &DispatchTensors::recv_x)
        .def_readwrite("recv_scales", &DispatchTensors::recv_scales)
        .def_readwrite("scales_stride", &DispatchTensors::scales_stride)
        .def_readwrite("recv_count", &DispatchTensors::recv_count)
        .def_readwrite("stats", &DispatchTensors::stats)
        .def_readwrite("waited_ns", &DispatchTensors::waited_ns);
    py::class_<CombineTensors>(m, "CombineTensors")
        .def(py::init<>())
        .def_readwrite("x", &CombineTensors::x)
        .def_readwrite("topk_idx", &CombineTensors::topk_idx)
        .def_readwrite("topk_weights", &CombineTensors::topk_weights)
        .def_readwrite("combined_x", &CombineTensors::combined_x)
        .def_readwrite("publish", &CombineTensors::publish)
        .def_readwrite("waited_ns", &CombineTensors::waited_ns);
    py::class_<Origins>(m, "Origins")
        .def(py::init(&make_origins), py::kw_only(), py::arg("tokens"), py::arg("ranges"), py::arg("positions"),
             py::arg("first_result"), py::arg("own_slots"));
}

}  // namespace

void bind_low_latency(py::module_& module) {
    py::module_ m = module.def_submodule("low_latency", "The calls of low-latency mode.");
    bind_types(m);
    m.attr("MOST_EXPERTS") = wire::kMostRoutedExperts;
    m.attr("MOST_RESULTS") = wire::kMostResults;
    m.attr("SCALE_GROUP") = kScaleGroup;
    m.attr("LOG_GROUP") = kLogGroup;
    m.def("region_bytes", &host::low_latency::region_bytes, py::arg("sizes"), py::kw_only(), py::arg("ranks"),
          py::arg("has_remote"));
    m.def("put_bytes", &host::low_latency::put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("most_put_bytes", &host::low_latency::most_put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("fits_shared_memory", &host::low_latency::fits_shared_memory, py::arg("runtime"), py::arg("sizes"));
    m.def("dispatch", &host::low_latency::dispatch, py::arg("runtime"), py::arg("sizes"), py::arg("tokens"),
          py::arg("tensors"), py::arg("origins"), py::kw_only(), py::arg("whole"), py::arg("blocks"), NoGil());
    m.def("combine", &host::low_latency::combine, py::arg("runtime"), py::arg("sizes"), py::arg("tokens"),
          py::arg("tensors"), py::arg("origins"), py::kw_only(), py::arg("handle"), py::arg("whole"), py::arg("blocks"),
          NoGil());
    m.def("finish", &host::low_latency::finish, py::arg("runtime"), py::arg("call"), NoGil());
}

}  // namespace deep_ep::python
