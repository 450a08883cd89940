// The calls of normal mode: from sizes and addresses to the launches of each. No tensors.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "host/session/runtime.h"
#include "kernels/normal/plan.h"

namespace deep_ep::host::normal {

// Addresses of what a dispatch reads and writes; 0 where a tensor is not given. Their shapes: DispatchArgs.
struct DispatchTensors {
    uint64_t x = 0, scales = 0, topk_idx = 0, topk_weights = 0;
    std::array<int64_t, 2> scales_stride{};  // from token to token, from scale to scale, in scales
    uint64_t recv_x = 0, recv_scales = 0, recv_topk_idx = 0, recv_topk_weights = 0, recv_src_idx = 0;
};

// The same for a combine.
struct CombineTensors {
    uint64_t x = 0, topk_weights = 0, src_idx = 0;
    uint64_t combined_x = 0, combined_weights = 0;
    std::array<uint64_t, 2> bias{};
};

// Sizes that kernels specialise on, the tokens of this call, and what is the same on all ranks besides.
struct Sizes {
    uint32_t tokens;
    uint32_t row_bytes;
    uint32_t topk;                    // 0: no top-k
    uint32_t experts;                 // 0: not known here
    uint32_t id_bytes = sizeof(i64);  // of an expert id
    uint32_t scales = 0;              // per row, 4 bytes each
    uint32_t types = 0;               // of rows and scales: the caller's code, compared among ranks
};

// Bytes of one region that a dispatch or combine of these sizes needs at the least.
uint64_t min_region_bytes(const Runtime& runtime, const Sizes& sizes);
// Bytes of the largest message that they need at the least, and of the largest that the networks take.
std::pair<uint64_t, uint64_t> put_bytes(const Runtime& runtime, const Sizes& sizes);

// Of a rank: as many as a call has words for.
constexpr uint32_t kMaxExperts = 2048;
constexpr uint32_t kCallWords = kMaxExperts;  // BufferOptions::call_words

// This Buffer's ranks, or fewer: for how many a block's shared memory suffices, with so many experts.
uint32_t max_ranks(const Runtime& runtime, uint32_t experts);

// -> the launch's serial number. No operation: it has to do with no other rank. `tokens_per_node`: 0, not counted.
uint64_t layout(Runtime& runtime, const Sizes& sizes, uint64_t topk_idx, uint64_t tokens_per_rank,
                uint64_t tokens_per_node, uint64_t tokens_per_expert, uint64_t is_token_in_rank, unsigned blocks);
// `max_rows`: that any rank may receive, 0: as many as there are. `finish_later`: other operations may begin or be
// finished before this one is; counts() comes first then.
std::shared_ptr<Call> notify(Runtime& runtime, const Sizes& sizes, uint64_t is_token_in_rank,
                             uint64_t tokens_per_expert, const Plan& plan, uint32_t max_rows, bool finish_later,
                             unsigned blocks);
void counts(Call& call);
// counts() is still to come.
bool lacks_counts(const Call& call);
// After Runtime::wait_counts: rows received, in all and for each expert of this rank.
int32_t total_rows(const Call& call);
// The same in two hops: node rows that this rank forwards, its own among them.
int32_t forwarded_rows(const Call& call);
std::vector<int32_t> rows_per_expert(const Call& call);
// An operation whose counts are known: cached dispatch, combine. `handle`: the operation that the counts are from.
std::shared_ptr<Call> notify_cached(Runtime& runtime, wire::Kind kind, const Sizes& sizes, uint64_t handle);
// -> whether every mapped rank stores its rows straight into this rank's output (dispatch), or reads this rank's
// rows in place (combine).
bool dispatch(Runtime& runtime, Call& call, const Sizes& sizes, const DispatchTensors& tensors, const Plan& plan,
              uint32_t rows, bool cached, unsigned blocks);
// `publish`: let owners read this rank's rows where they are, if they can; else they are sent.
bool combine(Runtime& runtime, Call& call, const Sizes& sizes, const CombineTensors& tensors, const Plan& plan,
             uint32_t rows, bool publish, unsigned blocks);

}  // namespace deep_ep::host::normal
