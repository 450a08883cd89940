#include "host/modes/low_latency/calls.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "device/logfmt.h"
#include "host/session/arguments.h"
#include "kernels/low_latency/combine.h"
#include "kernels/low_latency/dispatch.h"

namespace deep_ep::host::low_latency {
namespace {

using deep_ep::low_latency::CombineArgs;
using deep_ep::low_latency::CombineKernel;
using deep_ep::low_latency::DispatchArgs;
using deep_ep::low_latency::DispatchKernel;
using deep_ep::low_latency::kForward;
using deep_ep::low_latency::kReceive;
using deep_ep::low_latency::kSend;
using deep_ep::low_latency::Origins;

// The launches left to forward(), if there is anything to forward, and to finish().
struct Rest {
    std::function<void(Runtime&, Call&)> forward, finish;
};

// Maximum number of tokens per put, unless that makes too many puts. Fewer messages are cheaper, but if messages are
// long, their first rows could already be placed while the others arrive.
constexpr uint32_t kTokensPerPut = 128;

wire::LowLatencyLayout layout_of(const Sizes& sizes, uint32_t ranks, bool has_remote) {
    wire::LowLatencyLayout layout{};
    layout.ranks = ranks;
    layout.max_tokens = sizes.max_tokens;
    layout.topk = sizes.topk;
    layout.experts_per_rank = sizes.experts / ranks;
    const bool cast = sizes.scales != Scales::kNone;
    layout.x_bytes = sizes.hidden * static_cast<u32>(cast ? sizeof(u8) : sizeof(u16));
    layout.scales_bytes = sizes.hidden / kScaleGroup * scale_bytes(sizes.scales);
    layout.result_bytes = sizes.logfmt ? log_row_bytes(sizes.hidden) : sizes.hidden * static_cast<u32>(sizeof(u16));
    layout.rest_bytes = sizes.logfmt ? log_rest_bytes(sizes.hidden) : 0;
    layout.has_remote = has_remote;
    layout.row_puts = std::min(wire::kMaxRowPuts, wire::ceil_div(sizes.max_tokens, kTokensPerPut));
    layout.per_node = sizes.per_node;
    layout.weighted = sizes.weighted;
    return layout;
}
wire::LowLatencyLayout layout_of(const Runtime& runtime, const Sizes& sizes) {
    return layout_of(sizes, static_cast<u32>(runtime.options().ranks), runtime.options().has_remote);
}

RuntimeShape shape_of(const wire::LowLatencyLayout& layout, const Sizes& sizes) {
    return {layout.ranks, sizes.hidden * static_cast<u32>(sizeof(u16)), layout.topk};
}

// Whether the rows of all ranks together do not fit into the caches. This rank's number of rows stands for the others'.
bool streams(const Runtime& runtime, const wire::LowLatencyLayout& layout, uint64_t row_bytes, uint32_t tokens) {
    return row_bytes * tokens * layout.topk * layout.ranks > runtime.launcher().streaming_threshold();
}

uint64_t hash_of(Call& call, const Sizes& sizes, uint64_t handle) {
    return hash_arguments(call, {{"num_max_dispatch_tokens_per_rank", sizes.max_tokens},
                                 {"hidden", sizes.hidden},
                                 {"num_topk", sizes.topk},
                                 {"num_experts", sizes.experts},
                                 {"use_fp8, round_scale, use_ue8m0", static_cast<uint64_t>(sizes.scales)},
                                 {"use_logfmt", sizes.logfmt},
                                 {"ranks_per_node of once_per_node", sizes.per_node},
                                 {"topk_weights given to dispatch", sizes.weighted},
                                 {"handle of the dispatch", handle}});
}

template <class Kernel>
void launch(Runtime& runtime, Call& call, typename Kernel::Args args, uint32_t phases, unsigned blocks) {
    args.phases = phases;
    runtime.launch<Kernel>(call, args, blocks, args.layout.ranks * args.layout.experts_per_rank);
}

template <class Kernel>
std::shared_ptr<Call> begin(Runtime& runtime, std::shared_ptr<Call> call, const typename Kernel::Args& args,
                            bool forwards, const Launches& launches) {
    const uint32_t forward = forwards ? uint32_t{kForward} : 0;
    const unsigned blocks = launches.blocks;
    launch<Kernel>(runtime, *call, args, launches.whole ? kSend | forward | kReceive : kSend, blocks);
    if (!launches.whole) {
        Rest rest;
        rest.finish = [args, blocks](Runtime& runtime, Call& call) {
            launch<Kernel>(runtime, call, args, kReceive, blocks);
        };
        // A separate launch: it waits for the sending halves of other ranks and must not keep that of this rank from
        // becoming resident.
        if (forwards) {
            rest.forward = [args, blocks = launches.forward_blocks](Runtime& runtime, Call& call) {
                launch<Kernel>(runtime, call, args, kForward, blocks);
            };
        }
        call->mode = std::move(rest);
    }
    runtime.note_graph(*call);
    return call;
}

Origins origins_at(const wire::LowLatencyLayout& layout, uint32_t tokens, const HandleTensors& handle) {
    return Origins::at(layout, tokens, pointer<i32>(handle.src_info), pointer<i64>(handle.ranges),
                       pointer<u32>(handle.places));
}

}  // namespace

uint64_t region_bytes(const Sizes& sizes, uint32_t ranks, bool has_remote) {
    const wire::LowLatencyLayout layout = layout_of(sizes, ranks, has_remote);
    return std::max(layout.dispatch_bytes(), layout.combine_bytes());
}

uint64_t places_words(const Sizes& sizes, uint32_t ranks, uint32_t tokens) {
    return Origins::places_words(layout_of(sizes, ranks, false), tokens);
}

uint64_t put_bytes(const Runtime& runtime, const Sizes& sizes) {
    if (!runtime.options().has_remote) return 0;
    const wire::LowLatencyLayout layout = layout_of(runtime, sizes);
    return std::max(
        {layout.routing_bytes(layout.max_tokens),
         std::min(layout.tokens_per_put(), layout.max_tokens) * layout.row_bytes(),
         sizeof(wire::ResultHeader) + layout.max_results_of_rank() * (layout.result_bytes + layout.rest_bytes)});
}

uint64_t max_put_bytes(const Runtime& runtime, const Sizes& sizes) {
    return runtime.max_put_bytes(sizes.logfmt ? fabric::kMaxPieces : fabric::kUsualPieces);
}

bool fits_shared_memory(const Runtime& runtime, const Sizes& sizes) {
    const Launcher& launcher = runtime.launcher();
    const BlockSizes block{static_cast<u32>(runtime.options().ranks),
                           sizes.experts,
                           sizes.topk,
                           launcher.warps(),
                           launcher.copies_bytes(),
                           static_cast<u32>(runtime.options().ranks_per_node)};
    return std::max(DispatchKernel::shared_bytes(block), CombineKernel::shared_bytes(block)) <=
           launcher.max_shared_bytes();
}

std::shared_ptr<Call> dispatch(Runtime& runtime, const Sizes& sizes, uint32_t tokens, const DispatchTensors& tensors,
                               const HandleTensors& handle, const Launches& launches) {
    auto call = runtime.open(wire::Kind::kLowLatencyDispatch);
    DispatchArgs args{};
    args.layout = layout_of(runtime, sizes);
    args.shape = shape_of(args.layout, sizes);
    args.arguments = hash_of(*call, sizes, 0);
    args.tokens = tokens;
    args.streaming = streams(runtime, args.layout, args.layout.x_bytes, tokens);
    args.scales = sizes.scales;
    args.experts_per_rank = Divider::by(args.layout.experts_per_rank);
    args.x = pointer<const u8>(tensors.x);
    args.topk_idx = ExpertIds::at(pointer<const void>(tensors.topk_idx), sizes.id_bytes);
    args.topk_weights = pointer<const float>(tensors.topk_weights);
    args.wrong_id = runtime.remark();
    args.recv_x = pointer<u8>(tensors.recv_x);
    args.recv_scales = pointer<u32>(tensors.recv_scales);
    args.scales_stride = tensors.scales_stride;
    args.recv_count = pointer<i32>(tensors.recv_count);
    args.origins = origins_at(args.layout, tokens, handle);
    args.stats = pointer<i32>(tensors.stats);
    args.waited_ns = pointer<i64>(tensors.waited_ns);
    return begin<DispatchKernel>(runtime, std::move(call), args, args.layout.forwards_rows(), launches);
}

std::shared_ptr<Call> combine(Runtime& runtime, const Sizes& sizes, uint32_t tokens, const CombineTensors& tensors,
                              const HandleTensors& handle, uint64_t number, const Launches& launches) {
    auto call = runtime.open(wire::Kind::kLowLatencyCombine);
    CombineArgs args{};
    args.layout = layout_of(runtime, sizes);
    args.shape = shape_of(args.layout, sizes);
    args.arguments = hash_of(*call, sizes, number);
    args.tokens = tokens;
    args.streaming = streams(runtime, args.layout, args.layout.result_bytes, tokens);
    args.x = pointer<const u8>(tensors.x);
    args.topk_idx = ExpertIds::at(pointer<const void>(tensors.topk_idx), sizes.id_bytes);
    args.origins = origins_at(args.layout, tokens, handle);
    args.topk_weights = sizes.weighted ? args.origins.own_weights : pointer<const float>(tensors.topk_weights);
    const uint64_t rows = uint64_t{args.layout.experts_per_rank} * args.layout.ranks * args.layout.max_tokens;
    const bool visible = runtime.arena()->contains(args.x, rows * args.layout.result_bytes);
    args.published = tensors.publish && visible && !sizes.logfmt ? runtime.offset_of(tensors.x) : wire::kUnpublished;
    args.combined_x = pointer<u8>(tensors.combined_x);
    args.waited_ns = pointer<i64>(tensors.waited_ns);
    return begin<CombineKernel>(runtime, std::move(call), args, args.layout.sums_remotely(), launches);
}

bool forwards(const Call& call) {
    const auto* rest = std::any_cast<Rest>(&call.mode);
    return rest != nullptr && rest->forward != nullptr;
}

uint64_t forward(Runtime& runtime, Call& call) {
    if (!forwards(call)) throw std::logic_error("forward: expected a call that still has rows or sums to forward");
    std::any_cast<Rest>(&call.mode)->forward(runtime, call);
    return call.serial;
}

void finish(Runtime& runtime, Call& call) {
    const auto* rest = std::any_cast<Rest>(&call.mode);
    if (rest == nullptr) throw std::logic_error("finish: expected a call with only its first half launched");
    rest->finish(runtime, call);
    call.mode.reset();
    runtime.note_graph(call);
}

}  // namespace deep_ep::host::low_latency
