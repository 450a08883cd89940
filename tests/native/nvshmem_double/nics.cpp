#include "nics.h"

#include <algorithm>

#include "host/network/looks.h"

namespace nvshmem_double {
namespace {

namespace mlx5 = deep_ep::wire::mlx5;
using deep_ep::nic::SendQueue;

constexpr int kMaxSteps = 64;  // of a queue pair per turn
constexpr uint32_t kLocalKeys = 0x10000000, kRemoteKeys = 0x20000000, kReturnedKeys = 0x30000000;

}  // namespace

Nics::Nics(const Settings& settings, Gpu& gpu, const Heap& heap, int pe, int pes)
    : settings_(settings),
      gpu_(gpu),
      heap_(heap),
      pe_(pe),
      pes_(pes),
      random_(2654435761u ^ static_cast<uint32_t>(pe)),
      memory_(static_cast<size_t>(settings.nics)),
      thread_([this] { run(); }) {}

Nics::~Nics() {
    // Relaxed: it only ends run(); the join orders everything else.
    stopping_.store(true, std::memory_order_relaxed);
    thread_.join();
}

uint32_t Nics::key(int chunk, int nic) const {
    return kLocalKeys + static_cast<uint32_t>(chunk * settings_.nics + nic);
}
uint32_t Nics::remote_key(int chunk, int pe, int nic) const {
    return kRemoteKeys + static_cast<uint32_t>((chunk * pes_ + pe) * settings_.nics + nic);
}

void Nics::register_chunk(int chunk) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t bytes = uint64_t{1} << settings_.chunk_log2, offset = static_cast<uint64_t>(chunk) * bytes;
    for (int nic = 0; nic < settings_.nics; ++nic) {
        deep_ep::nic::MemoryTable& memory = memory_[static_cast<size_t>(nic)];
        // A local key covers addresses as this PE's kernels use them.
        memory.add(key(chunk, nic),
                   {pe_, reinterpret_cast<uint64_t>(heap_.base()) + offset, bytes, heap_.for_nics(pe_) + offset});
        for (int pe = 0; pe < pes_; ++pe) {
            memory.add(remote_key(chunk, pe, nic), {pe, remote_heap(pe) + offset, bytes, heap_.for_nics(pe) + offset});
        }
    }
}

Parts Nics::make_queue(int peer, int nic) {
    const uint64_t ring_bytes = uint64_t{settings_.nic.blocks} * mlx5::kBlockBytes;
    // After the ring, a line each for the record, the completion and the slot for values that atomics return.
    constexpr uint64_t kLine = 256;
    const uint64_t ring = gpu_.allocate(ring_bytes + 3 * kLine), record = ring + ring_bytes, cqe = record + kLine,
                   returned = cqe + kLine;
    Bytes first(ring_bytes + 3 * kLine, deep_ep::nic::kPoison);
    std::fill_n(first.begin() + static_cast<std::ptrdiff_t>(ring_bytes), sizeof(mlx5::DoorbellRecord), uint8_t{0});
    std::fill_n(first.begin() + static_cast<std::ptrdiff_t>(ring_bytes + kLine), sizeof(mlx5::Cqe), uint8_t{0xff});
    gpu_.write(ring, first.data(), first.size());
    gpu_.share(ring, first.size() - kLine);
    auto* const word = static_cast<deep_ep::u64*>(gpu_.allocate_on_host(sizeof(deep_ep::u64)));
    *word = 0;

    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t n = made_++;
    // A number must not reveal the queue pair's position in the table, and numbers of other PEs differ.
    const uint32_t number = 0x100 + 7 * n + 0x10000 * static_cast<uint32_t>(pe_), key = kReturnedKeys + n;
    memory_[static_cast<size_t>(nic)].add(key, {pe_, returned, kLine, reinterpret_cast<uint8_t*>(returned)});
    Assisted* assisted = nullptr;
    auto* const blocks = reinterpret_cast<mlx5::Block*>(ring);
    auto* const completion = reinterpret_cast<mlx5::Cqe*>(cqe);
    deep_ep::nic::SharedQueue shared{blocks, reinterpret_cast<mlx5::DoorbellRecord*>(record), word, completion};
    if (settings_.cpu_doorbells) {
        assisted = &assisted_.emplace_back(Assisted{word, {}, 0, 0, number});
        shared.record = &assisted->record;
        shared.doorbell = &assisted->doorbell;
    }
    const deep_ep::nic::Connection connection{pe_, peer, number, {}};
    served_.push_back({std::make_unique<SendQueue>(
                           connection, shared, memory_[static_cast<size_t>(nic)], settings_.nic,
                           [this](uint32_t bound) { return draw(bound); }, nullptr),
                       assisted, 0});
    return {ring,
            settings_.cpu_doorbells ? 0 : record + offsetof(mlx5::DoorbellRecord, send),
            reinterpret_cast<uint64_t>(word),
            cqe,
            returned,
            mlx5::big(key),
            number};
}

void Nics::check() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!refusal_.empty()) throw Failure(kInternal, refusal_);
}

void Nics::run() {
    deep_ep::host::Looks looks;
    // Relaxed: the destructor's store, which publishes nothing else.
    while (!stopping_.load(std::memory_order_relaxed)) looks.note(serve());
}

bool Nics::serve() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!refusal_.empty()) return false;
    bool worked = false;
    try {
        for (Served& served : served_) worked |= step(served);
    } catch (const deep_ep::nic::Violation& violation) {
        refusal_ = std::string("the NIC refuses a request: ") + violation.what();
        complain(refusal_);
        for (Served& served : served_) served.queue->fail(mlx5::kLocalOperation);
    }
    return worked;
}

bool Nics::step(Served& served) {
    if (served.assisted != nullptr) ring(*served.assisted);
    bool worked = false;
    for (int steps = 0; steps < kMaxSteps && served.queue->has_work(); ++steps) {
        worked = true;
        if (served.delay > 0) {
            --served.delay;
            break;
        }
        served.queue->step();
        if (settings_.nic.max_delay > 0) served.delay = draw(settings_.nic.max_delay + 1);
    }
    return worked;
}

// The host thread rings for kernels that leave the doorbell to it.
void Nics::ring(Assisted& assisted) {
    // Acquire: pairs with the kernel's release of the word, after the WQEBBs that it counts.
    const uint64_t now = __atomic_load_n(assisted.word, __ATOMIC_ACQUIRE);
    if (now <= assisted.rung) return;
    assisted.rung = now;
    // The queue pair reads both on this thread.
    assisted.record.send = mlx5::send_counter(now);
    assisted.doorbell = mlx5::doorbell(assisted.number, now);
}

uint32_t Nics::draw(uint32_t bound) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 17;
    random_ ^= random_ << 5;
    return random_ % bound;
}

}  // namespace nvshmem_double
