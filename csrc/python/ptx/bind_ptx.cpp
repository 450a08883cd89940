// Bindings of the PTX interpreter.
#include <pybind11/stl.h>

#include "device/copy_stage.h"
#include "python/bindings.h"
#include "sim/host/kernel_source.h"
#include "sim/ptx/count/counts.h"
#include "sim/ptx/library.h"
#include "sim/ptx/order/order.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::KernelSource;
using ptx::Image;
using ptx::Library;

// Kernels to interpret instead of those compiled into this extension.
class PtxKernels final : public KernelSource {
  public:
    PtxKernels(uint32_t copy_piece, unsigned warps) : copy_piece_(copy_piece), warps_(warps) {}

    void find(cpu::Launch& launch, const RuntimeShape& shape, std::string& held) const override {
        library.find(launch, {shape.ranks(), shape.row_bytes(), shape.topk()}, held);
    }
    uint32_t copies_bytes() const override { return device::CopyStage::bytes(copy_piece_); }

    unsigned warps() const override { return warps_; }
    host::ChunkSizes chunks() const override { return host::kGpuChunks; }

    Library library;

  private:
    const uint32_t copy_piece_;
    const unsigned warps_;
};

struct InstructionReport {
    ptx::InstructionText text;
    ptx::InstructionCount count;
};

// The counts of instructions that have been executed.
std::map<std::string, std::pair<ptx::KernelCount, std::vector<InstructionReport>>> counted() {
    std::map<std::string, std::pair<ptx::KernelCount, std::vector<InstructionReport>>> found;
    const auto counts = ptx::Counts::active();
    if (counts == nullptr) return found;
    for (const auto& [symbol, kernel] : counts->kernels()) {
        std::vector<InstructionReport> reports;
        for (size_t i = 0; i < kernel.texts.size(); ++i) {
            const ptx::InstructionText& text = kernel.texts[i];
            const ptx::InstructionCount& count = kernel.count.instructions[i];
            if (count.threads != 0) reports.push_back({text, count});
        }
        found.emplace(symbol, std::pair(kernel.count, std::move(reports)));
    }
    return found;
}

// Runs a kernel on its own, without a Buffer, until it ends or breaks a rule.
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
    py::module_ m = module.def_submodule("ptx", "An interpreter of the PTX that the compiler emits.");
    py::register_local_exception<ptx::PtxError>(m, "PtxError");
    py::class_<Image, std::shared_ptr<Image>>(m, "Image", "A PTX module.")
        .def(py::init([](const std::string& text) { return std::make_shared<Image>(ptx::parse(text)); }),
             py::arg("text"))
        .def_property_readonly("instructions", [](const Image& image) {
            size_t count = 0;
            for (const ptx::Function& function : image.module().functions) count += function.code.size();
            return count;
        });
    m.def("watch", &ptx::Order::watch, py::arg("on"), py::kw_only(), py::arg("seed") = 0,
          "Start watching the order of kernels' memory accesses afresh, or stop. The seed decides which loads of words "
          "return old values; 0: none does.");
    m.def(
        "add_heap",
        [](u64 base, u64 bytes, u32 rank) {
            if (const auto order = ptx::Order::watched()) order->add_heap(base, bytes);
            if (const auto counts = ptx::Counts::active()) counts->add_heap(base, bytes, rank);
        },
        py::arg("base"), py::arg("bytes"), py::arg("rank"),
        "Declare memory of a rank that kernels of several ranks use.");
    using What = ptx::Counts::What;
    m.def(
        "count", [](bool on) { ptx::Counts::count(on ? What::kExecutions : What::kNothing, false, 0); }, py::arg("on"),
        "Start counting what kernels execute, from zero, or stop.");
    m.def(
        "time",
        [](bool one_gpu, bool counts, double nic) {
            ptx::Counts::count(counts ? What::kAll : What::kTimes, one_gpu, nic);
        },
        py::kw_only(), py::arg("one_gpu"), py::arg("counts"), py::arg("nic") = 0.0,
        "Start predicting how long kernels take, from zero, until count(False). Threads are scheduled by the time that "
        "they have spent, and deadlines never pass. `one_gpu`: on a GPU that all ranks share. `counts`: also do "
        "what count(True) does, which takes most of the memory. `nic`: bytes per second that the NICs of a rank send; "
        "0: any number.");
    m.attr("NIC_PLACE") = ptx::NicTime::kPlace;
    py::class_<ptx::LaunchTime>(m, "LaunchTime", "The time of a launch, and its longest path.")
        .def_readonly("rank", &ptx::LaunchTime::rank)
        .def_readonly("blocks", &ptx::LaunchTime::blocks)
        .def_property_readonly(
            "thread_instructions", [](const ptx::LaunchTime& time) { return time.work.instructions; },
            "Of all threads.")
        .def_property_readonly(
            "own_bytes", [](const ptx::LaunchTime& time) { return time.work.own_bytes; },
            "Bytes of rows that it loads from or stores into memory of its rank.")
        .def_property_readonly("peer_bytes", [](const ptx::LaunchTime& time) { return time.work.peer_bytes; })
        .def_readonly("nic_bytes", &ptx::LaunchTime::nic_bytes, "That the rank's NICs have sent meanwhile.")
        .def_readonly("begin", &ptx::LaunchTime::begin, "In cycles of the modeled GPUs.")
        .def_property_readonly("end", [](const ptx::LaunchTime& time) { return time.end.cycles; })
        .def_property_readonly("instructions", [](const ptx::LaunchTime& time) { return time.end.instructions; })
        .def_property_readonly(
            "waits", [](const ptx::LaunchTime& time) { return time.end.waits; }, "For data from global memory.")
        .def_property_readonly(
            "fences", [](const ptx::LaunchTime& time) { return time.end.fences; }, "At device and system scope.")
        .def_property_readonly(
            "barriers", [](const ptx::LaunchTime& time) { return time.end.barriers; }, "Of a block.")
        .def_property_readonly(
            "cycles_by_place",
            [](const ptx::LaunchTime& time) {
                std::map<u32, double> cycles;
                for (const ptx::Stretch* stretch = time.end.path.get(); stretch; stretch = stretch->before.get()) {
                    for (const auto& [place, spent] : stretch->shares.all()) cycles[place] += spent;
                }
                return cycles;
            },
            "The cycles of the path, by InstructionCount.place_number.");
    py::class_<ptx::KernelCount>(m, "KernelCount", "Counts of what a kernel has executed, over all its launches.")
        .def_readonly("launches", &ptx::KernelCount::launches, "On one rank each.")
        .def_readonly("blocks", &ptx::KernelCount::blocks)
        .def_readonly("warps", &ptx::KernelCount::warps)
        .def_readonly("row_bytes", &ptx::KernelCount::row_bytes,
                      "Bytes of loads of at least 16 bytes from global memory.")
        .def_readonly("row_trips", &ptx::KernelCount::row_trips, "How often warps have waited for such loads.")
        .def_readonly("max_block_barriers", &ptx::KernelCount::max_block_barriers, "The most of any thread.")
        .def_readonly("times", &ptx::KernelCount::times, "Of its launches, in the order in which they began.");
    py::class_<InstructionReport>(m, "InstructionCount",
                                  "Counts of an instruction: its executions and its memory traffic.")
        .def_property_readonly(
            "line", [](const InstructionReport& one) { return one.text.line; }, "The line of the PTX.")
        .def_property_readonly("opcode", [](const InstructionReport& one) { return one.text.opcode; })
        .def_property_readonly(
            "place", [](const InstructionReport& one) { return one.text.place; },
            "The place in the sources, and where it was inlined.")
        .def_property_readonly("place_number", [](const InstructionReport& one) { return one.text.place_number; })
        .def_property_readonly("file", [](const InstructionReport& one) { return one.text.file; })
        .def_property_readonly("file_line", [](const InstructionReport& one) { return one.text.file_line; })
        .def_property_readonly("threads", [](const InstructionReport& one) { return one.count.threads; })
        .def_property_readonly("warps", [](const InstructionReport& one) { return one.count.warps; })
        .def_property_readonly("bytes", [](const InstructionReport& one) { return one.count.bytes; })
        .def_property_readonly("sectors", [](const InstructionReport& one) { return one.count.sectors; })
        .def_property_readonly("peer_bytes", [](const InstructionReport& one) { return one.count.peer_bytes; })
        .def_property_readonly("peer_sectors", [](const InstructionReport& one) { return one.count.peer_sectors; })
        .def_property_readonly("wavefronts", [](const InstructionReport& one) { return one.count.wavefronts; })
        .def_property_readonly("min_wavefronts", [](const InstructionReport& one) { return one.count.min_wavefronts; })
        .def_property_readonly("trips", [](const InstructionReport& one) { return one.count.trips; })
        .def_property_readonly("trip_bytes", [](const InstructionReport& one) { return one.count.trip_bytes; });
    m.def("counted", counted, "Return the counts of each kernel, by symbol: in total and per instruction.");
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
        "Run a kernel of a module on its own. `args`: the bytes of its parameters.");
    py::class_<PtxKernels, KernelSource, std::shared_ptr<PtxKernels>>(
        m, "Kernels", "Kernels that a Runtime launches instead of those compiled into the extension.")
        .def(py::init([](uint32_t copy_piece, unsigned warps) {
                 if (warps == 0) throw std::invalid_argument("warps=0: expected a positive number");
                 return std::make_shared<PtxKernels>(copy_piece, warps);
             }),
             py::arg("copy_piece"), py::arg("warps"))
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
