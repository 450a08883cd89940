// Bindings of the calls of each mode.
#include <pybind11/stl.h>

#include "host/modes/measure/post.h"
#include "host/modes/normal/calls.h"
#include "host/modes/normal/chunk_size.h"
#include "host/modes/normal/two_hops.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::Runtime;
using host::normal::CombineTensors;
using host::normal::CountTensors;
using host::normal::DispatchTensors;
using host::normal::Sizes;
using NoGil = py::call_guard<py::gil_scoped_release>;

using host::two_hops::TwoHopPlan;

i32* numbers(uint64_t address) { return reinterpret_cast<i32*>(address); }

Plan make_plan(uint64_t token_row, uint64_t row_token, uint64_t rank_prefix, uint64_t source_tokens,
               uint64_t rows_to_rank, uint64_t rank_begin, uint64_t rank_end, uint64_t token_node,
               uint64_t tokens_to_node) {
    return {numbers(token_row),     numbers(row_token),    numbers(rank_prefix),
            numbers(source_tokens), numbers(rows_to_rank), numbers(rank_begin),
            numbers(rank_end),      numbers(token_node),   numbers(tokens_to_node)};
}

TwoHopPlan make_two_hop_plan(uint64_t sent, uint64_t sent_token, uint64_t sent_ranks, uint64_t sent_marks,
                             uint64_t node_row, uint64_t rows_to_rank, uint64_t forwarded, uint64_t node_rows,
                             uint64_t rank_prefix, uint64_t node_forwarded, uint64_t rank_begin, uint64_t table,
                             uint64_t holders, uint32_t table_rows) {
    return {numbers(sent),           numbers(sent_token), reinterpret_cast<u32*>(sent_ranks),
            numbers(sent_marks),     numbers(node_row),   numbers(rows_to_rank),
            numbers(forwarded),      numbers(node_rows),  numbers(rank_prefix),
            numbers(table),          numbers(holders),    table_rows,
            numbers(node_forwarded), numbers(rank_begin)};
}

// Binds the calls that one-hop and two-hop mode have in common; their arguments have the same names.
template <class Notify, class Dispatch, class Combine>
void bind_way(py::module_& m, Notify notify, Dispatch dispatch, Combine combine) {
    m.def("notify", notify, py::arg("runtime"), py::arg("sizes"), py::kw_only(), py::arg("is_token_in_rank"),
          py::arg("tokens_per_expert"), py::arg("checked_ids"), py::arg("plan"), py::arg("counts"), py::arg("max_rows"),
          py::arg("finish_later"), py::arg("blocks"), NoGil());
    m.def("dispatch", dispatch, py::arg("runtime"), py::arg("call"), py::arg("sizes"), py::arg("tensors"),
          py::kw_only(), py::arg("plan"), py::arg("rows"), py::arg("cached"), py::arg("blocks"), NoGil());
    m.def("combine", combine, py::arg("runtime"), py::arg("call"), py::arg("sizes"), py::arg("tensors"), py::kw_only(),
          py::arg("plan"), py::arg("rows"), py::arg("publish"), py::arg("blocks"), NoGil());
}

void bind_two_hops(py::module_& module) {
    py::module_ m = module.def_submodule("two_hops", "The calls of normal mode in two hops.");
    py::class_<TwoHopPlan>(m, "Plan").def(
        py::init(&make_two_hop_plan), py::kw_only(), py::arg("sent"), py::arg("sent_token"), py::arg("sent_ranks"),
        py::arg("sent_marks"), py::arg("node_row"), py::arg("rows_to_rank"), py::arg("forwarded"), py::arg("node_rows"),
        py::arg("rank_prefix"), py::arg("node_forwarded"), py::arg("rank_begin"), py::arg("table"), py::arg("holders"),
        py::arg("table_rows"));
    m.def("min_region_bytes", &host::two_hops::min_region_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("staging", &host::two_hops::staging, py::arg("sizes"), py::kw_only(), py::arg("ranks"),
          py::arg("ranks_per_node"), py::arg("bytes_in_flight"));
    m.def("chunk_rows", &host::two_hops::chunk_rows, py::arg("runtime"), py::arg("sizes"));
    m.def("put_bytes", &host::two_hops::put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("max_ranks", &host::two_hops::max_ranks, py::arg("runtime"), py::arg("experts"));
    bind_way(m, &host::two_hops::notify, &host::two_hops::dispatch, &host::two_hops::combine);
    m.attr("MARK_ROWS") = wire::kMarkRows;
    m.attr("SET_BITS") = wire::kSetBits;
    m.attr("ROLES") = wire::kRoles;
    m.attr("SLOTS") = wire::kSlots;
    m.attr("MAX_CHUNK_ROWS") = host::kMaxChunkRows;
    m.attr("MAX_CHUNK_BYTES") = host::kMaxRailChunkBytes;
}

void bind_normal(py::module_& module) {
    py::module_ m = module.def_submodule("normal", "The calls of normal mode.");
    py::class_<Sizes>(m, "Sizes")
        .def(py::init([](uint32_t tokens, uint32_t row_bytes, uint32_t topk, uint32_t experts, uint32_t id_bytes,
                         uint32_t scales, uint32_t types, bool weights, uint32_t expands) {
                 return Sizes{tokens, row_bytes, topk, experts, id_bytes, scales, types, weights, expands};
             }),
             py::arg("tokens"), py::arg("row_bytes"), py::arg("topk"), py::arg("experts"), py::kw_only(),
             py::arg("id_bytes") = sizeof(i64), py::arg("scales") = 0, py::arg("types") = 0, py::arg("weights") = true,
             py::arg("expands") = 0)
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
        .def_readwrite("recv_src_idx", &DispatchTensors::recv_src_idx)
        .def_readwrite("source_words", &DispatchTensors::source_words)
        .def_readwrite("ordinals", &DispatchTensors::ordinals)
        .def_readwrite("expanded_rows", &DispatchTensors::expanded_rows);
    py::class_<CombineTensors>(m, "CombineTensors")
        .def(py::init<>())
        .def_readwrite("x", &CombineTensors::x)
        .def_readwrite("topk_weights", &CombineTensors::topk_weights)
        .def_readwrite("src_idx", &CombineTensors::src_idx)
        .def_readwrite("source_words", &CombineTensors::source_words)
        .def_readwrite("combined_x", &CombineTensors::combined_x)
        .def_readwrite("combined_weights", &CombineTensors::combined_weights)
        .def_readwrite("bias", &CombineTensors::bias)
        .def_readwrite("topk_idx", &CombineTensors::topk_idx)
        .def_readwrite("choices", &CombineTensors::choices)
        .def_readwrite("id_bytes", &CombineTensors::id_bytes)
        .def_readwrite("experts", &CombineTensors::experts);
    py::class_<CountTensors>(m, "CountTensors")
        .def(py::init<>())
        .def_readwrite("rank_sums", &CountTensors::rank_sums)
        .def_readwrite("expert_sums", &CountTensors::expert_sums)
        .def_readwrite("expert_rows", &CountTensors::expert_rows)
        .def_readwrite("statistics", &CountTensors::statistics)
        .def_readwrite("alignment", &CountTensors::alignment)
        .def_readwrite("expanded", &CountTensors::expanded)
        .def_readwrite("starts", &CountTensors::starts);
    py::class_<Plan>(m, "Plan").def(py::init(&make_plan), py::arg("token_row"), py::arg("row_token"),
                                    py::arg("rank_prefix"), py::arg("source_tokens"), py::arg("rows_to_rank"),
                                    py::arg("rank_begin") = 0, py::arg("rank_end") = 0, py::arg("token_node") = 0,
                                    py::arg("tokens_to_node") = 0);
    m.def("min_region_bytes", &host::normal::min_region_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("put_bytes", &host::normal::put_bytes, py::arg("runtime"), py::arg("sizes"));
    m.def("max_ranks", &host::normal::max_ranks, py::arg("runtime"), py::arg("experts"));
    m.def("layout", &host::normal::layout, py::arg("runtime"), py::arg("sizes"), py::kw_only(), py::arg("topk_idx"),
          py::arg("tokens_per_rank"), py::arg("tokens_per_node"), py::arg("tokens_per_expert"),
          py::arg("is_token_in_rank"), py::arg("blocks"), py::arg("zero_words") = 0, NoGil());
    m.def("counts", &host::normal::counts, py::arg("call"), NoGil());
    m.def("total_rows", &host::normal::total_rows, py::arg("call"));
    m.def("forwarded_rows", &host::normal::forwarded_rows, py::arg("call"));
    m.def("rows_per_expert", &host::normal::rows_per_expert, py::arg("call"));
    m.attr("CALL_WORDS") = host::normal::kCallWords;
    const auto open = [&m](const char* name, wire::Kind kind) {
        m.def(
            name,
            [kind](Runtime& runtime, const Sizes& sizes, uint64_t handle) {
                return host::normal::open(runtime, kind, sizes, handle);
            },
            py::arg("runtime"), py::arg("sizes"), py::kw_only(), py::arg("handle"), NoGil());
    };
    open("open_cached_dispatch", wire::Kind::kCachedDispatch);
    open("open_combine", wire::Kind::kCombine);
    bind_way(m, &host::normal::notify, &host::normal::dispatch, &host::normal::combine);
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
    bind_two_hops(m);
    bind_expand(m);
    bind_low_latency(m);
    bind_measure(m);
}

}  // namespace deep_ep::python
