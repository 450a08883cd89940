// Bindings of the CPU's vector operations, for benchmark baselines and tests, and of its check of expert ids.
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/bf16.h"
#include "device/fp8_scales.h"
#include "device/logfmt.h"
#include "python/bindings.h"
#include "sim/vector/vector.h"

namespace deep_ep::python {
namespace {

namespace py = pybind11;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Copies row by row in the given order, with one fence for all of them, which is what a single thread needs before it
// signals that they have arrived.
void copy_rows(uintptr_t dst_addresses, uintptr_t src_addresses, size_t n, size_t row_bytes, bool streaming) {
    const auto* dst = pointer<u8* const>(dst_addresses);
    const auto* src = pointer<const u8* const>(src_addresses);
    if (streaming) return cpu::stream_rows(dst, src, n, row_bytes);
    for (size_t i = 0; i < n; ++i) cpu::copy(dst[i], src[i], row_bytes);
}

void copy_row_to_many(const std::vector<uintptr_t>& dst, uintptr_t src, size_t bytes, bool streaming) {
    const auto* addresses = reinterpret_cast<u8* const*>(dst.data());
    cpu::copy_to_many(addresses, static_cast<unsigned>(dst.size()), pointer<const void>(src), bytes, streaming);
}

cpu::SumBf16 find_sum(const std::string& instructions) {
    if (instructions.empty()) return cpu::sum_bf16;
    const cpu::SumVersions versions = cpu::sum_versions();
    for (size_t i = 0; i < versions.count; ++i) {
        const cpu::SumVersion& version = versions.first[i];
        if (version.instructions == instructions && version.usable) return version.sum;
    }
    throw std::invalid_argument("no version of the sum for " + instructions + " on this CPU");
}

void sum_row(uintptr_t dst, const std::vector<uintptr_t>& src, uintptr_t bias0, uintptr_t bias1, size_t elements,
             const std::string& instructions, const std::vector<float>& weights) {
    if (!weights.empty() && weights.size() != src.size()) throw std::invalid_argument("weights: expected one per row");
    if (elements % 8 != 0) throw std::invalid_argument("elements: expected a multiple of 8");
    find_sum(instructions)(pointer<void>(dst), reinterpret_cast<const u8* const*>(src.data()),
                           weights.empty() ? nullptr : weights.data(), static_cast<unsigned>(src.size()),
                           pointer<const void>(bias0), pointer<const void>(bias1), elements);
}

std::vector<std::string> sum_instructions() {
    std::vector<std::string> usable;
    const cpu::SumVersions versions = cpu::sum_versions();
    for (size_t i = 0; i < versions.count; ++i) {
        if (versions.first[i].usable) usable.emplace_back(versions.first[i].instructions);
    }
    return usable;
}

void round_to_bf16(uintptr_t dst, uintptr_t src, size_t n) {
    for (size_t i = 0; i < n; ++i) pointer<u16>(dst)[i] = float_to_bf16(pointer<const float>(src)[i]);
}

void round_to_e4m3(uintptr_t dst, uintptr_t src, size_t n) {
    for (size_t i = 0; i < n; ++i) pointer<u8>(dst)[i] = float_to_e4m3(pointer<const float>(src)[i]);
}

// Returns the values after a round trip: decoded for groups that are cast, unchanged for the others.
void round_to_logfmt(uintptr_t dst, uintptr_t src, size_t n) {
    if (n % kLogGroup != 0) throw std::invalid_argument("n: expected a multiple of " + std::to_string(kLogGroup));
    for (size_t begin = 0; begin < n; begin += kLogGroup) {
        const auto* const from = pointer<const u16>(src) + begin;
        float* const to = pointer<float>(dst) + begin;
        LogGroup group = LogGroup::none();
        for (size_t i = 0; i < kLogGroup; ++i) group.add(from[i]);
        group = group.bounded();
        for (size_t i = 0; i < kLogGroup; i += kLogPiece) {
            u32 words[kLogPiece / 2];
            std::memcpy(words, from + i, sizeof(words));
            const LogPiece piece = LogPiece::of(words, group, group.rate());
            for (u32 e = 0; e < kLogPiece; ++e) {
                to[i + e] = group.is_cast() ? piece.decoded(e, group, group.step()) : bf16_to_float(from[i + e]);
            }
        }
    }
}

void widen_to_float(uintptr_t dst, uintptr_t src, size_t n) {
    for (size_t i = 0; i < n; ++i) pointer<float>(dst)[i] = bf16_to_float(pointer<const u16>(src)[i]);
}

template <class T>
bool ids_fit(const T* ids, size_t n, uint64_t experts) {
    bool fit = true;
    for (size_t i = 0; i < n; ++i) fit &= static_cast<uint64_t>(int64_t{ids[i]}) + 1 <= experts;
    return fit;
}

}  // namespace

void bind_vector(py::module_& m) {
    m.def("copy_rows", copy_rows, py::arg("dst_addresses"), py::arg("src_addresses"), py::arg("n"),
          py::arg("row_bytes"), py::arg("streaming"), ReleaseGil(),
          "Copy n rows one after the other; the addresses are arrays of n 64-bit words.");
    m.def("copy_row_to_many", copy_row_to_many, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::arg("streaming"),
          ReleaseGil(), "Copy one row to every address of the list `dst`.");
    m.def("sum_row", sum_row, py::arg("dst"), py::arg("src"), py::arg("bias0"), py::arg("bias1"), py::arg("elements"),
          py::arg("instructions") = "", py::arg("weights") = std::vector<float>{}, ReleaseGil(),
          "Sum bfloat16 rows in list order, times their weights if given, then the biases (0: none), in fp32, rounded "
          "once.");
    m.def("sum_instructions", sum_instructions,
          "Return the instruction sets of this CPU for which sum_row has a version, widest first.");
    m.def("round_to_bf16", round_to_bf16, py::arg("dst"), py::arg("src"), py::arg("n"), ReleaseGil(),
          "Round n floats to nearest even.");
    m.def("round_to_logfmt", round_to_logfmt, py::arg("dst"), py::arg("src"), py::arg("n"), ReleaseGil(),
          "Round n bfloat16 values to LogFMT in groups of LOG_GROUP and decode them to fp32.");
    m.def("round_to_e4m3", round_to_e4m3, py::arg("dst"), py::arg("src"), py::arg("n"), ReleaseGil(),
          "Round n floats to float8_e4m3fn, to nearest even; larger values saturate.");
    m.def("widen_to_float", widen_to_float, py::arg("dst"), py::arg("src"), py::arg("n"), ReleaseGil(),
          "Widen n bfloat16 values to fp32.");
    m.def(
        "pretouch", [](uintptr_t address, size_t bytes) { cpu::pretouch(pointer<void>(address), bytes); },
        py::arg("address"), py::arg("bytes"), ReleaseGil(), "Make every page of a range present without changing it.");
    m.def(
        "ids_fit",
        [](uintptr_t ids, size_t n, uint32_t id_bytes, uint64_t experts) {
            return id_bytes == sizeof(i32) ? ids_fit(pointer<const i32>(ids), n, experts)
                                           : ids_fit(pointer<const i64>(ids), n, experts);
        },
        py::arg("ids"), py::arg("n"), py::arg("id_bytes"), py::arg("experts"),
        "Return whether each of n expert ids is -1 or less than `experts`.");
    m.attr("STREAMING_THRESHOLD") = cpu::streaming_threshold();
}

}  // namespace deep_ep::python
