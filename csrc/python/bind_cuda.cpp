// Bindings of the CUDA driver as used without torch: the GPU, its memory, and launches.
#include <pybind11/stl.h>

#include "device/copy_stage.h"
#include "device/cuda/block_size.h"
#include "host/cuda/gathering.h"
#include "host/cuda/launcher.h"
#include "host/cuda/memory.h"
#include "host/cuda/pool.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::CudaLauncher;
using host::CudaMemory;
using host::GatheredLauncher;
using host::Gathering;
using host::GatheringError;
using host::StreamLauncher;
using host::cuda::CudaError;
using host::cuda::Driver;
using host::cuda::PrimaryContext;
using NoGil = py::call_guard<py::gil_scoped_release>;

void raise(const char* name, const std::exception& error) {
    const py::object type = py::module_::import("deep_ep_py.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
}

void translate_driver_error(std::exception_ptr error) {
    try {
        std::rethrow_exception(error);
    } catch (const CudaError& cuda) {
        raise("CudaError", cuda);
    } catch (const GatheringError& gathering) {
        raise("DeepEPError", gathering);
    }
}

int driver_version() {
    int version = 0;
    const Driver& driver = Driver::get();
    driver.check(driver.driver_version(&version), "asking for the driver's version");
    return version;
}

using Numbers = std::tuple<uint32_t, uint32_t, uint32_t>;  // ranks, row bytes, top-k

RuntimeShape shape_of(const Numbers& numbers) {
    return {std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)};
}

uint64_t launch(StreamLauncher& launcher, const char* name, const Numbers& shape, unsigned blocks, unsigned warps,
                size_t shared_bytes, const std::string& args) {
    py::gil_scoped_release no_gil;
    return launcher.launch(name, shape_of(shape), blocks, warps, shared_bytes, args.data(), args.size());
}

void check_positive(const char* name, unsigned value) {
    if (value == 0) throw std::invalid_argument(std::string(name) + "=0: expected at least 1");
}

// Words for experiments with a GPU, whose kernels access them at system scope.
struct PinnedWords {
    std::shared_ptr<uint64_t> memory;
    size_t count;

    uint64_t& at(size_t index) const {
        if (index < count) return memory.get()[index];
        throw std::out_of_range("word " + std::to_string(index) + ": there are " + std::to_string(count));
    }
    // The outcome of a handshake kernel. Acquires what the kernel had added before.
    uint64_t load(size_t index) const { return __atomic_load_n(&at(index), __ATOMIC_ACQUIRE); }
    // Ends the wait of a handshake kernel, which reads nothing else.
    void store(size_t index, uint64_t value) const { __atomic_store_n(&at(index), value, __ATOMIC_RELEASE); }
    // Returns the value before. A kernel that exchanges or adds concurrently reads nothing else.
    uint64_t exchange(size_t index, uint64_t value) const {
        return __atomic_exchange_n(&at(index), value, __ATOMIC_RELAXED);
    }
    // A handshake kernel adds to the word concurrently. The adds order nothing.
    void add(size_t index, size_t times) const {
        for (size_t i = 0; i < times; ++i) __atomic_fetch_add(&at(index), 1, __ATOMIC_RELAXED);
    }
};

// PrimaryContext::Current as a context manager.
struct ContextScope {
    std::shared_ptr<const PrimaryContext> context;
    std::unique_ptr<PrimaryContext::Current> current;
};

// host::PoolOver as a context manager.
struct PoolScope {
    std::shared_ptr<host::Arena> arena;
    bool grows;
    std::unique_ptr<host::PoolOver> over;
};

RuntimePointer make_runtime_on_gpu(const host::BufferOptions& options, std::vector<std::shared_ptr<host::Heap>> heaps,
                                   const std::vector<std::optional<std::shared_ptr<host::Heap>>>& near,
                                   const NetworkOptions& network_options,
                                   const std::shared_ptr<const PrimaryContext>& context,
                                   std::shared_ptr<StreamLauncher> launcher) {
    const auto own = heaps.at(static_cast<size_t>(options.rank));
    auto memory = std::make_unique<CudaMemory>(context);
    auto networks = networks_over(options, network_options, heaps, Kernels::kOnGpu);
    // With its own CudaMemory, that is, a stream and a staging word that nothing else waits for.
    const auto make_teller = [context](const uint64_t* claimed, host::Teller::Others others) {
        return std::make_unique<host::TellerThread>(claimed, std::move(others), std::make_unique<CudaMemory>(context));
    };
    const host::NearParts near_parts = near_parts_of(heaps, near);
    auto control = control_over(options, pages_of(heaps), near_parts, make_teller, network_options.mesh,
                                [context] { return std::make_unique<CudaMemory>(context); });
    const auto make_warden = [context, control](host::WardenPost post) {
        return std::make_unique<host::WardenThread>(std::move(post), std::make_unique<CudaMemory>(context), control);
    };
    return RuntimePointer(new host::Runtime(options, own, heaps, near_parts, std::move(memory), std::move(launcher),
                                            control, make_warden, std::move(networks)));
}

}  // namespace

void bind_cuda(py::module_& module) {
    py::register_local_exception_translator(translate_driver_error);
    py::module_ m = module.def_submodule("cuda", "GPUs through the CUDA driver, which is opened on first use.");
    m.attr("BLOCK_WARPS") = device::kBlockWarps;
    m.def("copies_bytes", &device::CopyStage::bytes, py::arg("copy_piece"));
    m.def("driver_version", driver_version, "Return the CUDA version that the driver supports, for example 13000.");
    py::class_<ContextScope>(m, "ContextScope")
        .def("__enter__",
             [](ContextScope& scope) { scope.current = std::make_unique<PrimaryContext::Current>(*scope.context); })
        .def("__exit__", [](ContextScope& scope, const py::args&) { scope.current.reset(); });
    py::class_<PrimaryContext::Peer>(m, "Peer",
                                     "How the kernels of each of two GPUs may access the memory of the other.")
        .def_readonly("access", &PrimaryContext::Peer::access, "By loads and stores.")
        .def_readonly("native_atomics", &PrimaryContext::Peer::native_atomics,
                      "Also by atomics that are atomic with those of the other GPU.");
    py::class_<PrimaryContext, std::shared_ptr<PrimaryContext>>(m, "Context")
        .def(py::init<int>(), py::arg("ordinal"))
        .def_property_readonly("ordinal", &PrimaryContext::ordinal)
        .def_property_readonly("name", &PrimaryContext::name)
        .def_property_readonly("architecture", &PrimaryContext::architecture)
        .def_property_readonly("may_have_mps", &PrimaryContext::may_have_mps)
        .def_property_readonly("multiprocessors", &PrimaryContext::multiprocessors)
        .def_property_readonly(
            "orders_nic_writes",
            [](const PrimaryContext& context) {
                return context.attribute(host::cuda::kNicWritesOrdering) != host::cuda::kNoNicWritesOrdering;
            },
            "Whether its running kernels see the writes of a NIC in order.")
        .def_property_readonly("uuid", &PrimaryContext::uuid, "32 hexadecimal digits that no other GPU has.")
        .def("owns", &PrimaryContext::owns, py::arg("address"),
             "Return whether memory at an address belongs to this GPU.")
        .def("peer", &PrimaryContext::peer, py::arg("uuid"),
             "Return how this GPU and another may access each other's memory; None if this process does not see the "
             "other.")
        .def(
            "current",
            [](std::shared_ptr<PrimaryContext> context) { return ContextScope{std::move(context), nullptr}; },
            "Return a context manager in whose body the context is current on this thread.");
    m.def(
        "make_heap", &host::make_cuda_heap, py::arg("context"), py::arg("bytes"), py::arg("first"), py::arg("cleared"),
        py::arg("exported"), NoGil(),
        "Make this rank's heap on a GPU. Its first `first` bytes are backed by memory at once, the first `cleared` of "
        "them zeroed; if `exported` it has a descriptor, for map_heap.");
    m.def("map_heap", &host::map_cuda_heap, py::arg("context"), py::arg("descriptor"), py::arg("bytes"),
          py::arg("first"), NoGil());
    m.def("pin_heap", &host::pin_heap, py::arg("context"), py::arg("heap"), NoGil(),
          "Let the GPU access a heap in host memory, own or mapped, at its address, for the lifetime of the heap.");
    py::class_<PoolScope>(m, "PoolScope")
        .def("__enter__",
             [](PoolScope& scope) { scope.over = std::make_unique<host::PoolOver>(scope.arena, scope.grows); })
        .def("__exit__", [](PoolScope& scope, const py::args&) { scope.over.reset(); });
    m.def(
        "pool_over",
        [](const host::Runtime& runtime, bool grows) { return PoolScope{runtime.arena(), grows, nullptr}; },
        py::arg("runtime"), py::arg("grows"),
        "Return a context manager in whose body deep_ep_pool_allocate, on this thread, takes memory from the runtime's "
        "arena. `grows`: the arena may grow.");
    py::class_<PinnedWords>(m, "PinnedWords", "Words in host memory that kernels and the host access concurrently.")
        .def("address", [](PinnedWords& words, size_t index) { return reinterpret_cast<uintptr_t>(&words.at(index)); })
        .def("load", &PinnedWords::load, py::arg("index"))
        .def("store", &PinnedWords::store, py::arg("index"), py::arg("value"))
        .def("exchange", &PinnedWords::exchange, py::arg("index"), py::arg("value"), "Return the value before.")
        .def("add", &PinnedWords::add, py::arg("index"), py::arg("times"), NoGil(), "Add 1 `times` times.");
    py::class_<CudaMemory>(m, "Memory")
        .def(py::init<std::shared_ptr<const PrimaryContext>>(), py::arg("context"))
        .def("load_word", [](CudaMemory& memory,
                             uint64_t word) { return memory.load_word(reinterpret_cast<const uint64_t*>(word)); })
        .def(
            "pinned_words",
            [](CudaMemory& memory, size_t count) {
                return PinnedWords{std::static_pointer_cast<uint64_t>(memory.make_shared(count * sizeof(uint64_t))),
                                   count};
            },
            py::arg("count"), "Allocate zeroed words.")
        .def("store_words", [](CudaMemory& memory, const std::vector<uint64_t>& words, uint64_t value) {
            std::vector<uint64_t*> pointers;
            for (const uint64_t word : words) pointers.push_back(reinterpret_cast<uint64_t*>(word));
            memory.store_words(pointers, value);
        });
    py::class_<StreamLauncher, std::shared_ptr<StreamLauncher>>(m, "StreamLauncher")
        .def(
            "load",
            [](StreamLauncher& launcher, const std::string& name, const Numbers& shape, const py::bytes& cubin,
               const std::string& symbol) {
                const auto code = static_cast<std::string_view>(cubin);
                const py::gil_scoped_release release;
                launcher.load(name, shape_of(shape), code, symbol);
            },
            py::arg("name"), py::arg("shape"), py::arg("cubin"), py::arg("symbol"))
        .def(
            "loaded",
            [](const StreamLauncher& launcher, const std::string& name, const Numbers& shape) {
                return launcher.loaded(name, shape_of(shape));
            },
            py::arg("name"), py::arg("shape"), NoGil())
        .def("launch", launch, py::arg("name"), py::arg("shape"), py::arg("blocks"), py::arg("warps"),
             py::arg("shared_bytes"), py::arg("args"))
        .def_property_readonly(
            "stream", [](const StreamLauncher& launcher) { return reinterpret_cast<uint64_t>(launcher.stream()); },
            "The launcher's own stream, as an integer.")
        .def_property_readonly("max_shared_bytes", &StreamLauncher::max_shared_bytes,
                               "The most dynamic shared memory that a block of any kernel may have.")
        .def("keep_stream", &StreamLauncher::keep_stream, NoGil(),
             "From now on the stream outlives the launcher, since tensors that were used on it may.")
        .def("finished", &StreamLauncher::finished, py::arg("serial"), NoGil())
        .def(
            "wait",
            [](StreamLauncher& launcher, uint64_t serial) {
                launcher.wait([&] { return launcher.finished(serial); }, "kernel");
            },
            py::arg("serial"), NoGil(), "Wait until nothing runs on the launcher's own stream.");
    py::class_<CudaLauncher, StreamLauncher, std::shared_ptr<CudaLauncher>>(m, "Launcher")
        .def(py::init([](std::shared_ptr<PrimaryContext> context, unsigned sharers, unsigned warps, uint32_t copy_piece,
                         bool cooperative) {
                 check_positive("sharers", sharers);
                 return std::make_shared<CudaLauncher>(std::move(context), sharers, warps,
                                                       device::CopyStage::bytes(copy_piece), cooperative,
                                                       check_signals);
             }),
             py::arg("context"), py::arg("sharers") = 1, py::arg("warps") = device::kBlockWarps,
             py::arg("copy_piece") = 0, py::arg("cooperative") = true)
        .def("share", &CudaLauncher::share, py::arg("sharers"),
             "Change the number of sharers, before a kernel is loaded.")
        .def(
            "max_blocks",
            [](CudaLauncher& launcher, const std::string& name, const Numbers& shape, unsigned warps, size_t bytes) {
                return launcher.max_blocks(name, shape_of(shape), warps, bytes);
            },
            py::arg("name"), py::arg("shape"), py::arg("warps"), py::arg("shared_bytes"))
        .def(
            "launch_on",
            [](CudaLauncher& launcher, std::optional<uint64_t> stream, bool ends) {
                std::optional<host::cuda::Stream> handle;
                if (stream) handle = reinterpret_cast<host::cuda::Stream>(*stream);
                launcher.launch_on(handle, ends);
            },
            py::arg("stream"), py::arg("ends") = false,
            "Select the stream of the launches that follow; None: the launcher's own. Kernels run in the order of "
            "their "
            "launches, also on different streams. `ends`: the stream may be destroyed before the next launch.")
        .def("time_launches", &CudaLauncher::time_launches, py::arg("timed"), NoGil(),
             "From now on, record an event right before and right after every launch, or no longer.")
        .def(
            "take_launch_times",
            [](CudaLauncher& launcher) {
                std::vector<std::tuple<std::string, double, double>> times;
                for (auto& one : launcher.take_launch_times()) {
                    times.emplace_back(std::move(one.kernel), one.begin_ms, one.end_ms);
                }
                return times;
            },
            NoGil(),
            "Wait for the timed launches since the last call, and return of each the kernel, and when it began and "
            "ended, in milliseconds since the first one began.");
    py::class_<Gathering, std::shared_ptr<Gathering>>(m, "Gathering",
                                                      "Combines the launches of several ranks into one.")
        .def(py::init([](const std::shared_ptr<PrimaryContext>& context, unsigned ranks, unsigned warps,
                         uint32_t copy_piece, bool cooperative) {
                 check_positive("ranks", ranks);
                 return std::make_shared<Gathering>(context, ranks, warps, device::CopyStage::bytes(copy_piece),
                                                    cooperative);
             }),
             py::arg("context"), py::arg("ranks"), py::arg("warps") = device::kBlockWarps, py::arg("copy_piece") = 0,
             py::arg("cooperative") = true)
        .def("leave", &Gathering::leave, py::arg("rank"), NoGil(),
             "Make no rank wait any longer for this one, which will not arrive.");
    py::class_<GatheredLauncher, StreamLauncher, std::shared_ptr<GatheredLauncher>>(m, "GatheredLauncher")
        .def(py::init([](std::shared_ptr<Gathering> gathering, unsigned rank, double timeout) {
                 return std::make_shared<GatheredLauncher>(std::move(gathering), rank, nanoseconds(timeout));
             }),
             py::arg("gathering"), py::arg("rank"), py::arg("timeout"));
    m.def("make_runtime", make_runtime_on_gpu, py::arg("options"), py::arg("heaps"), py::arg("near"),
          py::arg("network"), py::arg("context"), py::arg("launcher"),
          "Make a Runtime whose kernels the launcher runs; it looks them up there when it needs them. If some rank is "
          "not mapped, all heaps must be in host memory and pinned, since NICs are host threads; their near parts are "
          "then in memory of the GPUs, None where it is not mapped here.");
}

}  // namespace deep_ep::python
