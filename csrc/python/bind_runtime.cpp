// Bindings of heaps, calls and the runtime of a Buffer.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "host/heap/dlpack.h"
#include "host/launch/runner.h"
#include "host/network/proxy/libfabric.h"
#include "host/nvshmem/adoption.h"
#include "host/session/runtime.h"
#include "kernels/common/stages.h"
#include "python/bindings.h"
#include "sim/executor/executor.h"
#include "sim/host/launcher.h"
#include "sim/host/memory.h"
#include "sim/host/teller_agent.h"
#include "sim/host/teller_helper.h"
#include "sim/host/warden_agent.h"
#include "sim/vector/vector.h"
#include "wire/messages.h"

namespace py = pybind11;

namespace deep_ep::python {
namespace {

using host::BufferOptions;
using host::Call;
using host::Heap;
using host::Meeting;
using host::Runtime;
using NoGil = py::call_guard<py::gil_scoped_release>;

// If ranks are separate processes, maps the control pages of each rank again, at addresses used for nothing else.
std::vector<std::shared_ptr<uint8_t>> control_pages(const BufferOptions& options,
                                                    const std::vector<std::shared_ptr<Heap>>& heaps,
                                                    const NetworkOptions& network) {
    std::vector<std::shared_ptr<uint8_t>> pages = pages_of(heaps);
    if (network.in_process) return pages;
    for (size_t rank = 0; rank < heaps.size(); ++rank) {
        const bool copied = network.mesh && network.mesh->connects(static_cast<int>(rank));
        if (!copied) pages[rank] = heaps[rank]->map_again(Runtime::heap_layout(options).control_bytes());
    }
    return pages;
}

RuntimePointer make_runtime_on_cpu(const BufferOptions& options, std::vector<std::shared_ptr<Heap>> heaps,
                                   const std::vector<std::optional<std::shared_ptr<Heap>>>& near,
                                   const NetworkOptions& network_options,
                                   const std::shared_ptr<host::KernelSource>& kernels) {
    const auto own = heaps.at(static_cast<size_t>(options.rank));
    auto memory = std::make_unique<host::CpuMemory>();
    const size_t words = Runtime::heap_layout(options).regions_offset();  // the header and the signal words
    auto launcher = kernels ? std::make_unique<host::CpuLauncher>(options.rank, own->base(), words, kernels)
                            : std::make_unique<host::CpuLauncher>(options.rank, own->base(), words);
    auto networks = networks_over(options, network_options, heaps, Kernels::kOnCpu);
    const auto make_teller = [rank = options.rank, in_process = network_options.in_process](
                                 const uint64_t* claimed,
                                 host::Teller::Others others) -> std::unique_ptr<host::Teller> {
        auto words_memory = std::make_unique<host::CpuMemory>();
        if (!in_process) {
            return std::make_unique<host::TellerHelper>(claimed, std::move(others), std::move(words_memory));
        }
        return std::make_unique<host::TellerAgent>(rank, claimed, std::move(others), std::move(words_memory));
    };
    const host::NearParts near_parts = near_parts_of(heaps, near);
    if (!near.empty()) {
        host::declare_near_part(**near.at(static_cast<size_t>(options.rank)));
        host::declare_host_memory(*own);
    }
    auto control = control_over(options, control_pages(options, heaps, network_options), near_parts, make_teller,
                                network_options.mesh, [] { return std::make_unique<host::CpuMemory>(); });
    const auto make_warden =
        [control, in_process = network_options.in_process](host::WardenPost post) -> std::unique_ptr<host::Warden> {
        auto words_memory = std::make_unique<host::CpuMemory>();
        if (!in_process) {
            return std::make_unique<host::WardenThread>(std::move(post), std::move(words_memory), control);
        }
        return std::make_unique<host::WardenAgent>(std::move(post), std::move(words_memory), control);
    };
    return RuntimePointer(new Runtime(options, own, std::move(heaps), near_parts, std::move(memory),
                                      std::move(launcher), control, make_warden, std::move(networks)));
}

std::vector<u32> ranks_of(const wire::RankMask& mask) {
    std::vector<u32> ranks;
    for (u32 rank = 0; rank < wire::kMaxRanks; ++rank) {
        if (mask.has(rank)) ranks.push_back(rank);
    }
    return ranks;
}

wire::RankMask mask_of(const std::vector<u32>& ranks) {
    wire::RankMask mask{};
    for (const u32 rank : ranks) {
        if (rank >= wire::kMaxRanks)
            throw std::invalid_argument("a rank of a mask: expected less than " + std::to_string(wire::kMaxRanks));
        mask.add(rank);
    }
    return mask;
}

Heap& own_heap(const Runtime& runtime) { return *runtime.heaps()[static_cast<size_t>(runtime.options().rank)]; }

void delete_capsule(PyObject* capsule) {
    // A consumer of the capsule renames it and deletes the tensor itself.
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    auto* tensor = static_cast<host::DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    tensor->deleter(tensor);
}

// Allocates a tensor on the CPU; None if there is no room.
py::object allocate(const Runtime& runtime, const std::vector<int64_t>& shape, uint8_t code, uint8_t bits) {
    constexpr host::DLDevice kCpu{1, 0};
    host::DLManagedTensor* tensor = host::make_tensor(runtime.arena(), shape, {code, bits, 1}, kCpu);
    if (tensor == nullptr) return py::none();
    return py::reinterpret_steal<py::object>(PyCapsule_New(tensor, "dltensor", delete_capsule));
}

void bind_heap(py::module_& m) {
    py::class_<Heap, std::shared_ptr<Heap>>(m, "Heap")
        .def_static("make_plain", &Heap::make_plain, py::arg("bytes"), py::arg("gives_back") = false)
        .def_static("make_shared", &Heap::make_shared, py::arg("bytes"), py::arg("gives_back") = false)
        .def_static("map", &Heap::map, py::arg("descriptor"), py::arg("bytes"))
        .def("close_descriptor", &Heap::close_descriptor)
        .def_property_readonly("descriptor", &Heap::descriptor)
        .def_property_readonly("bytes", &Heap::bytes)
        .def_property_readonly("mapped", &Heap::mapped)
        .def_property_readonly("base", [](const Heap& heap) { return reinterpret_cast<uint64_t>(heap.base()); });
}

void bind_network(py::module_& m) {
    using nic::Counters, nic::Message, nic::Options;
    py::class_<Options>(m, "NicOptions")
        .def(py::init<>())
        .def_readwrite("blocks", &Options::blocks)
        .def_readwrite("queues_per_peer", &Options::queues_per_peer)
        .def_readwrite("nics", &Options::nics)
        .def_readwrite("chunk_log2", &Options::chunk_log2)
        .def_readwrite("key_offset", &Options::key_offset)
        .def_readwrite("max_bytes", &Options::max_bytes)
        .def_readwrite("mtu", &Options::mtu)
        .def_readwrite("in_flight", &Options::in_flight)
        .def_readwrite("max_delay", &Options::max_delay)
        .def_readwrite("relaxed", &Options::relaxed)
        .def_readwrite("atomics_pass", &Options::atomics_pass)
        .def_readwrite("traced", &Options::traced)
        .def_readwrite("fault_rank", &Options::fault_rank)
        .def_readwrite("fault_peer", &Options::fault_peer)
        .def_readwrite("fault_after", &Options::fault_after)
        .def_readwrite("fault_syndrome", &Options::fault_syndrome)
        .def_readwrite("fault_flushes", &Options::fault_flushes);
    py::class_<NetworkOptions>(m, "NetworkOptions")
        .def(py::init([](const Options& nic, bool in_process, std::string provider, std::string address,
                         std::vector<int> cpus, const std::optional<std::shared_ptr<host::Mesh>>& mesh,
                         const std::optional<host::nvshmem::Wanted>& nvshmem) {
                 host::MakeQueuePairs make;
                 if (nvshmem) make = host::nvshmem::adopting(*nvshmem);
                 return NetworkOptions{nic,
                                       in_process,
                                       std::move(provider),
                                       std::move(address),
                                       std::move(cpus),
                                       mesh.value_or(nullptr),
                                       std::move(make)};
             }),
             py::kw_only(), py::arg("nic"), py::arg("in_process"), py::arg("provider"), py::arg("address"),
             py::arg("cpus"), py::arg("mesh"), py::arg("nvshmem"));
    py::class_<Counters>(m, "NicCounters")
        .def_readonly("writes", &Counters::writes)
        .def_readonly("atomics", &Counters::atomics)
        .def_readonly("bytes", &Counters::bytes)
        .def_readonly("doorbells", &Counters::doorbells);
    py::class_<Message>(m, "NicMessage")
        .def_readonly("time_ns", &Message::time_ns)
        .def_readonly("source", &Message::source)
        .def_readonly("destination", &Message::destination)
        .def_readonly("queue", &Message::queue)
        .def_readonly("opcode", &Message::opcode)
        .def_readonly("bytes", &Message::bytes);
    m.def("syndrome_name", &wire::mlx5::syndrome_name, py::arg("syndrome"));
}

void bind_call(py::module_& m) {
    py::class_<wire::Failure>(m, "Failure")
        .def_property_readonly("reason", [](const wire::Failure& f) { return wire::mark_reason(f.mark); })
        .def_property_readonly(
            "phase", [](const wire::Failure& f) { return wire::phase_name(static_cast<wire::Phase>(f.phase)); })
        .def_readonly("peer", &wire::Failure::peer)
        .def_readonly("cause_rank", &wire::Failure::cause_rank)
        .def_readonly("cause_reason", &wire::Failure::cause)
        .def_property_readonly("cause", [](const wire::Failure& f) { return wire::reason_name(f.cause); })
        .def_readonly("cause_peer", &wire::Failure::cause_peer)
        .def_readonly("expected", &wire::Failure::expected)
        .def_readonly("seen", &wire::Failure::seen);
    py::class_<Call, std::shared_ptr<Call>>(m, "Call")
        .def_property_readonly("waited",
                               [](const Call& call) {
                                   const auto phase = static_cast<wire::Phase>(call.failure().phase);
                                   return static_cast<double>(wire::patience_ns(phase, call.timeout_ns)) * 1e-9;
                               })
        .def_property_readonly("captured", [](const Call& call) { return call.serial == 0; })
        .def_property_readonly("graph_gone",
                               [](const Call& call) { return call.graph_gone != nullptr && call.graph_gone->load(); })
        .def_property_readonly("kind", [](const Call& call) { return wire::kind_name(call.kind); })
        .def_property_readonly("operation", [](const Call& call) { return call.outcome->operation; })
        .def_property_readonly(
            "mismatch",
            [](const Call& call) { return py::make_tuple(call.mismatch.peer, wire::kind_name(call.mismatch.kind)); })
        .def_property_readonly("arguments",
                               [](const Call& call) {
                                   py::dict arguments;
                                   for (const auto& [name, value] : call.arguments) arguments[name] = value;
                                   return arguments;
                               })
        .def_property_readonly("generation", [](const Call& call) { return call.generation; })
        .def_property_readonly("failure", &Call::failure);
}

constexpr uint64_t kLook = 50'000'000;  // ns between checks of the caller's signals

// The Runner of a Buffer. Its jobs are methods of the Runtime, selected by name.
struct BufferRunner {
    Runtime& runtime;  // outlives this
    host::Runner runner{};

    // Each method takes its argument from `call`, `serial` or `seconds`.
    std::function<bool()> job(const std::string& name, const std::shared_ptr<Call>& call, uint64_t serial,
                              double seconds) {
        Runtime& buffer = runtime;  // not `this`: the thread may outlive it
        const uint64_t time = nanoseconds(seconds);
        if (name == "wait") return [&buffer, call] { return buffer.wait(*call), true; };
        if (name == "wait_counts") return [&buffer, call] { return buffer.wait_counts(*call), true; };
        if (name == "wait_launch") return [&buffer, serial] { return buffer.wait_launch(serial), true; };
        if (name == "settle") return [&buffer, time] { return buffer.settle(time); };
        if (name == "stop_all") return [&buffer, time] { return buffer.stop_all(time); };
        if (name == "forgive") return [&buffer, time] { return buffer.forgive(time); };
        throw std::invalid_argument(name + ": expected a method that waits");
    }

    std::shared_ptr<host::Runner::Run> start(const std::string& name, const std::shared_ptr<Call>& call,
                                             uint64_t serial, double seconds) {
        return runner.start(job(name, call, serial, seconds));
    }

    // Runs the job in the calling thread. Returns its result; nothing if it waits for too long.
    static std::optional<bool> try_here(const std::function<bool()>& job) {
        struct Stops {
            const bool before = std::exchange(stops_at_waits_long, true);
            ~Stops() { stops_at_waits_long = before; }
        } stops;
        cpu::Executor::interrupts_are_checked();  // by the interpreter, between lines
        try {
            return job();
        } catch (const WaitsLong&) {
            return std::nullopt;
        }
    }

    // No Python code runs between the start and the wait: an interrupt there would leave behind a job that no caller
    // waits for.
    bool run(const std::string& name, const std::shared_ptr<Call>& call, uint64_t serial, double seconds) {
        auto todo = job(name, call, serial, seconds);
        if (runner.rest(0)) {
            if (const std::optional<bool> result = try_here(todo)) return *result;
        }
        const auto handed_over = runner.start(std::move(todo));
        try {
            while (!handed_over->wait(kLook)) check_signals();
        } catch (...) {
            handed_over->cancel();
            throw;
        }
        return handed_over->result();
    }

    bool rest(double seconds) const {
        uint64_t left = nanoseconds(seconds);
        for (; left > kLook; left -= kLook) {
            if (runner.rest(kLook)) return true;
            check_signals();
        }
        return runner.rest(left);
    }
};

void bind_runner(py::module_& m) {
    using Run = host::Runner::Run;
    py::class_<Run, std::shared_ptr<Run>>(m, "Run", "A job of a Runner.")
        .def_property_readonly("done", &Run::done)
        .def_property_readonly("failed", &Run::failed)
        .def(
            "result",
            [](const Run& run) {
                while (!run.wait(kLook)) check_signals();
                return run.result();
            },
            NoGil(), "Wait for the job; return its result, or raise its exception.");
    py::class_<BufferRunner>(m, "Runner", "A thread that waits for a Buffer's kernels without needing the GIL.")
        .def(py::init([](Runtime& runtime) { return std::unique_ptr<BufferRunner>(new BufferRunner{runtime}); }),
             py::arg("runtime"), py::keep_alive<1, 2>())
        .def("start", &BufferRunner::start, py::arg("name"), py::arg("call") = nullptr, py::arg("serial") = 0,
             py::arg("seconds") = 0.0, "Start one of the runtime's waits, by the name of its method; return the Run.")
        .def("run", &BufferRunner::run, py::arg("name"), py::arg("call") = nullptr, py::arg("serial") = 0,
             py::arg("seconds") = 0.0, NoGil(),
             "Run one of the runtime's waits, in the calling thread unless it takes long or the Runner is busy; return "
             "its result.")
        .def("rest", &BufferRunner::rest, py::arg("seconds"), NoGil(), "Return whether it has nothing to do.");
}

}  // namespace

void bind_runtime(py::module_& m) {
    bind_mesh(m);
    bind_heap(m);
    bind_call(m);
    bind_network(m);
    py::class_<host::KernelSource, std::shared_ptr<host::KernelSource>>(m, "KernelSource",
                                                                        "Kernels that a Runtime launches.");
    m.attr("TIMEOUT") = static_cast<uint32_t>(wire::kTimeout);
    m.attr("ABORTED") = static_cast<uint32_t>(wire::kAborted);
    m.attr("MISMATCH") = static_cast<uint32_t>(wire::kMismatch);
    m.attr("OVERFLOW") = static_cast<uint32_t>(wire::kOverflow);
    m.attr("NETWORK") = static_cast<uint32_t>(wire::kNetwork);
    m.attr("DIED") = static_cast<uint32_t>(wire::kDied);
    m.attr("UNHEARD") = static_cast<uint32_t>(wire::kUnheard);
    m.attr("SILENT") = static_cast<uint32_t>(wire::kSilent);
    m.attr("MASKED") = static_cast<uint32_t>(wire::kMasked);
    m.attr("ELSEWHERE") = static_cast<uint32_t>(wire::kElsewhere);
    m.attr("OUTDATED") = static_cast<uint32_t>(wire::kOutdated);
    m.attr("OTHER_IDS") = static_cast<uint32_t>(wire::kOtherIds);
    m.attr("BOUNDS_PHASE") = wire::phase_name(wire::Phase::kBounds);
    m.attr("DATA_PHASE") = wire::phase_name(wire::Phase::kData);
    m.attr("MASK_PHASE") = wire::phase_name(wire::Phase::kMask);
    m.attr("MAX_RANKS") = wire::kMaxRanks;
    m.attr("MAX_REGIONS") = wire::kMaxRegions;
    m.attr("MAX_TOKENS") = wire::kMaxTokens;
    m.attr("LEFT") = static_cast<uint32_t>(wire::kLeft);
    m.attr("EXCEPTION") = static_cast<uint32_t>(wire::kException);

    py::class_<Meeting> meeting(m, "Meeting");
    py::enum_<Meeting::Result>(meeting, "Result")
        .value("MET", Meeting::kMet)
        .value("LATE", Meeting::kLate)
        .value("GONE", Meeting::kGone)
        .value("OTHER_MASK", Meeting::kOtherMask)
        .value("LATER_ATTEMPT", Meeting::kLaterAttempt);
    meeting.def_readonly("result", &Meeting::result)
        .def_readonly("peer", &Meeting::peer)
        .def_readonly("attempt", &Meeting::attempt)
        .def_property_readonly("left_out", [](const Meeting& met) { return ranks_of(met.mask); });

    py::class_<BufferOptions>(m, "BufferOptions")
        .def(py::init([](int rank, int ranks, int regions, uint64_t region_bytes, uint64_t arena_bytes, double timeout,
                         int calls, uint32_t call_words, bool notes_stages, bool masks_ranks, bool poison,
                         bool has_remote, const std::vector<std::string>& names, uint64_t rank_key, int ranks_per_node,
                         bool near_audience, uint64_t bytes_in_flight) {
                 std::vector<fabric::Route> routes;
                 for (const std::string& name : names) routes.push_back(host::route_named(name));
                 return BufferOptions{.rank = rank,
                                      .ranks = ranks,
                                      .regions = regions,
                                      .region_bytes = region_bytes,
                                      .arena_bytes = arena_bytes,
                                      .timeout_ns = nanoseconds(timeout),
                                      .calls = calls,
                                      .call_words = call_words,
                                      .notes_stages = notes_stages,
                                      .masks_ranks = masks_ranks,
                                      .poison = poison,
                                      .has_remote = has_remote,
                                      .routes = std::move(routes),
                                      .rank_key = rank_key,
                                      .ranks_per_node = ranks_per_node,
                                      .near_audience = near_audience,
                                      .bytes_in_flight = bytes_in_flight};
             }),
             py::kw_only(), py::arg("rank"), py::arg("ranks"), py::arg("regions"), py::arg("region_bytes"),
             py::arg("arena_bytes"), py::arg("timeout"), py::arg("calls"), py::arg("call_words"),
             py::arg("notes_stages"), py::arg("masks_ranks"), py::arg("poison"), py::arg("has_remote"),
             py::arg("routes"), py::arg("rank_key"), py::arg("ranks_per_node"), py::arg("near_audience"),
             py::arg("bytes_in_flight"))
        .def_readonly("notes_stages", &BufferOptions::notes_stages)
        .def_readonly("masks_ranks", &BufferOptions::masks_ranks)
        .def_property_readonly(
            "fabrics", [](const BufferOptions& options) { return host::fabrics_of(options.routes); },
            "Those that reach ranks which are not mapped.");
    m.def("route_named", &host::route_named, py::arg("name"), "Return the number of a fabric's route.");
    py::class_<host::proxy::LibfabricProvider>(m, "LibfabricProvider")
        .def_readonly("name", &host::proxy::LibfabricProvider::name)
        .def_readonly("version", &host::proxy::LibfabricProvider::version);
    py::class_<host::proxy::LibfabricHere>(m, "LibfabricHere")
        .def_readonly("version", &host::proxy::LibfabricHere::version, "Empty if it cannot be used.")
        .def_readonly("refusal", &host::proxy::LibfabricHere::refusal, "Why it cannot be used.")
        .def_readonly("providers", &host::proxy::LibfabricHere::providers, "Those that the proxy can use, best first.");
    m.def("libfabric_here", &host::proxy::libfabric_here, NoGil(), "Return which libfabric can be used here.");
    m.def("libfabric_refusal", &host::proxy::libfabric_refusal, NoGil(), py::arg("provider"), py::arg("address"),
          "Return why the proxy cannot use a provider, or any provider, to reach other machines from an address; empty "
          "if it can.");
    m.def(
        "proxy_providers",
        [] {
            std::vector<std::string> names;
            for (const auto& provider : host::proxy::libfabric_here().providers) names.push_back(provider.name);
            return names;
        },
        NoGil(), "Return the libfabric providers that the proxy can use here, best first.");
    m.def("heap_bytes", [](const BufferOptions& options) { return Runtime::heap_layout(options).bytes(); });
    m.def("control_bytes", [](const BufferOptions& options) { return Runtime::heap_layout(options).control_bytes(); });
    m.def("near_bytes", [](const BufferOptions& options) { return Runtime::heap_layout(options).near_bytes(); });

    m.attr("STAGES") = std::vector<std::string>(std::begin(kStageNames), std::end(kStageNames));
    py::class_<host::StageRecord::Launch>(m, "StagesOfLaunch", "When the warps of a launch ended their stages.")
        .def_readonly("kernel", &host::StageRecord::Launch::kernel)
        .def_readonly("blocks", &host::StageRecord::Launch::blocks)
        .def_readonly("warps", &host::StageRecord::Launch::warps, "Of each block.")
        .def_readonly("launched_ns", &host::StageRecord::Launch::launched_ns, "Right before, as time.monotonic_ns().")
        .def_readonly("ended_ns", &host::StageRecord::Launch::ended_ns,
                      "[blocks, warps, STAGES], by the clock of kernels; 0: none.");

    py::class_<Runtime, RuntimePointer>(m, "Runtime")
        .def(py::init(&make_runtime_on_cpu), py::arg("options"), py::arg("heaps"), py::arg("near"), py::arg("network"),
             py::arg("kernels") = nullptr)
        .def_property_readonly("network_refusal", [](const Runtime& runtime) { return runtime.networks().refusal(); })
        .def_property_readonly("network_fault", [](const Runtime& runtime) { return runtime.networks().fault(); })
        .def_property_readonly("network_counters", [](const Runtime& runtime) { return runtime.networks().counters(); })
        .def_property_readonly("network_trace", [](const Runtime& runtime) { return runtime.networks().trace(); })
        .def_property_readonly("launched_ns", &Runtime::launched_ns,
                               "Time of the latest hand-over of a launch to the launcher, as time.monotonic_ns(); 0: "
                               "none yet.")
        .def_property_readonly("notes_stages", [](const Runtime& runtime) { return runtime.options().notes_stages; })
        .def("record_stages", &Runtime::record_stages, py::arg("bytes"), NoGil(),
             "Record the stages of the kernels launched from now on.")
        .def(
            "take_stages", [](Runtime& runtime, double seconds) { return runtime.take_stages(nanoseconds(seconds)); },
            py::arg("seconds"), NoGil(),
            "End the record, and return what it has. Waits for kernels; returns nothing if some run for longer.")
        .def_property_readonly("stages_lost", &Runtime::stages_lost, "Launches of the record that were not kept.")
        .def("take_remark", &Runtime::take_remark)
        .def("wait_counts", &Runtime::wait_counts, py::arg("call"), NoGil())
        .def(
            "added_pieces",
            [](const Runtime& runtime) {
                std::vector<std::pair<size_t, size_t>> pieces;
                for (const Heap::Piece& piece : own_heap(runtime).added()) {
                    pieces.emplace_back(piece.offset, piece.bytes);
                }
                return pieces;
            },
            "Return offset and bytes of each piece by which this rank's heap has grown.")
        .def(
            "export_piece",
            [](const Runtime& runtime, size_t offset, size_t bytes) {
                return own_heap(runtime).export_piece({offset, bytes});
            },
            py::arg("offset"), py::arg("bytes"), "Return a descriptor for a peer's map_piece. The caller closes it.")
        .def(
            "map_piece",
            [](const Runtime& runtime, size_t rank, size_t offset, size_t bytes, int descriptor) {
                runtime.heaps().at(rank)->map_piece({offset, bytes}, descriptor);
            },
            py::arg("rank"), py::arg("offset"), py::arg("bytes"), py::arg("descriptor"), NoGil())
        .def(
            "mapped", [](const Runtime& runtime, size_t rank) { return runtime.heaps().at(rank)->mapped(); },
            py::arg("rank"), "Return how many bytes of a rank's heap are backed by memory in this process.")
        .def("announce", &Runtime::announce, py::arg("heap_bytes"))
        .def("behind", &Runtime::behind, py::arg("call"))
        .def("share", &Runtime::share, py::arg("call"))
        .def("wait", &Runtime::wait, py::arg("call"), NoGil())
        .def("wait_launch", &Runtime::wait_launch, py::arg("serial"), NoGil())
        .def("finished", &Runtime::finished)  // with the GIL: another thread may retire() the call
        .def("retire", &Runtime::retire)
        .def(
            "settle", [](Runtime& runtime, double seconds) { return runtime.settle(nanoseconds(seconds)); },
            py::arg("seconds"), NoGil())
        .def("drain", &Runtime::drain, NoGil())
        .def("leave", &Runtime::leave, NoGil())
        .def("watch", &Runtime::watch)
        .def("gone", &Runtime::gone)
        .def("mask", &Runtime::mask, py::arg("rank"), NoGil())
        .def_property_readonly("masked", [](const Runtime& runtime) { return ranks_of(runtime.masked()); })
        .def(
            "stop_all", [](Runtime& runtime, double seconds) { return runtime.stop_all(nanoseconds(seconds)); },
            py::arg("seconds"), NoGil())
        .def(
            "connect",
            [](Runtime& runtime, const std::vector<u32>& left_out, uint32_t generation) {
                runtime.connect(mask_of(left_out), generation);
            },
            py::arg("left_out"), py::arg("generation"), NoGil())
        .def(
            "look_up_peers",
            [](Runtime& runtime, double seconds) { return runtime.look_up_peers(nanoseconds(seconds)); },
            py::arg("seconds"), NoGil())
        .def(
            "wait_gone",
            [](Runtime& runtime, const std::vector<u32>& left_out, double seconds) {
                return runtime.wait_gone(mask_of(left_out), nanoseconds(seconds));
            },
            py::arg("left_out"), py::arg("seconds"), NoGil())
        .def(
            "meet",
            [](Runtime& runtime, const std::vector<u32>& left_out, uint64_t attempt, bool again, double seconds) {
                return runtime.meet(mask_of(left_out), attempt, again, nanoseconds(seconds));
            },
            py::arg("left_out"), py::arg("attempt"), py::arg("again"), py::arg("seconds"), NoGil())
        .def("clear_words", &Runtime::clear_words, NoGil())
        .def(
            "publish",
            [](Runtime& runtime, uint32_t generation, const std::vector<u32>& left_out) {
                runtime.publish(generation, mask_of(left_out));
            },
            NoGil())
        .def(
            "set_timeout", [](Runtime& runtime, double seconds) { runtime.set_timeout(nanoseconds(seconds)); },
            py::arg("seconds"))
        .def("abort", &Runtime::abort, py::arg("reason"), py::arg("peer") = -1, NoGil())
        .def("aborted", &Runtime::aborted)
        .def("abort_generation", &Runtime::abort_generation, NoGil())
        .def("pass_abort_on", &Runtime::pass_abort_on, NoGil())
        .def("note_told", &Runtime::note_told)
        .def("others_have_failed", &Runtime::others_have_failed)
        .def(
            "forgive", [](Runtime& runtime, double seconds) { return runtime.forgive(nanoseconds(seconds)); },
            py::arg("seconds"), NoGil())
        .def(
            "abort_word",
            [](const Runtime& runtime, int rank) {
                auto* const near = reinterpret_cast<wire::HeapHeader*>(runtime.near_parts().of(rank));
                return reinterpret_cast<uint64_t>(near ? &near->abort_of(runtime.generation()) : nullptr);
            },
            "Return the address of a rank's abort word in this generation; 0 if it is not reached from here.")
        .def("set_compiling", &Runtime::set_compiling)
        .def("compiling_peers", &Runtime::compiling_peers)
        .def("on_compiling_peer", &Runtime::on_compiling_peer)
        .def("allocate", &allocate, py::arg("shape"), py::arg("code"), py::arg("bits"),
             "Return a DLPack capsule of CPU memory, or None if there is no room.")
        .def("arena_contains",
             [](const Runtime& runtime, uint64_t address, uint64_t bytes) {
                 return runtime.arena()->contains(reinterpret_cast<const void*>(address), bytes);
             })
        .def_property_readonly("arena_bytes", [](const Runtime& runtime) { return runtime.arena()->bytes(); })
        .def_property_readonly("max_put_bytes", [](const Runtime& runtime) { return runtime.max_put_bytes(); })
        .def_property_readonly("arena_used", [](const Runtime& runtime) { return runtime.arena()->used(); })
        .def_property_readonly("arena_resident", [](const Runtime& runtime) { return runtime.arena()->resident(); })
        .def_property_readonly("arena_returned", [](const Runtime& runtime) { return runtime.arena()->returned(); })
        .def("heap_offset",
             [](const Runtime& runtime, uint64_t address) {
                 if (runtime.arena()->contains(reinterpret_cast<const void*>(address), 1)) {
                     return address - runtime.heap_base(runtime.options().rank);
                 }
                 throw py::value_error("address: expected one inside this rank's shared memory for outputs");
             })
        .def("peer_base", &Runtime::heap_base)
        .def_property_readonly("heap_bytes",
                               [](const Runtime& runtime) { return Runtime::heap_layout(runtime.options()).bytes(); })
        .def_property_readonly(
            "control_bytes",
            [](const Runtime& runtime) { return Runtime::heap_layout(runtime.options()).control_bytes(); })
        .def(
            "pretouch",
            [](const Runtime& runtime) {
                const std::vector<fabric::Route>& routes = runtime.options().routes;
                for (size_t rank = 0; rank < routes.size(); ++rank) {
                    const Heap& heap = *runtime.heaps()[rank];
                    if (routes[rank] == fabric::kMapped) cpu::pretouch(heap.base(), heap.mapped());
                }
            },
            NoGil(),
            "Make every page of the heaps that kernels access directly present in this process, without changing it.");
    bind_runner(m);
}

}  // namespace deep_ep::python
