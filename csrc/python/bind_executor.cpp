// Bindings of the executor: worlds of rank threads, events of the thread-backed process group, schedules.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "python/bindings.h"
#include "sim/executor/executor.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using cpu::Executor;
using NoGil =
    py::call_guard<py::gil_scoped_release>;  // the waiting thread drives, and may hand over to another Python thread

void translate_broken_rule(std::exception_ptr error) {
    const auto raise = [](const char* name, const char* message) {
        const py::object type = py::module_::import("deep_ep_py.errors").attr(name);
        PyErr_SetString(type.ptr(), message);
    };
    try {
        std::rethrow_exception(error);
    } catch (const cpu::DeadlockError& deadlock) {
        raise("DeadlockError", deadlock.what());
    } catch (const cpu::SimtError& broken_rule) {
        raise("SimtError", broken_rule.what());
    }
}

py::dict as_dict(const cpu::WorldStats& stats) {
    py::dict result;
    result["event_hash"] = stats.event_hash;
    result["switches"] = stats.switches;
    result["launches"] = stats.launches;
    result["peak_fibers"] = stats.peak_fibers;
    result["collectives"] = stats.collectives;
    result["barriers"] = stats.barriers;
    result["clock_jumps"] = stats.clock_jumps;
    return result;
}

py::dict world_end(bool abandon) {
    cpu::WorldStats stats;
    {
        py::gil_scoped_release no_gil;
        stats = Executor::get().world_end(abandon);
    }
    return as_dict(stats);
}

}  // namespace

void bind_executor(py::module_& m) {
    py::register_local_exception_translator(translate_broken_rule);
    py::module_ e = m.def_submodule("executor", "The SIMT executor: kernels on a CPU, ranks as threads.");
    Executor& executor = Executor::get();
    executor.set_interrupt_check(check_signals);

    e.def(
        "world_begin",
        [](int ranks, uint64_t seed, unsigned freeze) { return Executor::get().world_begin(ranks, {seed, freeze}); },
        py::arg("ranks"), py::arg("seed") = 0, py::arg("freeze") = cpu::Schedule{}.freeze, NoGil(),
        "Open a world of rank threads whose schedule is drawn from the seed (0: first come, first served). Return its "
        "number.");
    e.def(
        "world_enter", [](int rank, uint64_t number) { Executor::get().world_enter(rank, number); }, py::arg("rank"),
        py::arg("number"), NoGil(),
        "Enter a world. The first call by the thread of a rank; returns when its turn comes.");
    e.def(
        "world_leave", [](int rank) { Executor::get().world_leave(rank); }, py::arg("rank"), NoGil(),
        "Leave the world. The last call by the thread of a rank.");
    e.def(
        "world_abort", [](uint64_t number, const std::string& why) { Executor::get().world_abort(number, why); },
        py::arg("number"), py::arg("why"), NoGil(),
        "Make every wait in that world raise SimtError. For a thread that belongs to no rank.");
    e.def(
        "world_end", world_end, py::arg("abandon") = false,
        "Close the world after all ranks have left: complete the kernels that are still running, or drop them. Return "
        "statistics.");
    e.def("new_event", [] { return Executor::get().new_event(); }, NoGil());
    e.def("set_event", [](int event) { Executor::get().set_event(event); }, py::arg("event"), NoGil());
    e.def(
        "wait_event", [](int event, const std::string& what) { Executor::get().wait_event(event, what.c_str()); },
        py::arg("event"), py::arg("what"), NoGil());
    e.def(
        "set_schedule", [](uint64_t seed, unsigned freeze) { Executor::get().set_schedule({seed, freeze}); },
        py::arg("seed"), py::arg("freeze") = cpu::Schedule{}.freeze, NoGil(),
        "Draw the schedule of kernels of this process from a seed (0: first come, first served).");
    e.def(
        "sleep",
        [](double seconds) {
            Executor& executor = Executor::get();
            executor.wait([] { return false; }, "a sleep", executor.now_ns() + nanoseconds(seconds));
        },
        py::arg("seconds"), NoGil(), "Wait for this time, by the clock that kernels see.");
    e.def("now_ns", [] { return Executor::get().now_ns(); }, NoGil(), "Read the clock that kernels see.");
    e.def("dump", [] { return Executor::get().dump(); }, NoGil(), "List where each thread waits now.");
    e.def(
        "last_stall", [] { return Executor::get().last_stall(); }, NoGil(),
        "List where each thread waited when the clock of the world last jumped to a deadline of a kernel.");
}

}  // namespace deep_ep::python
