// Bindings of the calls of low-latency mode.
#include "host/modes/low_latency/calls.h"

#include "device/logfmt.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::Call;
using host::Runtime;
namespace low_latency = host::low_latency;
using NoGil = py::call_guard<py::gil_scoped_release>;

// The calls take addresses one by one, 0 for none: creating and filling a struct from Python would add more than half
// the cost of a launch to each call.
std::shared_ptr<Call> dispatch(Runtime& runtime, const low_latency::Sizes& sizes, uint32_t tokens, uint64_t x,
                               uint64_t topk_idx, uint64_t topk_weights, uint64_t recv_x, uint64_t recv_scales,
                               uint32_t scales_stride, uint64_t recv_count, uint64_t src_info, uint64_t ranges,
                               uint64_t places, uint64_t stats, uint64_t waited_ns, bool whole, unsigned blocks,
                               unsigned forward_blocks) {
    const low_latency::DispatchTensors tensors{.x = x,
                                               .topk_idx = topk_idx,
                                               .topk_weights = topk_weights,
                                               .recv_x = recv_x,
                                               .recv_scales = recv_scales,
                                               .recv_count = recv_count,
                                               .stats = stats,
                                               .waited_ns = waited_ns,
                                               .scales_stride = scales_stride};
    return low_latency::dispatch(runtime, sizes, tokens, tensors, {src_info, ranges, places},
                                 {whole, blocks, forward_blocks});
}

std::shared_ptr<Call> combine(Runtime& runtime, const low_latency::Sizes& sizes, uint32_t tokens, uint64_t x,
                              uint64_t topk_idx, uint64_t topk_weights, uint64_t combined_x, bool publish,
                              uint64_t src_info, uint64_t ranges, uint64_t places, uint64_t waited_ns, uint64_t handle,
                              bool whole, unsigned blocks, unsigned forward_blocks) {
    const low_latency::CombineTensors tensors{.x = x,
                                              .topk_idx = topk_idx,
                                              .topk_weights = topk_weights,
                                              .combined_x = combined_x,
                                              .waited_ns = waited_ns,
                                              .publish = publish};
    return low_latency::combine(runtime, sizes, tokens, tensors, {src_info, ranges, places}, handle,
                                {whole, blocks, forward_blocks});
}

void bind_sizes(py::module_& m) {
    py::enum_<Scales>(m, "Scales")
        .value("NONE", Scales::kNone)
        .value("FLOAT", Scales::kFloat)
        .value("POWERS", Scales::kPowers)
        .value("EXPONENTS", Scales::kExponents);
    py::class_<low_latency::Sizes>(m, "Sizes")
        .def(py::init([](uint32_t max_tokens, uint32_t hidden, uint32_t topk, uint32_t experts, uint32_t id_bytes,
                         Scales scales, bool logfmt, uint32_t per_node, bool weighted) {
                 return low_latency::Sizes{max_tokens, hidden, topk,     experts, id_bytes,
                                           scales,     logfmt, per_node, weighted};
             }),
             py::kw_only(), py::arg("max_tokens"), py::arg("hidden"), py::arg("topk"), py::arg("experts"),
             py::arg("id_bytes"), py::arg("scales"), py::arg("logfmt"), py::arg("per_node"), py::arg("weighted"));
}

}  // namespace

void bind_low_latency(py::module_& module) {
    py::module_ m = module.def_submodule("low_latency", "The calls of low-latency mode.");
    bind_sizes(m);
    m.attr("MAX_EXPERTS") = wire::kMaxRoutedExperts;
    m.attr("MAX_RESULTS") = wire::kMaxResults;
    m.attr("SCALE_GROUP") = kScaleGroup;
    m.attr("LOG_GROUP") = kLogGroup;
    m.def("region_bytes", &low_latency::region_bytes, py::arg("sizes"), py::kw_only(), py::arg("ranks"),
          py::arg("has_remote"));
    m.def("places_words", &low_latency::places_words, py::arg("sizes"), py::kw_only(), py::arg("ranks"),
          py::arg("tokens"));
    m.def("put_bytes", &low_latency::put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("max_put_bytes", &low_latency::max_put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("fits_shared_memory", &low_latency::fits_shared_memory, py::arg("runtime"), py::arg("sizes"));
    m.def("dispatch", &dispatch, py::arg("runtime"), py::arg("sizes"), py::arg("tokens"), py::arg("x"),
          py::arg("topk_idx"), py::arg("topk_weights"), py::arg("recv_x"), py::arg("recv_scales"),
          py::arg("scales_stride"), py::arg("recv_count"), py::arg("src_info"), py::arg("ranges"), py::arg("places"),
          py::arg("stats"), py::arg("waited_ns"), py::arg("whole"), py::arg("blocks"), py::arg("forward_blocks"),
          NoGil());
    m.def("combine", &combine, py::arg("runtime"), py::arg("sizes"), py::arg("tokens"), py::arg("x"),
          py::arg("topk_idx"), py::arg("topk_weights"), py::arg("combined_x"), py::arg("publish"), py::arg("src_info"),
          py::arg("ranges"), py::arg("places"), py::arg("waited_ns"), py::arg("handle"), py::arg("whole"),
          py::arg("blocks"), py::arg("forward_blocks"), NoGil());
    m.def("forwards", &low_latency::forwards, py::arg("call"),
          "Return whether the call has a launch that only forwards, which forward() is to make.");
    m.def("forward", &low_latency::forward, py::arg("runtime"), py::arg("call"), NoGil());
    m.def("finish", &low_latency::finish, py::arg("runtime"), py::arg("call"), NoGil());
}

}  // namespace deep_ep::python
