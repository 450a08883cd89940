// Bindings of the proxy's measurements: see host/network/proxy/measure.
#include <pybind11/stl.h>

#include "host/heap/heap.h"
#include "host/network/proxy/measure/puts.h"
#include "python/bindings.h"
#include "sim/host/memory.h"
#include "sim/network/proxy/own_cost.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::Heap;
using host::NetworkPlace;
using host::proxy::OwnCost, host::proxy::PutLoops;
using Heaps = std::vector<std::shared_ptr<Heap>>;
using NoGil = py::call_guard<py::gil_scoped_release>;

struct Memories {
    host::CpuMemory memory;
    Heaps heaps;
};

NetworkPlace place_of(int rank, Memories& memories, std::string provider) {
    if (rank < 0 || static_cast<size_t>(rank) >= memories.heaps.size()) {
        throw std::invalid_argument("rank=" + std::to_string(rank) + ": expected one of " +
                                    std::to_string(memories.heaps.size()) + " heaps");
    }
    NetworkPlace place{};
    place.rank = rank;
    place.layout = host::proxy::measured_layout();
    for (const auto& heap : memories.heaps) {
        if (heap->bytes() < place.layout.bytes()) {
            throw std::invalid_argument("heaps: one has " + std::to_string(heap->bytes()) +
                                        " bytes; expected at least " + std::to_string(place.layout.bytes()));
        }
        place.heaps.push_back(heap->base());
        place.reached.push_back(true);
    }
    place.generation = 1;
    place.memory = &memories.memory;
    place.provider = std::move(provider);
    return place;
}

// The loops, with the memory that they use, which is freed after them.
class Puts : Memories, public PutLoops {
  public:
    Puts(host::proxy::Kind kind, int rank, Heaps heaps, std::string provider)
        : Memories{{}, both(std::move(heaps))}, PutLoops(kind, place_of(rank, *this, std::move(provider))) {}

  private:
    static Heaps both(Heaps heaps) {
        if (heaps.size() == 2) return heaps;
        throw std::invalid_argument("heaps: found " + std::to_string(heaps.size()) + ", expected those of two ranks");
    }
};

// Measures a single rank that is its own peer.
template <class Measure>
auto alone(const Measure& measure, u32 puts) {
    Memories memories{{}, {Heap::make_plain(host::proxy::measured_layout().bytes())}};
    return measure(place_of(0, memories, {}), puts);
}

}  // namespace

void bind_proxy(py::module_& module) {
    py::module_ m = module.def_submodule("proxy", "Measurements of the proxy. Times are those of time.monotonic().");
    constexpr wire::HeapLayout kLayout = host::proxy::measured_layout();
    m.attr("HEAP_BYTES") = kLayout.bytes();
    m.attr("SOURCES") = kLayout.region_offset(0);  // in the sender's heap
    m.attr("TARGETS") = kLayout.region_offset(0) + host::proxy::kMeasuredBytes;
    m.attr("MEASURED_BYTES") = host::proxy::kMeasuredBytes;
    py::enum_<host::proxy::Kind>(m, "Kind")
        .value("RAW", host::proxy::Kind::kRaw)
        .value("STEPPED", host::proxy::Kind::kStepped)
        .value("THREADED", host::proxy::Kind::kThreaded);
    py::class_<Puts>(m, "Puts", "Puts between rank 0 and rank 1, two processes that have mapped each other's heaps.")
        .def(py::init<host::proxy::Kind, int, Heaps, std::string>(), py::kw_only(), py::arg("kind"), py::arg("rank"),
             py::arg("heaps"), py::arg("provider"))
        .def_property_readonly("name", &PutLoops::name)
        .def("meet", &PutLoops::meet, NoGil(), "Wait until the peer has called this equally often.")
        .def("send", &PutLoops::send, py::arg("bytes"), py::arg("count"), py::arg("window"), NoGil(),
             "Make `count` puts, at most `window` at once; return when the first began and when all had completed.")
        .def("receive", &PutLoops::receive, py::arg("count"), NoGil(),
             "Wait for `count` more puts of the peer; return when they had arrived.")
        .def("round_trips", &PutLoops::round_trips, py::arg("bytes"), py::arg("count"), py::arg("first"), NoGil(),
             "Make `count` puts and wait for the answer to each, or answer them; return when this began and ended.");
    py::class_<OwnCost>(m, "OwnCost", "Latencies in nanoseconds, one of each kind per put.")
        .def_readonly("command_to_post", &OwnCost::command_to_post)
        .def_readonly("completion_to_word", &OwnCost::completion_to_word)
        .def_readonly("arrival_to_word", &OwnCost::arrival_to_word);
    m.def(
        "own_cost", [](u32 puts) { return alone(host::proxy::own_cost, puts); }, py::arg("puts"), NoGil(),
        "Measure the proxy's own cost, over the loopback.");
    m.def(
        "command_rate", [](u32 commands) { return alone(host::proxy::command_rate, commands); }, py::arg("commands"),
        NoGil(), "Measure commands per second, each sent and received, over a transport that does both at once.");
}

}  // namespace deep_ep::python
