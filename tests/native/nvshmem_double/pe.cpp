#include "pe.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "arguments.h"

namespace nvshmem_double {
namespace {

constexpr uint8_t kGarbage = 0xcd;

std::string folder_of(const Settings& settings, const std::string& id) {
    const std::string folder = settings.folder + "/" + id;
    std::filesystem::create_directories(folder);
    return folder;
}

}  // namespace

Pe::Pe(const std::string& id, int pe, int pes)
    : golden_(golden()),
      folder_(folder_of(settings_, id)),
      pe_(pe),
      pes_(pes),
      meeting_(folder_, pe, pes, settings_.seconds) {
    if (pes > kMaxPes) throw Failure(kNotSupported, std::to_string(pes) + " PEs");
    meeting_.meet("nvshmemx_hostlib_init_attr", static_cast<uint64_t>(pes));
}

void Pe::initialise(Gpu::Context context) {
    if (initialised()) return;
    if (context == nullptr) throw Failure(kInternal, "there is no current CUDA context, so no device to initialize");
    meeting_.meet("initialization of the device", settings_.heap_bytes, static_cast<uint64_t>(settings_.chunk_log2));
    gpu_ = std::make_unique<Gpu>(context);
    heap_ = std::make_unique<Heap>(settings_, folder_, pe_, pes_);
    gpu_->own(reinterpret_cast<uint64_t>(heap_->base()), heap_->bytes());
    std::memset(heap_->base(), 0, Heap::kReserved);
    nics_ = std::make_unique<Nics>(settings_, *gpu_, *heap_, pe_, pes_);
    make_states();
    grow();
    // Before this, no PE accesses another's heap.
    meeting_.meet("end of the device's initialization");
    ready_.store(true, std::memory_order_release);  // initialised() acquires it, and with it the tables and NICs
}

void Pe::finalise() {
    std::string wrong;
    try {
        meeting_.meet("nvshmemx_hostlib_finalize");
        if (!modules_.empty()) wrong = "a module is still registered: call nvshmemx_cumodule_finalize first";
        nics_.reset();
        // Until here, other PEs' NICs access this PE's heap.
        meeting_.meet("end of nvshmemx_hostlib_finalize");
        if (pe_ == 0) std::filesystem::remove_all(folder_);
    } catch (const Failure& failure) {
        wrong = failure.what();
    }
    nics_.reset();
    if (!wrong.empty()) throw Failure(kInternal, wrong);
}

void Pe::make_states() {
    Job job;
    job.pes = pes_;
    job.pe = pe_;
    job.nics = settings_.nics;
    job.rcs = settings_.ibgda ? settings_.rcs : 0;
    job.heap = reinterpret_cast<uint64_t>(heap_->base());
    job.chunk_log2 = settings_.chunk_log2;
    job.chunks = static_cast<int>(heap_->bytes() >> settings_.chunk_log2);
    job.blocks = settings_.nic.blocks;
    job.registered = 0;
    job.cpu_rings = settings_.cpu_doorbells;
    job.unnamed = kGarbage;
    job.parts = [this](uint64_t, int peer, int nic) { return nics_->make_queue(peer, nic); };
    job.key = [this](int chunk, int nic) { return deep_ep::wire::mlx5::big(nics_->key(chunk, nic)); };
    job.remote_key = [this](int chunk, int pe, int nic) {
        return deep_ep::wire::mlx5::big(nics_->remote_key(chunk, pe, nic));
    };
    job.remote_heap = Nics::remote_heap;
    states_ = std::make_unique<States>(
        golden_, job, [this](uint64_t bytes) { return gpu_->allocate(bytes); },
        [this](uint64_t address, const void* bytes, uint64_t count) { gpu_->write(address, bytes, count); });
    if (settings_.ibgda) return;
    states_->put_device("has_ibgda", 0);
    if (golden_.has("kProxy")) states_->put_device("transport", golden_.number("kProxy"));
}

void Pe::copy_states() {
    // Without IBGDA, NVSHMEM copies no state of it: the symbol keeps the module's contents.
    modules_.copy(golden_, *gpu_, states_->device, settings_.ibgda ? &states_->ibgda : nullptr);
}

// Registers the chunks that allocations have reached.
void Pe::grow() {
    const uint64_t chunk = uint64_t{1} << settings_.chunk_log2;
    const int needed = static_cast<int>((heap_->end() + chunk - 1) / chunk);
    if (needed <= chunks_) return;
    for (int i = chunks_; i < needed; ++i) nics_->register_chunk(i);
    states_->register_chunks(std::exchange(chunks_, needed), needed);
    copy_states();
}

void* Pe::allocate(const std::string& call, uint64_t alignment, uint64_t bytes, uint8_t filled_with) {
    meeting_.meet(call, alignment, bytes);
    if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > Heap::kMaxAlignment) {
        throw Failure(kInvalidValue, call + ": alignment " + std::to_string(alignment) + " is not a power of two");
    }
    uint64_t offset = 0;
    if (bytes == 0 || !heap_->allocate(std::max(alignment, Heap::kAlignment), bytes, offset)) {
        if (bytes != 0) complain(call + ": no room for " + std::to_string(bytes) + " bytes in NVSHMEM_SYMMETRIC_SIZE");
        return nullptr;
    }
    grow();
    std::memset(heap_->base() + offset, filled_with, bytes);
    // No PE writes to another before that one has filled its memory.
    meeting_.meet(call + ", end");
    return heap_->base() + offset;
}

void Pe::free(void* address) {
    const bool inside = heap_->contains(address);
    const uint64_t offset = inside ? static_cast<uint64_t>(static_cast<uint8_t*>(address) - heap_->base()) : 0;
    meeting_.meet("nvshmem_free", offset);
    if (!inside || !heap_->free(offset)) throw Failure(kInvalidValue, "nvshmem_free: nothing was allocated there");
}

void* Pe::near(const void* address, int pe) const {
    if (pe < 0 || pe >= pes_) throw Failure(kInvalidValue, "nvshmem_ptr: there is no PE " + std::to_string(pe));
    if (!heap_->contains(address) || far(pe)) return nullptr;
    return heap_->near(pe) + (static_cast<const uint8_t*>(address) - heap_->base());
}

void Pe::add_module(void* module) {
    modules_.add(golden_, *gpu_, module);
    copy_states();
}

int* Pe::create_queue_pairs(int count) {
    if (!settings_.ibgda) throw Failure(kNotSupported, "nvshmemx_qp_create: NVSHMEM_IB_ENABLE_IBGDA is not set");
    if (count <= 0) throw Failure(kInvalidValue, "nvshmemx_qp_create: " + std::to_string(count) + " queue pairs");
    meeting_.meet("nvshmemx_qp_create", static_cast<uint64_t>(count));
    {
        const std::unique_lock<std::shared_mutex> alone(table_);
        const uint64_t old = states_->queue_pairs();
        const Bytes garbage(states_->queue_pairs_bytes(), kGarbage);
        states_->create(count,
                        [this](uint64_t address, void* bytes, uint64_t size) { gpu_->read(address, bytes, size); });
        if (old != 0) {
            gpu_->write(old, garbage.data(), garbage.size());
            gpu_->free(old);
        }
    }
    copy_states();
    auto* const handles = static_cast<int*>(std::malloc(static_cast<size_t>(count) * sizeof(int)));
    for (int i = 0; i < count; ++i) handles[i] = states_->handle(states_->created() - count + i);
    meeting_.meet("end of nvshmemx_qp_create");
    return handles;
}

}  // namespace nvshmem_double
