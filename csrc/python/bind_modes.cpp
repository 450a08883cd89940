// The calls of each mode.
#include <pybind11/stl.h>

#include "host/modes/measure/post.h"
#include "host/modes/normal/calls.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::Runtime;
using host::normal::CombineTensors;
using host::normal::DispatchTensors;
using host::normal::Sizes;
using NoGil = py::call_guard<py::gil_scoped_release>;

Plan make_plan(uint64_t token_row, uint64_t row_token, uint64_t rank_prefix, uint64_t source_tokens) {
    return {reinterpret_cast<i32*>(token_row), reinterpret_cast<i32*>(row_token), reinterpret_cast<i32*>(rank_prefix),
            reinterpret_cast<i32*>(source_tokens)};
}

void bind_normal(py::module_& module) {
    py::module_ m = module.def_submodule("normal", "The calls of normal mode.");
    py::class_<Sizes>(m, "Sizes")
        .def(py::init([](uint32_t tokens, uint32_t row_bytes, uint32_t topk, uint32_t experts, uint32_t id_bytes,
                         uint32_t scales,
                         uint32_t types) { return Sizes{tokens, row_bytes, topk, experts, id_bytes, scales, types}; }),
             py::arg("tokens"), py::arg("row_bytes"), py::arg("topk"), py::arg("experts"), py::kw_only(),
             py::arg("id_bytes") = sizeof(i64), py::arg("scales") = 0, py::arg("types") = 0)
        .def_readonly("row_bytes", &Sizes::row_bytes)
        .def_readonly("topk", &Sizes::topk)
        .def_readonly("experts", &Sizes::experts);
    py::class_<DispatchTensors>(m, "DispatchTensors")
        .def(py::init<>())
        .def_readwrite("x", &DispatchTensors::x)
        .def_readwrite("scales", &DispatchTensors::scales)
        .def_readwrite("scales_stride", &DispatchTensors::scales_stride)
        .def_readwrite("topk_idx", &DispatchTensors::topk_idx)
        .def_readwrite("topk_weights", &DispatchTensors::topk_weights)
        .def_readwrite("recv_x", &DispatchTensors::recv_x)
        .def_readwrite("recv_scales", &DispatchTensors::recv_scales)
        .def_readwrite("recv_topk_idx", &DispatchTensors::recv_topk_idx)
        .def_readwrite("recv_topk_weights", &DispatchTensors::recv_topk_weights)
        .def_readwrite("recv_src_idx", &DispatchTensors::recv_src_idx);
    py::class_<CombineTensors>(m, "CombineTensors")
        .def(py::init<>())
        .def_readwrite("x", &CombineTensors::x)
        .def_readwrite("topk_weights", &CombineTensors::topk_weights)
        .def_readwrite("src_idx", &CombineTensors::src_idx)
        .def_readwrite("combined_x", &CombineTensors::combined_x)
        .def_readwrite("combined_weights", &CombineTensors::combined_weights)
        .def_readwrite("bias", &CombineTensors::bias);
    py::class_<Plan>(m, "Plan").def(py::init(&make_plan), py::arg("token_row"), py::arg("row_token"),
                                    py::arg("rank_prefix"), py::arg("source_tokens"));
    m.def("least_region_bytes", &host::normal::least_region_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("put_bytes", &host::normal::put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("most_ranks", &host::normal::most_ranks, py::arg("runtime"), py::arg("experts"));
    m.def("layout", &host::normal::layout, py::arg("runtime"), py::arg("sizes"), py::kw_only(), py::arg("topk_idx"),
          py::arg("tokens_per_rank"), py::arg("tokens_per_expert"), py::arg("is_token_in_rank"), py::arg("blocks"),
          NoGil());
    m.def("notify", &host::normal::notify, py::arg("runtime"), py::arg("sizes"), py::kw_only(),
          py::arg("is_token_in_rank"), py::arg("tokens_per_expert"), py::arg("plan"), py::arg("rows_to_rank"),
          py::arg("most_rows"), py::arg("finish_later"), py::arg("blocks"), NoGil());
    m.def("counts", &host::normal::counts, py::arg("runtime"), py::arg("call"), NoGil());
    m.def("total_rows", &host::normal::total_rows, py::arg("call"));
    m.def("rows_per_expert", &host::normal::rows_per_expert, py::arg("call"));
    m.attr("CALL_WORDS") = host::normal::kCallWords;
    const auto notify_cached = [&m](const char* name, wire::Kind kind) {
        m.def(
            name,
            [kind](Runtime& runtime, const Sizes& sizes, uint64_t handle) {
                return host::normal::notify_cached(runtime, kind, sizes, handle);
            },
            py::arg("runtime"), py::arg("sizes"), py::kw_only(), py::arg("handle"), NoGil());
    };
    notify_cached("notify_cached_dispatch", wire::Kind::kCachedDispatch);
    notify_cached("notify_combine", wire::Kind::kCombine);
    m.def("dispatch", &host::normal::dispatch, py::arg("runtime"), py::arg("call"), py::arg("sizes"),
          py::arg("tensors"), py::kw_only(), py::arg("plan"), py::arg("rows"), py::arg("cached"), py::arg("blocks"),
          NoGil());
    m.def("combine", &host::normal::combine, py::arg("runtime"), py::arg("call"), py::arg("sizes"), py::arg("tensors"),
          py::kw_only(), py::arg("plan"), py::arg("rows"), py::arg("publish"), py::arg("blocks"), NoGil());
}

void bind_measure(py::module_& module) {
    py::module_ m = module.def_submodule("measure", "Calls that only measurements make.");
    m.def(
        "post",
        [](Runtime& runtime, uint32_t to, uint32_t posters, uint32_t puts, uint64_t bytes, uint64_t source,
           uint64_t target, uint64_t words, unsigned blocks) {
            return host::measure::post(runtime, {{}, to, posters, puts, bytes, source, target, words}, blocks);
        },
        py::arg("runtime"), py::kw_only(), py::arg("to"), py::arg("posters"), py::arg("puts"), py::arg("bytes"),
        py::arg("source"), py::arg("target"), py::arg("words"), py::arg("blocks"), NoGil());
}

}  // namespace

void bind_modes(py::module_& m) {
    bind_normal(m);
    bind_low_latency(m);
    bind_measure(m);
}

}  // namespace deep_ep::python
