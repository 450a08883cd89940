// The calls of normal mode: turns sizes and addresses into launches. No tensors.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "host/session/runtime.h"
#include "kernels/normal/plan.h"

namespace deep_ep::host::normal {

// Addresses of the tensors that a dispatch reads and writes; 0: not given. For their shapes see DispatchArgs.
struct DispatchTensors {
    uint64_t x = 0, scales = 0, topk_idx = 0, topk_weights = 0;
    std::array<int64_t, 2> scales_stride{};  // between tokens and between scales, in scales
    uint64_t recv_x = 0, recv_scales = 0, recv_topk_idx = 0, recv_topk_weights = 0, recv_src_idx = 0;
    uint32_t source_words = 1;  // in one hop: of recv_src_idx, per row
    // In one hop: where this rank's choices are numbered, if peers may offer expanded layouts; and the rows of this
    // rank's, if recv_x is that layout and recv_topk_idx takes slots, 32 bits each. All outputs are then in the arena.
    uint64_t ordinals = 0;
    uint32_t expanded_rows = 0;
};

// The same for a combine.
struct CombineTensors {
    uint64_t x = 0, topk_weights = 0, src_idx = 0;
    uint64_t combined_x = 0, combined_weights = 0;
    std::array<uint64_t, 2> bias{};
    uint32_t source_words = 1;  // in one hop: of src_idx, per row
    // Sum in the order of the tokens' choices, see CombineArgs; `choices` 0: in rank order. In one hop only.
    uint64_t topk_idx = 0;
    uint32_t choices = 0, id_bytes = sizeof(i64), experts = 0;
};

// Where notify stores what this rank receives; addresses, 0: not stored. For their meaning see ReceivedCounts.
struct CountTensors {
    uint64_t rank_sums = 0, expert_sums = 0, expert_rows = 0, statistics = 0;
    uint32_t alignment = 1;
    bool expanded = false;
    bool starts = false;  // find where sources' rows begin in the expanded layout, which this rank may offer
};

// Sizes for which kernels are specialized, the tokens of this call, and other values that are the same on all ranks.
struct Sizes {
    uint32_t tokens;
    uint32_t row_bytes;
    uint32_t topk;                    // 0: no top-k
    uint32_t experts;                 // 0: not known here
    uint32_t id_bytes = sizeof(i64);  // of an expert id
    uint32_t scales = 0;              // per row, 4 bytes each
    uint32_t types = 0;               // of rows and scales: the caller's code, compared across ranks
    bool weights = true;              // whether each of a token's choices has a weight
    uint32_t expands = 0;             // whether outputs are expanded, and whether by senders: the caller's code
};

// Minimum size in bytes of a region for a dispatch or combine of these sizes.
uint64_t min_region_bytes(const Runtime& runtime, const Sizes& sizes);
// Bytes of the largest message that they need at a minimum, and of the largest one that the networks accept.
std::pair<uint64_t, uint64_t> put_bytes(const Runtime& runtime, const Sizes& sizes);

// Per rank: limited by the words of a call.
constexpr uint32_t kMaxExperts = 2048;
constexpr uint32_t kCallWords = kMaxExperts;  // BufferOptions::call_words

// Returns the largest number of ranks, at most this Buffer's, for which the shared memory of a thread block suffices
// with `experts` experts.
uint32_t max_ranks(const Runtime& runtime, uint32_t experts);

// Returns the serial number of the launch. Not an operation, since no other rank is involved. `tokens_per_node`: 0: not
// counted. `zero_words`: [1 + ranks + nodes + experts] words that are zero and stay so, of which no other launch uses
// any at the same time; 0: those of the runtime.
uint64_t layout(Runtime& runtime, const Sizes& sizes, uint64_t topk_idx, uint64_t tokens_per_rank,
                uint64_t tokens_per_node, uint64_t tokens_per_expert, uint64_t is_token_in_rank, unsigned blocks,
                uint64_t zero_words = 0);
// `max_rows`: the maximum that any rank may receive; 0: unlimited. `finish_later`: other operations may be begun or
// finished before this one is finished, which then requires counts() first. `checked_ids`: the ids that are sent, for
// the kernel to check that the layout is of them; none: it is known to be.
std::shared_ptr<Call> notify(Runtime& runtime, const Sizes& sizes, uint64_t is_token_in_rank,
                             uint64_t tokens_per_expert, std::optional<uint64_t> checked_ids, const Plan& plan,
                             const CountTensors& counts, uint32_t max_rows, bool finish_later, unsigned blocks);
void counts(Call& call);
// Whether counts() has yet to be called.
bool lacks_counts(const Call& call);
// After Runtime::wait_counts: rows received, in total and by expert of this rank.
int32_t total_rows(const Call& call);
// The same in two hops: node rows that this rank forwards, including its own.
int32_t forwarded_rows(const Call& call);
std::vector<int32_t> rows_per_expert(const Call& call);
// Opens the call of an operation whose counts are known: cached dispatch or combine. The next function below, which
// launches its only kernel, must follow before the next operation is begun. `handle`: the operation that counted.
std::shared_ptr<Call> open(Runtime& runtime, wire::Kind kind, const Sizes& sizes, uint64_t handle);
// Both return whether every mapped rank stores its rows directly to this rank's output (dispatch) or reads this rank's
// rows in place (combine).
bool dispatch(Runtime& runtime, Call& call, const Sizes& sizes, const DispatchTensors& tensors, const Plan& plan,
              uint32_t rows, bool cached, unsigned blocks);
// `publish`: let owners read this rank's rows in place, if they can; otherwise the rows are sent.
bool combine(Runtime& runtime, Call& call, const Sizes& sizes, const CombineTensors& tensors, const Plan& plan,
             uint32_t rows, bool publish, unsigned blocks);

}  // namespace deep_ep::host::normal
