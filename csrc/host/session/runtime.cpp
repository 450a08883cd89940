#include "host/session/runtime.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "host/control/host_word.h"
#include "host/session/chunk_size.h"
#include "kernels/normal/combine.h"
#include "kernels/normal/dispatch.h"
#include "kernels/normal/layout.h"

namespace deep_ep::host {
namespace {

// A cached dispatch carries rows alone.
wire::ChunkFormat dispatch_format(const Sizes& sizes, bool cached) {
    const u32 scales_bytes = sizes.scales * static_cast<u32>(sizeof(u32));
    if (cached) return {sizes.row_bytes, scales_bytes, 0, 0, 0};
    return {sizes.row_bytes, scales_bytes, sizes.topk * sizes.id_bytes, sizes.topk * static_cast<u32>(sizeof(float)),
            sizeof(i32)};
}
wire::ChunkFormat combine_format(const Sizes& sizes) {
    return {sizes.row_bytes, 0, 0, sizes.topk * static_cast<u32>(sizeof(float)), 0};
}

RuntimeShape shape_of(const Sizes& sizes, int ranks) { return {static_cast<u32>(ranks), sizes.row_bytes, sizes.topk}; }

// FNV-1a over what all ranks must agree on.
uint64_t hash_arguments(wire::Kind kind, std::initializer_list<uint64_t> values) {
    uint64_t hash = 0xcbf29ce484222325ull ^ static_cast<uint64_t>(kind);
    for (const uint64_t value : values) {
        for (int byte = 0; byte < 8; ++byte) hash = (hash ^ (value >> (8 * byte) & 0xff)) * 0x100000001b3ull;
    }
    return hash;
}

// A wait that lasts so long is looked into (P15).
constexpr uint64_t kSuspicious = 500'000'000;  // ns
// How often a wait looks whether a peer's process has ended.
constexpr uint64_t kLook = 100'000'000;  // ns

template <class T>
T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

wire::HeapLayout Runtime::heap_layout(const BufferOptions& options) {
    return {static_cast<u32>(options.ranks), static_cast<u32>(options.regions), options.region_bytes,
            options.arena_bytes};
}

Runtime::Runtime(const BufferOptions& options, std::shared_ptr<Heap> own, std::vector<std::shared_ptr<Heap>> heaps,
                 std::unique_ptr<Memory> memory, std::shared_ptr<Launcher> launcher, const MakeControl& make_control,
                 MakeNetworks make_networks)
    : options_(options),
      heaps_(std::move(heaps)),
      arena_(std::make_shared<Arena>(std::move(own), heap_layout(options).arena_offset(), options.arena_bytes,
                                     options.poison)),
      memory_(std::move(memory)),
      control_(make_control(*memory_)),
      launcher_(std::move(launcher)),
      mapped_(make_private<u8*>(heaps_.size())),
      routes_(make_private<fabric::Route>(heaps_.size())),
      mapped_bytes_(make_private<u64>(heaps_.size())),
      base_(make_private<u64>(heap_layout(options).words())),
      farewell_(std::static_pointer_cast<fabric::Completion>(memory_->make_shared(sizeof(fabric::Completion)))),
      wrong_id_(std::static_pointer_cast<i64>(memory_->make_shared(sizeof(i64)))),
      claimed_(std::static_pointer_cast<u64>(memory_->make_polled(sizeof(u64)))),
      failures_(FailureCount::of(options.rank_key, *memory_)),
      context_(make_private<Context>()),
      timeout_ns_(options.timeout_ns),
      make_networks_(std::move(make_networks)),
      networks_(make_networks_(*memory_)) {
    *wrong_id_ = -1;
    std::vector<u8*> mapped(heaps_.size(), nullptr);
    for (size_t r = 0; r < heaps_.size(); ++r) {
        if (options_.routes[r] == fabric::kMapped) mapped[r] = heaps_[r]->base();
    }
    memory_->write(mapped_.get(), mapped.data(), mapped.size() * sizeof(u8*));
    memory_->write(routes_.get(), options_.routes.data(), options_.routes.size() * sizeof(fabric::Route));
    for (const auto& heap : heaps_) told_mapped_.push_back(heap->mapped());
    memory_->write(mapped_bytes_.get(), told_mapped_.data(), told_mapped_.size() * sizeof(u64));
    write_context(sequence(generation_, 0));
    failures_->join(*this);
    teller_ = teller();
    make_spare(static_cast<size_t>(options_.calls));
    if (options_.poison) {
        const wire::HeapLayout heap = heap_layout(options_);
        memory_->fill(pointer<u8>(heap_base(options_.rank)) + heap.regions_offset(), kPoison,
                      heap.arena_offset() - heap.regions_offset());
    }
}

Runtime::~Runtime() { failures_->leave(*this); }

void Runtime::write_context(uint64_t sequence) {
    Context context{};
    context.peers.rank = static_cast<u32>(options_.rank);
    context.peers.ranks = static_cast<u32>(options_.ranks);
    context.peers.local = reinterpret_cast<u8*>(heap_base(options_.rank));
    context.peers.base = mapped_.get();
    context.peers.mapped_bytes = mapped_bytes_.get();
    context.peers.route = routes_.get();
    networks_.fill(context.peers);
    context.peers.heap = heap_layout(options_);
    context.sequence = sequence;
    context.base = base_.get();
    context.farewell = farewell_.get();
    context.mask = mask_;
    context.claimed = claimed_.get();
    context.failures = failures_->address();
    // A failure whose caller has not been told concerns this Buffer too: what comes may be given its results.
    const uint64_t told = failures_->told();
    const auto settled = failures_->settled(*memory_, 0);
    forgiven_ = settled ? told : told - 1;
    context.failures_known = settled ? *settled : failures_->left_behind();
    memory_->write(context_.get(), &context, sizeof(context));
}

uint64_t Runtime::most_put_bytes() const { return networks_.most_put_bytes(); }

wire::RegionLayout Runtime::region_layout(uint32_t experts, const wire::ChunkFormat& format) const {
    return fit_chunks(least_layout(experts, format), options_.region_bytes, most_put_bytes());
}

wire::RegionLayout Runtime::least_layout(uint32_t experts, const wire::ChunkFormat& format) const {
    return {static_cast<u32>(options_.ranks), experts, options_.has_remote, kMinChunkRows, format};
}

std::pair<uint64_t, uint64_t> Runtime::put_bytes(const Sizes& sizes) const {
    const wire::RegionLayout least = least_layout(sizes.experts, dispatch_format(sizes, false));
    return {std::max(least.chunk_bytes(), least.notify_row_bytes()), most_put_bytes()};
}

uint64_t Runtime::least_region_bytes(const Sizes& sizes) const {
    return std::max(least_layout(sizes.experts, dispatch_format(sizes, false)).bytes(),
                    least_layout(0, combine_format(sizes)).bytes());
}

uint64_t Runtime::launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, size_t shared_bytes,
                         const void* args, size_t bytes) {
    const uint64_t serial = launcher_->launch(kernel, shape, blocks, launcher_->warps(), shared_bytes, args, bytes);
    latest_ = std::max(latest_.load(), serial);
    return serial;
}

uint64_t Runtime::layout(const Sizes& sizes, uint64_t topk_idx, uint64_t tokens_per_rank, uint64_t tokens_per_expert,
                         uint64_t is_token_in_rank, unsigned blocks) {
    LayoutArgs args{};
    args.shape = shape_of(sizes, options_.ranks);
    args.tokens = sizes.tokens;
    args.experts = sizes.experts;
    args.experts_per_rank = Divider::by(sizes.experts / static_cast<u32>(options_.ranks));
    args.topk_idx = ExpertIds::at(pointer<const void>(topk_idx), sizes.id_bytes);
    args.tokens_per_rank = pointer<i32>(tokens_per_rank);
    args.tokens_per_expert = pointer<i32>(tokens_per_expert);
    args.is_token_in_rank = pointer<u8>(is_token_in_rank);
    args.wrong_id = wrong_id_.get();
    return launch("layout", args.shape, blocks, layout_shared_bytes(args.shape.ranks_, args.experts), &args,
                  sizeof(args));
}

// Stored by layout kernels; each stands for itself.
int64_t Runtime::take_wrong_id() { return __atomic_exchange_n(wrong_id_.get(), -1, __ATOMIC_RELAXED); }

// Many at once: on a GPU an allocation takes long, and may wait for kernels that wait for this rank's.
void Runtime::make_spare(size_t count) {
    const auto tickets = make_private<Ticket>(count);
    const auto reports = std::static_pointer_cast<Report>(memory_->make_shared(count * sizeof(Report)));
    for (size_t i = 0; i < count; ++i) {
        spare_.emplace_back(std::shared_ptr<Ticket>(tickets, tickets.get() + i),
                            std::shared_ptr<Report>(reports, reports.get() + i));
    }
}

std::shared_ptr<Call> Runtime::open(wire::Kind kind) {
    auto call = std::make_shared<Call>();
    call->kind = kind;
    call->timeout_ns = timeout_ns_;
    call->generation = generation_;
    if (spare_.empty()) make_spare(static_cast<size_t>(options_.calls));
    std::tie(call->ticket, call->report) = spare_.back();
    spare_.pop_back();
    calls_.push_back(call);
    return call;
}

std::shared_ptr<Call> Runtime::notify(const Sizes& sizes, uint64_t is_token_in_rank, uint64_t tokens_per_expert,
                                      const Plan& plan, uint64_t rows_to_rank, uint32_t most_rows, bool finish_later,
                                      unsigned blocks) {
    auto call = open(wire::Kind::kDispatch);
    call->experts = sizes.experts / static_cast<u32>(options_.ranks);
    if (call->experts > Report::kMostExperts) throw std::invalid_argument("too many experts");
    NotifyArgs args{};
    args.call = call_args(*call);
    args.shape = shape_of(sizes, options_.ranks);
    args.layout = region_layout(sizes.experts, dispatch_format(sizes, false));
    args.arguments = hash_arguments(wire::Kind::kDispatch, {sizes.row_bytes, sizes.scales, sizes.types, sizes.topk,
                                                            sizes.id_bytes, sizes.experts, most_rows});
    args.tokens = sizes.tokens;
    args.most_rows = most_rows;
    args.finish_later = finish_later;
    args.is_token_in_rank = pointer<const u8>(is_token_in_rank);
    args.tokens_per_expert = pointer<const i32>(tokens_per_expert);
    args.plan = plan;
    args.rows_to_rank = pointer<i32>(rows_to_rank);
    args.rows_per_expert = call->report->rows_per_expert;
    if (most_rows == 0) {
        args.heap_bytes = announced_;
        args.heaps = call->report->heap_bytes;
    }
    // A warp per destination scans the tokens; the kernel has no other work for more blocks, and the last of them to
    // come goes on alone.
    blocks = std::min(blocks, wire::ceil_div(args.shape.ranks_, launcher_->warps()));
    call->serial = launch("notify", args.shape, blocks, 0, &args, sizeof(args));
    if (finish_later) call->counts = args;
    return call;
}

// A captured call: it runs whenever its graph is replayed.
void Runtime::note_graph(Call& call) {
    if (call.serial != 0) return;
    call.graph_gone = launcher_->watch_graph();
    in_graphs_ = true;
}

void Runtime::counts(Call& call) {
    if (!call.counts) throw std::logic_error("counts are taken once, of a dispatch that is finished later");
    call.serial = launch("counts", call.counts->shape, 1, 0, &*call.counts, sizeof(NotifyArgs));
    call.counts.reset();
}

std::shared_ptr<Call> Runtime::notify_cached(wire::Kind kind, const Sizes& sizes, uint64_t handle) {
    auto call = open(kind);
    const NotifyCachedArgs args{call_args(*call), kind,
                                hash_arguments(kind, {sizes.row_bytes, sizes.scales, sizes.types, sizes.topk, handle})};
    call->serial = launch("notify_cached", {}, 1, 0, &args, sizeof(args));
    return call;
}

wire::Offer Runtime::offer(const Tensors& tensors, const Sizes& sizes, uint32_t rows, bool combining) const {
    wire::Offer offer{};
    const auto inside = [&](uint64_t address, uint64_t bytes_per_row) {
        return address == 0 || arena_->contains(pointer<const void>(address), rows * bytes_per_row);
    };
    const uint64_t x = combining ? tensors.x : tensors.recv_x;
    const uint64_t scales = combining ? 0 : tensors.recv_scales;
    const uint64_t idx = combining ? 0 : tensors.recv_topk_idx;
    const uint64_t weights = combining ? tensors.topk_weights : tensors.recv_topk_weights;
    const uint64_t src_idx = combining ? 0 : tensors.recv_src_idx;
    // Nothing is stored into, or loaded from, an output without rows: it may lie anywhere.
    offer.visible = rows == 0 || (inside(x, sizes.row_bytes) && inside(scales, sizes.scales * sizeof(u32)) &&
                                  inside(idx, sizes.topk * sizes.id_bytes) &&
                                  inside(weights, sizes.topk * sizeof(float)) && inside(src_idx, sizeof(i32)));
    if (offer.visible == 0 || rows == 0) return offer;
    offer.rows = rows;
    offer.x = offset_of(x);
    offer.scales = offset_of(scales);
    offer.topk_idx = offset_of(idx);
    offer.topk_weights = offset_of(weights);
    offer.src_idx = offset_of(src_idx);
    return offer;
}

bool Runtime::dispatch(Call& call, const Sizes& sizes, const Tensors& tensors, const Plan& plan, uint32_t rows,
                       bool cached, unsigned blocks) {
    DispatchArgs args{};
    args.call = call_args(call);
    args.shape = shape_of(sizes, options_.ranks);
    args.layout = region_layout(cached ? 0 : sizes.experts, dispatch_format(sizes, cached));
    args.tokens = sizes.tokens;
    args.experts_per_rank = sizes.experts / static_cast<u32>(options_.ranks);
    // This rank's rows stand for the others'.
    args.streaming = uint64_t{rows} * sizes.row_bytes * args.shape.ranks_ > launcher_->streaming_threshold();
    args.rows = rows;
    args.x = pointer<const u8>(tensors.x);
    args.scales = pointer<const u32>(tensors.scales);
    std::copy(tensors.scales_stride.begin(), tensors.scales_stride.end(), args.scales_stride);
    const u64 scales_bytes = args.layout.format.scales_bytes, stride = tensors.scales_stride[0] * sizeof(u32);
    args.scales_in_pieces =
        tensors.scales_stride[1] == 1 && (tensors.scales | stride | scales_bytes) % wire::kPieceBytes == 0;
    args.topk_idx = ExpertIds::at(pointer<const void>(tensors.topk_idx), sizes.id_bytes);
    args.topk_weights = pointer<const float>(tensors.topk_weights);
    args.plan = plan;
    args.offer = offer(tensors, sizes, rows, false);
    args.recv_x = pointer<u8>(tensors.recv_x);
    args.recv_scales = pointer<u32>(tensors.recv_scales);
    args.recv_topk_idx = ExpertIds::at(pointer<void>(tensors.recv_topk_idx), sizes.id_bytes);
    args.recv_topk_weights = pointer<float>(tensors.recv_topk_weights);
    args.recv_src_idx = pointer<i32>(tensors.recv_src_idx);
    const size_t shared_bytes = dispatch_shared_bytes(args.shape.ranks_, launcher_->warps(), launcher_->copies_bytes());
    call.serial = launch("dispatch", args.shape, blocks, shared_bytes, &args, sizeof(args));
    note_graph(call);
    return args.offer.visible != 0;
}

bool Runtime::combine(Call& call, const Sizes& sizes, const Tensors& tensors, const Plan& plan, uint32_t rows,
                      bool publish, unsigned blocks) {
    CombineArgs args{};
    args.call = call_args(call);
    args.shape = shape_of(sizes, options_.ranks);
    args.layout = region_layout(0, combine_format(sizes));
    args.tokens = sizes.tokens;
    args.x = pointer<const u8>(tensors.x);
    args.topk_weights = pointer<const float>(tensors.topk_weights);
    args.src_idx = pointer<const i32>(tensors.recv_src_idx);
    args.plan = plan;
    args.rows = rows;
    if (publish) args.offer = offer(tensors, sizes, rows, true);
    args.combined_x = pointer<u8>(tensors.recv_x);
    args.combined_weights = pointer<float>(tensors.recv_topk_weights);
    args.bias[0] = pointer<const u8>(tensors.bias0);
    args.bias[1] = pointer<const u8>(tensors.bias1);
    const size_t shared_bytes = combine_shared_bytes(args.shape.ranks_, launcher_->warps());
    call.serial = launch("combine", args.shape, blocks, shared_bytes, &args, sizeof(args));
    note_graph(call);
    return args.offer.visible != 0;
}

std::shared_ptr<Call> Runtime::post(PostArgs posts, unsigned blocks) {
    const wire::HeapLayout heap = heap_layout(options_);
    const auto check = [&](const char* name, int rank, uint64_t offset, uint64_t bytes, uint64_t alignment) {
        const uint64_t end = std::min<uint64_t>(heap.bytes(), heaps_[static_cast<size_t>(rank)]->mapped());
        const bool inside = offset >= heap.arena_offset() && offset <= end && bytes <= end - offset;
        if (inside && offset % alignment == 0) return;
        throw std::invalid_argument(std::string(name) + "=" + std::to_string(offset) + ": expected " +
                                    std::to_string(bytes) + " bytes within an arena, [" +
                                    std::to_string(heap.arena_offset()) + ", " + std::to_string(end) +
                                    "), at a multiple of " + std::to_string(alignment));
    };
    if (posts.to >= static_cast<uint32_t>(options_.ranks)) {
        throw std::invalid_argument("to=" + std::to_string(posts.to) + ": expected 0 to " +
                                    std::to_string(options_.ranks - 1));
    }
    if (posts.posters == 0 || posts.posters > launcher_->warps()) {
        throw std::invalid_argument("posters=" + std::to_string(posts.posters) + ": expected 1 to " +
                                    std::to_string(launcher_->warps()) + ", warps of a block");
    }
    if (posts.bytes % wire::kPieceBytes != 0 || posts.bytes > most_put_bytes()) {
        throw std::invalid_argument("bytes=" + std::to_string(posts.bytes) + ": expected a multiple of " +
                                    std::to_string(wire::kPieceBytes) + ", at most " +
                                    std::to_string(most_put_bytes()));
    }
    check("source", options_.rank, posts.source, posts.bytes, wire::kPieceBytes);
    const u64 posters = u64{blocks} * posts.posters;
    const int to = static_cast<int>(posts.to);
    check("target", to, posts.target, posters * posts.bytes, wire::kPieceBytes);
    check("words", to, posts.words, posters * sizeof(u64), sizeof(u64));
    auto call = open(wire::Kind::kNone);
    posts.call = call_args(*call);
    call->serial = launch("post", {}, blocks, 0, &posts, sizeof(posts));
    return call;
}

void Runtime::wait_counts(Call& call) {
    wait_until(call, [&] {
        // Pairs with notify's release: the counts are visible. A call that failed ends without them.
        return __atomic_load_n(&call.report->outcome.counts_ready, __ATOMIC_ACQUIRE) != 0 || finished(call);
    });
}

std::vector<std::pair<int, uint64_t>> Runtime::behind(const Call& call) const {
    std::vector<std::pair<int, uint64_t>> ranks;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        const uint64_t announced = std::min<uint64_t>(call.report->heap_bytes[rank], heap_layout(options_).bytes());
        if (announced > heaps_[static_cast<size_t>(rank)]->mapped()) ranks.emplace_back(rank, announced);
    }
    return ranks;
}

void Runtime::share(const Call& call) {
    for (size_t rank = 0; rank < heaps_.size(); ++rank) {
        const u64 mapped = heaps_[rank]->mapped();
        if (mapped == told_mapped_[rank]) continue;
        // Kernels that run may look at it; an offer that needs it is read by those launched from now on.
        memory_->store_words({host_word(mapped_bytes_.get()[rank])}, mapped);
        told_mapped_[rank] = mapped;
    }
    arena_->share(call.report->heap_bytes[options_.rank]);
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
    uint64_t waited = 0, suspicious = kSuspicious;
    // Not forever: it is left to the executor to find a wait without end.
    while (waited < 2 * call.timeout_ns) {
        const uint64_t time = control_->watches() ? kLook : suspicious - waited;
        if (launcher_->wait_for(ready, what, time)) return;
        waited += time;
        if (abort_if_lost()) break;
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
    calls_.erase(std::remove(calls_.begin(), calls_.end(), call), calls_.end());
    // The memory is for the next call; a holder of this one still reads what came of it.
    auto report = std::make_shared<Report>(*call->report);
    call->report.swap(report);
    report->outcome = {};
    spare_.emplace_back(std::move(call->ticket), std::move(report));
}

bool Runtime::settle(uint64_t nanoseconds) {
    return launcher_->wait_for([this] { return latest_ == 0 || launcher_->finished(latest_); }, "kernels of a Buffer",
                               nanoseconds);
}

void Runtime::drain() {
    // Own kernels post, the agent adds to `completed` when it has read a put's pieces.
    const auto left = [this] {
        return __atomic_load_n(&farewell_->completed, __ATOMIC_ACQUIRE) ==
                   __atomic_load_n(&farewell_->posted, __ATOMIC_RELAXED) &&
               networks_.idle();
    };
    if (left()) return;
    // A rank that went away will not acknowledge: then this one need not wait for it either.
    launcher_->wait_for(left, "last puts of a Buffer", timeout_ns_);
}

void Runtime::leave() {
    networks_ = {};
    teller_.reset();
    control_->leave();
}

}  // namespace deep_ep::host
