// Bindings of the recording that a timeline is made from.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "observe/timeline.h"
#include "python/bindings.h"
#include "sim/executor/executor.h"

namespace deep_ep::python {
namespace {

namespace py = pybind11;
namespace timeline = observe::timeline;
using timeline::Event;
using timeline::Kind;
using NoGil = py::call_guard<py::gil_scoped_release>;

u64 now_ns() { return cpu::Executor::get().now_ns(); }

}  // namespace

void bind_timeline(py::module_& m) {
    py::module_ t = m.def_submodule("timeline", "A recording of kernels, waits, and what software NICs do.");
    py::enum_<Kind>(t, "Kind")
        .value("KERNEL", Kind::kKernel)
        .value("WAIT", Kind::kWait)
        .value("HOST_WAIT", Kind::kHostWait)
        .value("PUT", Kind::kPut)
        .value("SIGNAL", Kind::kSignal);
    py::class_<Event>(t, "Event")
        .def_readonly("kind", &Event::kind)
        .def_readonly("rank", &Event::rank)
        .def_readonly("peer", &Event::peer)
        .def_readonly("stream", &Event::stream)
        .def_readonly("block", &Event::block)
        .def_readonly("thread", &Event::thread)
        .def_readonly("begin", &Event::begin)
        .def_readonly("end", &Event::end)
        .def_readonly("value", &Event::value)
        .def_property_readonly("word", [](const Event& event) { return reinterpret_cast<uintptr_t>(event.word); })
        .def_property_readonly("name", [](const Event& event) { return std::string(event.name); });
    t.def(
        "start", [](size_t most) { timeline::start(most, now_ns); }, py::arg("most"), NoGil(),
        "Begin a recording of at most `most` events.");
    t.def("take", &timeline::take, py::arg("rank"), NoGil(), "Take the events of a rank out of the recording.");
    t.def("lost", &timeline::lost, NoGil(), "Return how many events were not kept.");
    t.def("stop", &timeline::stop, NoGil(), "End the recording.");
}

}  // namespace deep_ep::python
