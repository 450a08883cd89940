// The interpreter of PTX.
#include "device/copy_stage.h"
#include "host/cpu/kernel_source.h"
#include "ptx/library.h"
#include "ptx/order/order.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::KernelSource;
using ptx::Image;
using ptx::Library;

// Kernels that are interpreted instead of those that are compiled into this extension.
class PtxKernels final : public KernelSource {
  public:
    explicit PtxKernels(bool bulk_copies) : bulk_copies_(bulk_copies) {}

    void find(cpu::Launch& launch, const RuntimeShape& shape, std::string& held) const override {
        library.find(launch, {shape.ranks(), shape.row_bytes(), shape.topk()}, held);
    }
    uint32_t copies_bytes() const override { return bulk_copies_ ? device::CopyStage::kBytes : 0; }

    Library library;

  private:
    const bool bulk_copies_;
};

// A kernel by itself, without a Buffer: to its end, or to what it breaks.
void run(const std::shared_ptr<Image>& image, const std::string& symbol, unsigned blocks, unsigned threads,
         size_t shared_bytes, const std::string& args) {
    cpu::Executor& executor = cpu::Executor::get();
    cpu::Launch launch{};
    launch.name = symbol.c_str();
    launch.stream = executor.new_stream();
    launch.blocks = blocks;
    launch.threads = threads;
    launch.shared_bytes = shared_bytes;
    launch.args = args.data();
    launch.args_bytes = args.size();
    std::string held;
    ptx::prepare(launch, held, *image, symbol, {});
    const uint64_t serial = executor.launch(launch);
    executor.wait([&] { return executor.finished(serial); }, "a kernel of PTX");
    executor.release_stream(launch.rank, launch.stream);
}

}  // namespace

void bind_ptx(py::module_& module) {
    py::module_ m = module.def_submodule("ptx", "The compiler's PTX, interpreted.");
    py::register_local_exception<ptx::PtxError>(m, "PtxError");
    py::class_<Image, std::shared_ptr<Image>>(m, "Image", "A module of PTX.")
        .def(py::init([](const std::string& text) { return std::make_shared<Image>(ptx::parse(text)); }),
             py::arg("text"))
        .def_property_readonly("instructions", [](const Image& image) {
            size_t count = 0;
            for (const ptx::Function& function : image.module().functions) count += function.code.size();
            return count;
        });
    m.def("watch", &ptx::Order::watch, py::arg("on"), py::kw_only(), py::arg("seed") = 0,
          "Begin to watch the order of kernels' accesses to memory, with nothing known of any, or cease to. From the "
          "seed is drawn which loads of words return old values; 0: none does.");
    m.def(
        "add_heap",
        [](u64 base, u64 bytes) {
            if (const auto order = ptx::Order::watched()) order->add_heap(base, bytes);
        },
        py::arg("base"), py::arg("bytes"), "Name memory that several ranks' kernels use.");
    m.def(
        "run",
        [](const std::shared_ptr<Image>& image, const std::string& symbol, unsigned blocks, unsigned threads,
           size_t shared_bytes, const py::bytes& args) {
            const std::string held = args;
            const py::gil_scoped_release release;
            run(image, symbol, blocks, threads, shared_bytes, held);
        },
        py::arg("image"), py::arg("symbol"), py::kw_only(), py::arg("blocks") = 1, py::arg("threads") = 32,
        py::arg("shared_bytes") = 0, py::arg("args"),
        "Run a kernel of a module by itself, whose parameters are these bytes.");
    py::class_<KernelSource, std::shared_ptr<KernelSource>>(m, "KernelSource");
    py::class_<PtxKernels, KernelSource, std::shared_ptr<PtxKernels>>(
        m, "Kernels", "Kernels that a Runtime launches instead of its own.")
        .def(py::init<bool>(), py::arg("bulk_copies"))
        .def(
            "has",
            [](const PtxKernels& kernels, const std::string& name, const Library::Shape& shape) {
                return kernels.library.has(name, shape);
            },
            py::arg("name"), py::arg("shape"))
        .def(
            "add",
            [](PtxKernels& kernels, const std::string& name, const Library::Shape& shape, std::string symbol,
               std::shared_ptr<Image> image) { kernels.library.add(name, shape, std::move(symbol), std::move(image)); },
            py::arg("name"), py::arg("shape"), py::arg("symbol"), py::arg("image"));
}

}  // namespace deep_ep::python
