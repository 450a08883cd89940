// A Python module with the executor's bindings and kernels of a few lines, for tests of the executor itself.
#include <pybind11/pybind11.h>

#include <csignal>
#include <string>

#include "kernels.h"
#include "python/bindings.h"
#include "sim/executor/executor.h"

namespace py = pybind11;

namespace {

using deep_ep::cpu::Executor;
using selftest::Args;
using NoGil = py::call_guard<py::gil_scoped_release>;

deep_ep::u64* at(uint64_t address) { return reinterpret_cast<deep_ep::u64*>(address); }

uint64_t launch(const std::string& kernel, int rank, int stream, unsigned blocks, unsigned warps, uint64_t word,
                uint64_t value, uint64_t deadline, uint64_t result, size_t shared_bytes) {
    const auto found = selftest::kKernels.find(kernel);
    const Args args{at(word), value, deadline, at(result)};
    return Executor::get().launch({found->first.c_str(), rank, stream, blocks, warps * Executor::get().warp_size(),
                                   shared_bytes, found->second, &args, sizeof args});
}

bool wait_word(uint64_t word, uint64_t value, uint64_t deadline) {
    const auto reached = [&] { return __atomic_load_n(at(word), __ATOMIC_ACQUIRE) >= value; };
    return Executor::get().wait(reached, "a word", deadline);
}

int add_echo(int rank, uint64_t word) {
    return Executor::get().add_agent(rank, "echo", [word] { selftest::echo(at(word)); });
}

int add_thrower(int rank) {
    return Executor::get().add_agent(rank, "thrower", [] { throw std::runtime_error("out of paper"); });
}

// `signal`, if not 0, is raised just before.
void remove_agent(int id, int signal) {
    if (signal != 0) std::raise(signal);
    Executor::get().remove_agent(id);
}

}  // namespace

PYBIND11_MODULE(selftest, m) {
    m.attr("WARP_SIZE") = Executor::get().warp_size();
    deep_ep::python::bind_executor(m);
    m.def("launch", launch, py::arg("kernel"), py::arg("rank") = 0, py::arg("stream") = 0, py::arg("blocks") = 1,
          py::arg("warps") = 1, py::arg("word") = 0, py::arg("value") = 0, py::arg("deadline") = UINT64_MAX,
          py::arg("result") = 0, py::arg("shared_bytes") = 0, NoGil());
    m.def("finished", [](uint64_t serial) { return Executor::get().finished(serial); }, NoGil());
    m.def(
        "synchronize", [](int rank, int stream) { Executor::get().synchronize(rank, stream); }, py::arg("rank") = 0,
        py::arg("stream") = 0, NoGil());
    m.def("wait_word", wait_word, py::arg("word"), py::arg("value"), py::arg("deadline") = UINT64_MAX, NoGil());
    m.def("add_echo", add_echo, py::arg("rank"), py::arg("word"), NoGil());
    m.def("add_thrower", add_thrower, py::arg("rank"), NoGil());
    m.def("remove_agent", remove_agent, py::arg("id"), py::arg("signal") = 0, NoGil());
}
