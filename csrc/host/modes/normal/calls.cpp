#include "host/modes/normal/calls.h"

#include <algorithm>
#include <stdexcept>

#include "host/modes/normal/block_size.h"
#include "host/modes/normal/chunk_size.h"
#include "host/modes/normal/tensors.h"
#include "host/session/arguments.h"
#include "kernels/normal/combine.h"
#include "kernels/normal/dispatch.h"
#include "kernels/normal/layout.h"
#include "kernels/normal/notify.h"

namespace deep_ep::host::normal {
namespace {

wire::RegionLayout min_layout(const Runtime& runtime, uint32_t experts, const wire::ChunkFormat& format) {
    const BufferOptions& options = runtime.options();
    return {static_cast<u32>(options.ranks), experts, options.has_remote, kMinChunkRows, format};
}
wire::RegionLayout region_layout(const Runtime& runtime, uint32_t experts, const wire::ChunkFormat& format) {
    const wire::RegionLayout least = min_layout(runtime, experts, format);
    return fit_chunks(least, runtime.options().region_bytes,
                      std::min<uint64_t>(runtime.max_put_bytes(), runtime.launcher().chunks().most_bytes));
}

}  // namespace

uint64_t min_region_bytes(const Runtime& runtime, const Sizes& sizes) {
    return std::max(min_layout(runtime, sizes.experts, dispatch_format(sizes, false, sizeof(i32))).bytes(),
                    min_layout(runtime, 0, combine_format(sizes)).bytes());
}

std::pair<uint64_t, uint64_t> put_bytes(const Runtime& runtime, const Sizes& sizes) {
    const wire::RegionLayout least = min_layout(runtime, sizes.experts, dispatch_format(sizes, false, sizeof(i32)));
    return {std::max(least.chunk_bytes(), least.notify_row_bytes()), runtime.max_put_bytes()};
}

uint32_t max_ranks(const Runtime& runtime, uint32_t experts) {
    return max_ranks_of<LayoutKernel, DispatchKernel, CombineKernel>(runtime, experts, 1);
}

uint64_t layout(Runtime& runtime, const Sizes& sizes, uint64_t topk_idx, uint64_t tokens_per_rank,
                uint64_t tokens_per_node, uint64_t tokens_per_expert, uint64_t is_token_in_rank, unsigned blocks,
                uint64_t zero_words) {
    LayoutArgs args{};
    args.shape = shape_of(sizes, runtime.options().ranks);
    args.tokens = sizes.tokens;
    args.experts = sizes.experts;
    args.experts_per_rank = Divider::by(sizes.experts / static_cast<u32>(runtime.options().ranks));
    args.topk_idx = ExpertIds::at(pointer<const void>(topk_idx), sizes.id_bytes);
    args.tokens_per_rank = pointer<i32>(tokens_per_rank);
    args.per_node = static_cast<u32>(runtime.options().ranks_per_node);
    args.ranks_per_node = Divider::by(args.per_node);
    args.tokens_per_node = pointer<i32>(tokens_per_node);
    args.tokens_per_expert = pointer<i32>(tokens_per_expert);
    args.is_token_in_rank = pointer<u8>(is_token_in_rank);
    args.wrong_id = runtime.remark();
    const u32 sums = args.shape.ranks_ + args.shape.ranks_ / args.per_node + args.experts;
    u32* const zeros = zero_words != 0 ? pointer<u32>(zero_words) : runtime.zero_words(1 + sums);
    args.added = zeros;
    args.sums = reinterpret_cast<i32*>(zeros + 1);
    return runtime.launch<LayoutKernel>(args, blocks, sizes.experts);
}

std::shared_ptr<Call> notify(Runtime& runtime, const Sizes& sizes, uint64_t is_token_in_rank,
                             uint64_t tokens_per_expert, std::optional<uint64_t> checked_ids, const Plan& plan,
                             const CountTensors& counts, uint32_t max_rows, bool finish_later, unsigned blocks) {
    const u32 experts = sizes.experts / static_cast<u32>(runtime.options().ranks);
    if (experts > kMaxExperts) {
        throw std::invalid_argument("experts=" + std::to_string(experts) + " of a rank: expected at most " +
                                    std::to_string(kMaxExperts));
    }
    auto call = runtime.open(wire::Kind::kDispatch);
    NotifyArgs args{};
    args.shape = shape_of(sizes, runtime.options().ranks);
    args.layout = region_layout(runtime, sizes.experts, dispatch_format(sizes, false, sizeof(i32)));
    args.arguments = hash_of_dispatch(*call, sizes, max_rows);
    args.tokens = sizes.tokens;
    args.max_rows = max_rows;
    args.finish_later = finish_later;
    args.is_token_in_rank = pointer<const u8>(is_token_in_rank);
    args.tokens_per_expert = pointer<const i32>(tokens_per_expert);
    args.checks_ids = checked_ids && sizes.topk != 0;
    args.topk_idx = ExpertIds::at(pointer<const void>(checked_ids.value_or(0)), sizes.id_bytes);
    if (args.checks_ids != 0) args.experts_per_rank = Divider::by(experts);
    args.plan = plan;
    args.per_node = static_cast<u32>(runtime.options().ranks_per_node);
    args.rows_per_expert = call->words.get();
    args.received = received_counts(counts, args.shape.ranks_);
    if (max_rows == 0) {
        args.heap_bytes = runtime.announced();
        args.heaps = call->heap_bytes.get();
    }
    // At most one block numbers the tokens for a rank or a node, and one more checks the ids. The kernel has no work
    // for further blocks, and the last one to arrive continues alone.
    const u32 nodes = plan.tokens_to_node != nullptr ? args.shape.ranks_ / args.per_node : 0;
    blocks = std::min(blocks, args.shape.ranks_ + nodes + args.checks_ids);
    runtime.launch<NotifyKernel>(*call, args, blocks, args.checks_ids != 0 ? sizes.experts : 0);
    Counting counting{experts, nullptr};
    if (finish_later) counting.later = [&runtime, args](Call& call) { runtime.launch<CountsKernel>(call, args, 1); };
    call->mode = counting;
    return call;
}

void counts(Call& call) {
    if (!lacks_counts(call)) throw std::logic_error("counts: expected a finish_later dispatch that still lacks them");
    auto& counting = std::any_cast<Counting&>(call.mode);
    counting.later(call);
    counting.later = nullptr;
}

bool lacks_counts(const Call& call) {
    const auto* counting = std::any_cast<Counting>(&call.mode);
    return counting != nullptr && counting->later != nullptr;
}

int32_t total_rows(const Call& call) { return call.outcome->total_rows; }
int32_t forwarded_rows(const Call& call) { return call.outcome->forwarded_rows; }

std::vector<int32_t> rows_per_expert(const Call& call) {
    const auto* counting = std::any_cast<Counting>(&call.mode);
    return {call.words.get(), call.words.get() + (counting == nullptr ? 0 : counting->experts)};
}

std::shared_ptr<Call> open(Runtime& runtime, wire::Kind kind, const Sizes& sizes, uint64_t handle) {
    auto call = runtime.open(kind);
    hash_arguments(*call, {{"bytes per row of x", sizes.row_bytes},
                           {"scales per row of x", sizes.scales},
                           {"type of x", sizes.types},
                           {"num_topk", sizes.topk},
                           {"topk_weights", sizes.weights},
                           {"handle of the dispatch", handle}});
    return call;
}

bool dispatch(Runtime& runtime, Call& call, const Sizes& sizes, const DispatchTensors& tensors, const Plan& plan,
              uint32_t rows, bool cached, unsigned blocks) {
    DispatchArgs args{};
    args.shape = shape_of(sizes, runtime.options().ranks);
    args.layout = region_layout(runtime, cached ? 0 : sizes.experts, dispatch_format(sizes, cached, sizeof(i32)));
    args.arguments = call.hash;
    args.first = cached;
    args.tokens = sizes.tokens;
    args.experts_per_rank = sizes.experts / static_cast<u32>(runtime.options().ranks);
    // This rank's number of rows stands for the others'.
    args.streaming = uint64_t{rows} * sizes.row_bytes * args.shape.ranks_ > runtime.launcher().streaming_threshold();
    args.rows = rows;
    args.from = rows_of(tensors, sizes, args.layout.format);
    args.ordinals = pointer<const i32>(tensors.ordinals);
    args.plan = plan;
    const Offered output{tensors.recv_x,       tensors.recv_scales,  tensors.recv_topk_idx, tensors.recv_topk_weights,
                         tensors.recv_src_idx, tensors.expanded_rows};
    args.offer = offer(runtime, output, sizes, rows, tensors.source_words * sizeof(i32));
    if (args.offer.expanded_rows != tensors.expanded_rows) {
        throw std::logic_error("an expanded layout is offered only if all outputs are in the arena");
    }
    args.recv_x = pointer<u8>(tensors.recv_x);
    args.recv_scales = pointer<u32>(tensors.recv_scales);
    const u32 idx_bytes = tensors.expanded_rows != 0 ? sizeof(i32) : sizes.id_bytes;
    args.recv_topk_idx = ExpertIds::at(pointer<void>(tensors.recv_topk_idx), idx_bytes);
    args.recv_topk_weights = pointer<float>(tensors.recv_topk_weights);
    args.recv_src_idx = pointer<i32>(tensors.recv_src_idx);
    args.source_words = tensors.source_words;
    runtime.launch<DispatchKernel>(call, args, blocks);
    runtime.note_graph(call);
    return args.offer.visible != 0;
}

bool combine(Runtime& runtime, Call& call, const Sizes& sizes, const CombineTensors& tensors, const Plan& plan,
             uint32_t rows, bool publish, unsigned blocks) {
    CombineArgs args{};
    args.shape = shape_of(sizes, runtime.options().ranks);
    args.layout = region_layout(runtime, 0, combine_format(sizes));
    args.arguments = call.hash;
    args.tokens = sizes.tokens;
    args.x = pointer<const u8>(tensors.x);
    args.topk_weights = pointer<const float>(tensors.topk_weights);
    args.src_idx = pointer<const i32>(tensors.src_idx);
    args.source_words = tensors.source_words;
    args.plan = plan;
    args.rows = rows;
    if (publish) args.offer = offer(runtime, {tensors.x, 0, 0, tensors.topk_weights, 0}, sizes, rows, 0);
    args.combined_x = pointer<u8>(tensors.combined_x);
    args.combined_weights = pointer<float>(tensors.combined_weights);
    args.bias[0] = pointer<const u8>(tensors.bias[0]);
    args.bias[1] = pointer<const u8>(tensors.bias[1]);
    args.topk_idx = ExpertIds::at(pointer<const void>(tensors.topk_idx), tensors.id_bytes);
    args.choices = tensors.choices;
    args.experts = tensors.experts;
    if (tensors.choices != 0) args.experts_per_rank = Divider::by(tensors.experts / args.shape.ranks_);
    runtime.launch<CombineKernel>(call, args, blocks);
    runtime.note_graph(call);
    return args.offer.visible != 0;
}

}  // namespace deep_ep::host::normal
