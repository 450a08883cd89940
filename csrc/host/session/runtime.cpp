#include "host/session/runtime.h"

#include <algorithm>
#include <stdexcept>

#include "host/heap/host_word.h"
#include "observe/clock.h"

namespace deep_ep::host {
namespace {

// A wait that lasts this long is investigated (P15).
constexpr uint64_t kSuspicious = 500'000'000;  // ns
// Enough for the counts of usual numbers of experts. Later an allocation may wait for kernels of other ranks.
constexpr size_t kZeroWords = 2048;

}  // namespace

wire::HeapLayout Runtime::heap_layout(const BufferOptions& options) {
    return {static_cast<u32>(options.ranks), static_cast<u32>(options.regions), options.region_bytes,
            options.arena_bytes};
}

Runtime::Runtime(const BufferOptions& options, std::shared_ptr<Heap> own, std::vector<std::shared_ptr<Heap>> heaps,
                 NearParts near, std::unique_ptr<Memory> memory, std::shared_ptr<Launcher> launcher,
                 const MakeControl& make_control, MakeWarden make_warden, MakeNetworks make_networks)
    : options_(options),
      heaps_(std::move(heaps)),
      near_(std::move(near)),
      arena_(std::make_shared<Arena>(std::move(own), heap_layout(options).arena_offset(), options.arena_bytes,
                                     options.poison)),
      memory_(std::move(memory)),
      control_(make_control(*memory_)),
      launcher_(std::move(launcher)),
      mapped_(heaps_.size() > kKeptRanks ? make_private<u8*>(heaps_.size()) : nullptr),
      nears_(heaps_.size() > kKeptRanks ? make_private<u8*>(heaps_.size()) : nullptr),
      routes_(make_private<fabric::Route>(heaps_.size())),
      mapped_bytes_(make_private<u64>(heaps_.size())),
      base_(make_private<u64>(heap_layout(options).words())),
      farewell_(std::static_pointer_cast<fabric::Completion>(memory_->make_shared(sizeof(fabric::Completion)))),
      remark_(std::static_pointer_cast<i64>(memory_->make_shared(sizeof(i64)))),
      claimed_(std::static_pointer_cast<u64>(memory_->make_polled(sizeof(u64)))),
      suspects_(options.masks_ranks ? std::static_pointer_cast<u64>(memory_->make_polled(heaps_.size() * sizeof(u64)))
                                    : nullptr),
      decisions_(options.masks_ranks ? make_private<u64>(heaps_.size() * static_cast<size_t>(options.regions))
                                     : nullptr),
      slots_read_(make_private<u32>(slots_read())),
      failures_(FailureCount::of(options.rank_key, *memory_)),
      context_(make_private<Context>()),
      timeout_ns_(options.timeout_ns),
      make_warden_(std::move(make_warden)),
      make_networks_(std::move(make_networks)) {
    *remark_ = -1;
    for (size_t r = 0; r < heaps_.size(); ++r) {
        if (mapped(r) && near_.of(static_cast<int>(r)) == nullptr) {
            throw std::logic_error("a mapped rank's near part is not mapped");
        }
    }
    if (heaps_.size() > kKeptRanks) {
        memory_->write(mapped_.get(), bases().data(), heaps_.size() * sizeof(u8*));
        memory_->write(nears_.get(), nears().data(), heaps_.size() * sizeof(u8*));
    }
    connect({}, generation_);
    for (const auto& heap : heaps_) told_mapped_.push_back(heap->mapped());
    memory_->write(mapped_bytes_.get(), told_mapped_.data(), told_mapped_.size() * sizeof(u64));
    write_context(Sequence{generation_, 0, 0}.word());
    failures_->join(*this);
    teller_ = teller();
    set_warden(new_warden());
    make_spare(static_cast<size_t>(options_.calls));
    zero_words(kZeroWords);
    if (options_.poison) {
        const wire::HeapLayout heap = heap_layout(options_);
        memory_->fill(heaps_[static_cast<size_t>(options_.rank)]->base() + heap.regions_offset(), kPoison,
                      heap.arena_offset() - heap.regions_offset());
    }
}

Runtime::~Runtime() { failures_->leave(*this); }

std::vector<u8*> Runtime::of_mapped(const std::function<u8*(int)>& address) const {
    std::vector<u8*> found;
    for (size_t r = 0; r < heaps_.size(); ++r) found.push_back(mapped(r) ? address(static_cast<int>(r)) : nullptr);
    return found;
}

// Queue pairs are made only to ranks with which this one communicates.
std::vector<fabric::Route> Runtime::routes(const wire::RankMask& mask) const {
    std::vector<fabric::Route> routes = options_.routes;
    for (u32 rank = 0; rank < routes.size(); ++rank) {
        const bool talks = !mask.has(rank) && audience().joins(static_cast<u32>(options_.rank), rank, mask);
        if (routes[rank] != fabric::kMapped && !talks) routes[rank] = fabric::kUnreached;
    }
    return routes;
}

wire::FarWords Runtime::far_words() const {
    wire::FarWords words{};
    if (near_.coincide()) return words;
    words.distance = heap_base(options_.rank) - reinterpret_cast<uint64_t>(near_.of(options_.rank));
    for (u32 rank = 0; rank < options_.routes.size(); ++rank) {
        if (options_.routes[rank] != fabric::kMapped) words.sources.add(rank);
    }
    return words;
}

void Runtime::write_context(uint64_t sequence) {
    Context context{};
    context.peers.rank = static_cast<u32>(options_.rank);
    context.peers.ranks = static_cast<u32>(options_.ranks);
    context.peers.local = reinterpret_cast<u8*>(heap_base(options_.rank));
    context.peers.base = mapped_.get();
    context.peers.near = near_.of(options_.rank);
    context.peers.nears = nears_.get();
    context.peers.mapped_bytes = mapped_bytes_.get();
    context.peers.route = routes_.get();
    networks_.fill(context.peers);
    context.peers.heap = heap_layout(options_);
    context.peers.far_words = far_words();
    context.sequence = sequence;
    context.base = base_.get();
    context.farewell = farewell_.get();
    context.mask = mask_;
    context.audience = audience();
    context.slots_read = slots_read_.get();
    context.claimed = claimed_.get();
    context.suspects = suspects_.get();
    context.decisions = decisions_.get();
    const size_t kept = std::min<size_t>(heaps_.size(), kKeptRanks);
    std::copy_n(bases().begin(), kept, context.bases);
    std::copy_n(nears().begin(), kept, context.nears);
    context.failures = failures_->address();
    // A failure whose caller has not been notified concerns this Buffer too: its next operations may be given the
    // results of the failed one.
    const uint64_t told = failures_->told();
    const auto settled = failures_->settled(*memory_, 0);
    forgiven_ = settled ? told : told - 1;
    context.failures_known = settled ? *settled : failures_->left_behind();
    memory_->write(context_.get(), &context, sizeof(context));
}

uint64_t Runtime::launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps,
                         size_t shared_bytes, const void* args, size_t bytes) {
    // Its kernels would run, in the waits of other Buffers too, when its memory is gone.
    if (left_) throw std::logic_error(std::string(kernel) + ": launched after its Buffer has been destroyed");
    const uint64_t serial = launcher_->launch(kernel, shape, blocks, warps, shared_bytes, args, bytes);
    latest_ = std::max(latest_.load(), serial);
    launched_ns_ = observe::monotonic_ns();
    return serial;
}

// A graph that is replayed writes where its launch was given room, which by then belongs to others.
u64* Runtime::stages_place(const char* kernel, unsigned blocks, unsigned warps) {
    return launcher_->capturing() ? nullptr : stages_.place(kernel, blocks, warps);
}

std::vector<StageRecord::Launch> Runtime::take_stages(uint64_t nanoseconds) {
    stages_.stop();
    try {
        if (settle(nanoseconds)) return stages_.take();
    } catch (...) {
        stages_.drop();
        throw;
    }
    stages_.drop();
    return {};
}

// Stored by kernels; no other data depends on it.
int64_t Runtime::take_remark() { return __atomic_exchange_n(remark_.get(), -1, __ATOMIC_RELAXED); }

u32* Runtime::zero_words(size_t count) {
    if (count > zero_count_) {
        zero_words_.push_back(make_private<u32>(count));
        zero_count_ = count;
    }
    return zero_words_.back().get();
}

// Allocates many at once: on a GPU an allocation is slow, and may wait for kernels that wait for those of this rank.
void Runtime::make_spare(size_t count) {
    const auto tickets = make_private<Ticket>(count);
    const auto outcomes = std::static_pointer_cast<wire::Outcome>(memory_->make_shared(count * sizeof(wire::Outcome)));
    const size_t ranks = heaps_.size(), words = options_.call_words;
    const auto told = std::static_pointer_cast<i32>(memory_->make_shared(count * words * sizeof(i32)));
    const auto bytes = std::static_pointer_cast<u64>(memory_->make_shared(count * ranks * sizeof(u64)));
    for (size_t i = 0; i < count; ++i) {
        spare_.push_back({std::shared_ptr<Ticket>(tickets, tickets.get() + i),
                          std::shared_ptr<wire::Outcome>(outcomes, outcomes.get() + i),
                          std::shared_ptr<i32>(told, told.get() + i * words),
                          std::shared_ptr<u64>(bytes, bytes.get() + i * ranks)});
    }
}

std::shared_ptr<Call> Runtime::open(wire::Kind kind) {
    auto call = std::make_shared<Call>();
    call->kind = kind;
    call->timeout_ns = timeout_ns_;
    call->generation = generation_;
    call->rank = static_cast<uint32_t>(options_.rank);
    if (spare_.empty()) make_spare(static_cast<size_t>(options_.calls));
    call->ticket = std::move(spare_.back().ticket);
    call->outcome = std::move(spare_.back().outcome);
    call->words = std::move(spare_.back().words);
    call->heap_bytes = std::move(spare_.back().heap_bytes);
    spare_.pop_back();
    {
        const std::lock_guard<std::mutex> guard(calls_->mutex);
        calls_->in_use.push_back(call);
    }
    arena_->next_operation();
    return call;
}

// A captured call runs whenever its graph is replayed.
void Runtime::note_graph(Call& call) {
    if (call.serial != 0) return;
    call.graph_gone = launcher_->watch_graph();
    in_graphs_ = true;
}

void Runtime::wait_counts(Call& call) {
    const observe::Accessor host = observe::host(call.rank);
    wait_until(call, [&] {
        // Pairs with the release of the notify kernel: the counts are visible. A call that failed ends without them.
        return observe::load_acquire(host, &call.outcome->counts_ready) != 0 || finished(call);
    });
    observe::read(host, &call.outcome->total_rows, sizeof(i32));
    observe::read(host, call.words.get(), options_.call_words * sizeof(i32));
    observe::read(host, call.heap_bytes.get(), static_cast<u64>(options_.ranks) * sizeof(u64));
}

std::vector<std::pair<int, uint64_t>> Runtime::behind(const Call& call) const {
    std::vector<std::pair<int, uint64_t>> ranks;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        if (options_.routes[static_cast<size_t>(rank)] != fabric::kMapped) continue;  // networks reach the whole heap
        const uint64_t announced = std::min<uint64_t>(call.heap_bytes.get()[rank], heap_layout(options_).bytes());
        if (announced > heaps_[static_cast<size_t>(rank)]->mapped()) ranks.emplace_back(rank, announced);
    }
    return ranks;
}

void Runtime::share(const Call& call) {
    for (size_t rank = 0; rank < heaps_.size(); ++rank) {
        const u64 mapped = heaps_[rank]->mapped();
        if (mapped == told_mapped_[rank]) continue;
        // Running kernels may read it; only kernels launched from now on read an offer that needs it.
        memory_->store_words({host_word(mapped_bytes_.get()[rank])}, mapped);
        told_mapped_[rank] = mapped;
    }
    arena_->share(call.heap_bytes.get()[options_.rank]);
}

bool Runtime::finished(const Call& call) const { return ended(*launcher_, call); }

bool Runtime::ended(const Launcher& launcher, const Call& call) {
    if (call.serial == 0) return true;  // part of a graph, or not launched yet
    if (launcher.tracks_launches()) return launcher.finished(call.serial);
    // Pairs with the release in ~Operation(): everything that the kernels have stored is visible.
    return observe::load_acquire(observe::host(call.rank), &call.outcome->launches_ended) == call.launches;
}

std::function<bool()> Runtime::all_ended() const {
    const std::lock_guard<std::mutex> guard(calls_->mutex);
    return [launcher = launcher_, latest = latest_.load(), calls = calls_, begun = calls_->in_use] {
        if (latest != 0 && !launcher->finished(latest)) return false;
        const std::lock_guard<std::mutex> guard(calls->mutex);
        const auto one_ended = [&](const std::shared_ptr<Call>& call) { return ended(*launcher, *call); };
        return std::all_of(begun.begin(), begun.end(), one_ended);
    };
}

void Runtime::wait(Call& call) {
    wait_until(call, [&] { return finished(call); });
}

void Runtime::wait_launch(uint64_t serial) {
    launcher_->wait([this, serial] { return launcher_->finished(serial); }, "kernel");
}

void Runtime::wait_until(Call& call, const std::function<bool()>& ready) {
    const char* what = wire::kind_name(call.kind);
    std::vector<int> told;
    Lost seen;
    uint64_t waited = 0, suspicious = kSuspicious;
    // Bounded, so that the executor can detect an endless wait.
    while (waited < 2 * call.timeout_ns) {
        const uint64_t time = control_->watches() ? kPeerLook : suspicious - waited;
        if (launcher_->wait_for(ready, what, time)) return;
        waited += time;
        if (abort_if_lost(seen)) break;
        if (waited < suspicious) continue;
        suspicious *= 2;
        if (compare_with_peers(call)) break;
        tell_of_compiling_peers(call, told);
    }
    launcher_->wait(ready, what);  // after a mismatch or a loss: the abort word ends it
}

void Runtime::set_compiling(bool compiling) { control_->set_compiling(compiling); }

std::vector<int> Runtime::compiling_peers() const {
    std::vector<int> peers;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        if (rank != options_.rank && present(rank) && control_->compiling(rank)) peers.push_back(rank);
    }
    return peers;
}

void Runtime::tell_of_compiling_peers(const Call& call, std::vector<int>& told) const {
    for (const int peer : compiling_peers()) {
        if (!tell_ || std::find(told.begin(), told.end(), peer) != told.end()) continue;
        told.push_back(peer);
        tell_(call, peer);
    }
}

void Runtime::retire(const std::shared_ptr<Call>& call) {
    // The memory goes to the next call, so the outcome is copied for those who still hold this one.
    auto outcome = std::make_shared<wire::Outcome>(*call->outcome);
    {
        const std::lock_guard<std::mutex> guard(calls_->mutex);
        std::erase(calls_->in_use, call);
        call->outcome.swap(outcome);
    }
    *outcome = {};
    std::shared_ptr<i32> words(new i32[options_.call_words], std::default_delete<i32[]>());
    std::copy_n(call->words.get(), options_.call_words, words.get());
    call->words.swap(words);
    spare_.push_back({std::move(call->ticket), std::move(outcome), std::move(words), std::move(call->heap_bytes)});
}

bool Runtime::settle(uint64_t nanoseconds) {
    return launcher_->wait_for(all_ended(), "kernels of a Buffer", nanoseconds);
}

bool Runtime::drain() {
    // This rank's kernels count `posted`; the agent adds to `completed` when it has read the pieces of a put.
    const auto left = [this] {
        return __atomic_load_n(&farewell_->completed, __ATOMIC_ACQUIRE) ==
                   __atomic_load_n(&farewell_->posted, __ATOMIC_RELAXED) &&
               networks_.idle();
    };
    // Bounded, since a rank that has exited will not acknowledge; this rank need not wait for it.
    return (left() || launcher_->wait_for(left, "last puts of a Buffer", timeout_ns_)) && networks_.works();
}

void Runtime::leave() {
    left_ = true;
    networks_ = {};
    teller_.reset();
    set_warden(nullptr);
    control_->leave();
}

}  // namespace deep_ep::host
