#include "host/modes/normal/two_hops.h"

#include <algorithm>
#include <stdexcept>

#include "host/modes/normal/block_size.h"
#include "host/modes/normal/chunk_size.h"
#include "host/modes/normal/tensors.h"
#include "host/session/arguments.h"
#include "kernels/normal/layout.h"
#include "kernels/two_hops/combine.h"
#include "kernels/two_hops/dispatch.h"
#include "kernels/two_hops/notify.h"

namespace deep_ep::host::two_hops {

using deep_ep::two_hops::CombineArgs;
using deep_ep::two_hops::CombineKernel;
using deep_ep::two_hops::CountsKernel;
using deep_ep::two_hops::DispatchArgs;
using deep_ep::two_hops::DispatchKernel;
using deep_ep::two_hops::NotifyArgs;
using deep_ep::two_hops::NotifyKernel;
using deep_ep::two_hops::RowSource;

namespace {

struct Nodes {
    u32 ranks, per_node;
    u32 roles = 1;
};
Nodes nodes_of(const Runtime& runtime) {
    return {static_cast<u32>(runtime.options().ranks), static_cast<u32>(runtime.options().ranks_per_node),
            runtime.leaves_out() ? wire::kRoles : 1};
}

wire::TwoHopSizes min_sizes(const Nodes& nodes, const Sizes& sizes, bool cached) {
    return {nodes.ranks / nodes.per_node,
            nodes.per_node,
            nodes.roles,
            cached ? 0 : sizes.experts,
            kMinChunkRows,
            1,
            normal::dispatch_format(sizes, cached, sizeof(i32)),
            normal::dispatch_format(sizes, cached, sizeof(RowSource))};
}
wire::TwoHopLayout dispatch_layout(const Runtime& runtime, const Sizes& sizes, bool cached) {
    return fit_chunks(min_sizes(nodes_of(runtime), sizes, cached), runtime.options().region_bytes,
                      runtime.max_put_bytes(), runtime.options().bytes_in_flight,
                      runtime.launcher().chunks().least_rows);
}
wire::TwoHopSizes min_combine_sizes(const Nodes& nodes, const Sizes& sizes) {
    wire::TwoHopSizes layout = min_sizes(nodes, sizes, true);
    layout.with_sets = 0;
    layout.rail = layout.local = normal::combine_format(sizes);
    return layout;
}
wire::TwoHopLayout combine_layout(const Runtime& runtime, const Sizes& sizes) {
    return fit_chunks(min_combine_sizes(nodes_of(runtime), sizes), runtime.options().region_bytes,
                      runtime.max_put_bytes(), runtime.options().bytes_in_flight,
                      runtime.launcher().chunks().least_rows);
}

}  // namespace

uint64_t min_region_bytes(const Runtime& runtime, const Sizes& sizes) {
    const Nodes nodes = nodes_of(runtime);
    return std::max(wire::TwoHopLayout::of(min_sizes(nodes, sizes, false)).bytes,
                    wire::TwoHopLayout::of(min_combine_sizes(nodes, sizes)).bytes);
}

std::pair<uint32_t, uint64_t> staging(const Sizes& sizes, uint32_t ranks, uint32_t per_node, uint64_t bytes_in_flight) {
    const auto fit = [&](const wire::TwoHopSizes& least) {
        return fit_chunks(least, UINT64_MAX, UINT64_MAX, bytes_in_flight, kMinChunkRows);
    };
    const Nodes nodes{ranks, per_node};
    const wire::TwoHopLayout dispatched = fit(min_sizes(nodes, sizes, false));
    return {dispatched.chunk_rows, std::max(dispatched.bytes, fit(min_combine_sizes(nodes, sizes)).bytes)};
}

uint32_t chunk_rows(const Runtime& runtime, const Sizes& sizes) {
    return dispatch_layout(runtime, sizes, false).chunk_rows;
}

std::pair<uint64_t, uint64_t> put_bytes(const Runtime& runtime, const Sizes& sizes) {
    const wire::TwoHopSizes least = min_sizes(nodes_of(runtime), sizes, false);
    return {std::max(least.rail_bytes(kMinChunkRows), least.rail_counts_bytes()), runtime.max_put_bytes()};
}

uint32_t max_ranks(const Runtime& runtime, uint32_t experts) {
    return max_ranks_of<LayoutKernel, NotifyKernel, DispatchKernel, CombineKernel>(runtime, experts,
                                                                                   nodes_of(runtime).per_node);
}

std::shared_ptr<Call> notify(Runtime& runtime, const Sizes& sizes, uint64_t is_token_in_rank,
                             uint64_t tokens_per_expert, std::optional<uint64_t> checked_ids, const TwoHopPlan& plan,
                             const CountTensors& counts, uint32_t max_rows, bool finish_later, unsigned blocks) {
    const u32 experts = sizes.experts / static_cast<u32>(runtime.options().ranks);
    if (experts > normal::kMaxExperts) {
        throw std::invalid_argument("experts=" + std::to_string(experts) + " of a rank: expected at most " +
                                    std::to_string(normal::kMaxExperts));
    }
    auto call = runtime.open(wire::Kind::kDispatch);
    NotifyArgs args{};
    args.shape = normal::shape_of(sizes, runtime.options().ranks);
    args.layout = dispatch_layout(runtime, sizes, false);
    args.arguments = normal::hash_of_dispatch(*call, sizes, max_rows);
    args.tokens = sizes.tokens;
    args.max_rows = max_rows;
    args.finish_later = finish_later;
    args.is_token_in_rank = pointer<const u8>(is_token_in_rank);
    args.tokens_per_expert = pointer<const i32>(tokens_per_expert);
    args.checks_ids = checked_ids && sizes.topk != 0;
    args.topk_idx = ExpertIds::at(pointer<const void>(checked_ids.value_or(0)), sizes.id_bytes);
    if (args.checks_ids != 0) args.experts_per_rank = Divider::by(experts);
    args.plan = plan;
    args.rows_per_expert = call->words.get();
    args.received = normal::received_counts(counts, args.layout.per_node);
    if (max_rows == 0) {
        args.heap_bytes = runtime.announced();
        args.heaps = call->heap_bytes.get();
    }
    // One warp per node numbers the node's rows, and one more block checks the ids; the kernel has no work for further
    // thread blocks.
    blocks = std::min(blocks, wire::ceil_div(args.layout.nodes, runtime.launcher().warps()) + args.checks_ids);
    runtime.launch<NotifyKernel>(*call, args, blocks, args.checks_ids != 0 ? sizes.experts : 0);
    normal::Counting counting{experts, nullptr};
    if (finish_later) counting.later = [&runtime, args](Call& call) { runtime.launch<CountsKernel>(call, args, 1); };
    call->mode = counting;
    return call;
}

bool dispatch(Runtime& runtime, Call& call, const Sizes& sizes, const DispatchTensors& tensors, const TwoHopPlan& plan,
              uint32_t rows, bool cached, unsigned blocks) {
    DispatchArgs args{};
    args.shape = normal::shape_of(sizes, runtime.options().ranks);
    args.layout = dispatch_layout(runtime, sizes, cached);
    args.arguments = call.hash;
    args.first = cached;
    args.tokens = sizes.tokens;
    args.experts_per_rank = sizes.experts / static_cast<u32>(runtime.options().ranks);
    // This rank's number of rows stands for those of the others on its machine.
    const auto per_node = static_cast<uint64_t>(runtime.options().ranks_per_node);
    args.streaming = uint64_t{rows} * sizes.row_bytes * per_node > runtime.launcher().streaming_threshold();
    args.rows = rows;
    args.from = normal::rows_of(tensors, sizes, args.layout.rail);
    args.plan = plan;
    const normal::Offered output{tensors.recv_x, tensors.recv_scales, tensors.recv_topk_idx, tensors.recv_topk_weights,
                                 tensors.recv_src_idx};
    args.offer = normal::offer(runtime, output, sizes, rows, sizeof(RowSource));
    args.output = {pointer<u8>(tensors.recv_x), pointer<u32>(tensors.recv_scales),
                   ExpertIds::at(pointer<void>(tensors.recv_topk_idx), sizes.id_bytes),
                   pointer<float>(tensors.recv_topk_weights), pointer<RowSource>(tensors.recv_src_idx)};
    runtime.launch<DispatchKernel>(call, args, blocks);
    runtime.note_graph(call);
    return args.offer.visible != 0;
}

bool combine(Runtime& runtime, Call& call, const Sizes& sizes, const CombineTensors& tensors, const TwoHopPlan& plan,
             uint32_t rows, bool publish, unsigned blocks) {
    CombineArgs args{};
    args.shape = normal::shape_of(sizes, runtime.options().ranks);
    args.layout = combine_layout(runtime, sizes);
    args.arguments = call.hash;
    args.tokens = sizes.tokens;
    args.x = pointer<const u8>(tensors.x);
    args.topk_weights = pointer<const float>(tensors.topk_weights);
    args.source = pointer<const RowSource>(tensors.src_idx);
    args.plan = plan;
    args.rows = rows;
    if (publish) args.offer = normal::offer(runtime, {tensors.x, 0, 0, tensors.topk_weights, 0}, sizes, rows, 0);
    args.combined_x = pointer<u8>(tensors.combined_x);
    args.combined_weights = pointer<float>(tensors.combined_weights);
    args.bias[0] = pointer<const u8>(tensors.bias[0]);
    args.bias[1] = pointer<const u8>(tensors.bias[1]);
    runtime.launch<CombineKernel>(call, args, blocks);
    runtime.note_graph(call);
    return args.offer.visible != 0;
}

}  // namespace deep_ep::host::two_hops
