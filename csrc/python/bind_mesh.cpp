// Bindings of the connections to ranks on other machines.
#include <pybind11/stl.h>

#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::Mesh, host::TagKey;

TagKey key_of(const py::bytes& bytes) {
    const std::string_view text = bytes;
    TagKey key{};
    if (text.size() != sizeof(key)) throw std::invalid_argument("key: expected 16 bytes");
    std::memcpy(&key, text.data(), sizeof(key));
    return key;
}

// A forked child has a copy without the thread; close_in_child() closes its sockets there.
struct DeleteInMaker {
    pid_t maker = getpid();

    void operator()(Mesh* mesh) const {
        if (getpid() == maker) delete mesh;
    }
};

}  // namespace

void bind_mesh(py::module_& m) {
    py::class_<Mesh, std::shared_ptr<Mesh>> mesh(m, "Mesh",
                                                 "Connections to ranks on other machines, and the thread that serves "
                                                 "them.");
    py::enum_<Mesh::State>(mesh, "State")
        .value("HEARD", Mesh::State::kHeard)
        .value("ENDED", Mesh::State::kEnded)
        .value("SILENT", Mesh::State::kSilent)
        .value("UNHEARD", Mesh::State::kUnheard);
    py::class_<Mesh::End>(mesh, "End")
        .def(py::init([](int rank, int socket, std::string machine, const py::bytes& own, const py::bytes& theirs) {
                 return Mesh::End{rank, socket, std::move(machine), key_of(own), key_of(theirs)};
             }),
             py::kw_only(), py::arg("rank"), py::arg("socket"), py::arg("machine"), py::arg("own"), py::arg("theirs"));
    mesh.def(py::init([](const std::vector<Mesh::End>& ends) {
                 return std::shared_ptr<Mesh>(new Mesh(ends), DeleteInMaker{});
             }),
             py::arg("ends"))
        .def_property_readonly("ranks", &Mesh::ranks)
        .def_property_readonly("news", &Mesh::news, "A descriptor that is readable when there may be news.")
        .def("has_news", &Mesh::has_news, py::arg("rank"))
        .def("clear_news", &Mesh::clear_news)
        .def("state", &Mesh::state, py::arg("rank"))
        .def(
            "send", [](Mesh& self, int rank, const py::bytes& message) { self.send(rank, message); }, py::arg("rank"),
            py::arg("message"))
        .def(
            "receive",
            [](Mesh& self, int rank) -> py::object {
                const auto message = self.receive(rank);
                return message ? py::object(py::bytes(*message)) : py::none();
            },
            py::arg("rank"))
        .def("drop", &Mesh::drop, py::arg("rank"))
        .def("close_in_child", &Mesh::close_in_child);
    m.def(
        "tag",
        [](const py::bytes& key, const std::string& text) {
            host::TagMaker maker(key_of(key));
            maker.add(text.data(), text.size());
            const wire::control::Tag tag = maker.finish();
            return py::bytes(reinterpret_cast<const char*>(&tag), sizeof(tag));
        },
        py::arg("key"), py::arg("text"), "SipHash-2-4 of 128 bits.");
    m.attr("SILENT_SECONDS") = static_cast<double>(wire::control::kSilentNs) * 1e-9;
}

}  // namespace deep_ep::python
