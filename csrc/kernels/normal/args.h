// Arguments of normal mode's kernels: one plain struct each, copied at launch. Pointers are device pointers.
#pragma once

#include "kernels/common/context.h"
#include "kernels/common/divider.h"
#include "kernels/common/expert_ids.h"
#include "kernels/common/shape.h"
#include "wire/messages.h"

namespace deep_ep {

struct LayoutArgs {
    RuntimeShape shape;
    Divider experts_per_rank;
    u32 tokens;
    u32 experts;
    ExpertIds topk_idx;      // [tokens, topk] expert ids, -1: none
    i32* tokens_per_rank;    // [ranks] zeroed by the host
    i32* tokens_per_expert;  // [experts] zeroed by the host
    u8* is_token_in_rank;    // [tokens, ranks]
    i64* wrong_id;           // host-visible: an id that is neither -1 nor an expert's
};

// Where this rank's rows go and where the others' rows come from. Written by notify, kept in the handle.
struct Plan {
    i32* token_row;      // [tokens, ranks] index of a token among this rank's tokens for that rank, or -1
    i32* row_token;      // [ranks, tokens] the inverse: the token at an index
    i32* rank_prefix;    // [ranks, ranks] [i][j]: rows that ranks <= i send to rank j
    i32* source_tokens;  // [ranks] tokens of each rank
};

struct NotifyArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::RegionLayout layout;
    u64 arguments;  // hash of what all ranks must agree on
    u32 tokens;
    u32 most_rows;                 // that any rank may receive, the same on all; 0: no limit
    u32 finish_later;              // the peers' counts are not waited for yet: `counts` follows
    const u8* is_token_in_rank;    // [tokens, ranks]
    const i32* tokens_per_expert;  // [experts], null where there is no top-k
    Plan plan;
    i32* rows_to_rank;     // [ranks] rows this rank sends to each
    i32* rows_per_expert;  // [experts / ranks] host-visible: rows received for each local expert
    u64 heap_bytes;        // what this rank announces of its heap (P10)
    u64* heaps;            // [ranks] host-visible: what each rank has announced; null where the host does not wait
};

struct NotifyCachedArgs {
    CallArgs call;
    wire::Kind kind;
    u64 arguments;
};

struct DispatchArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::RegionLayout layout;
    u32 tokens;
    u32 experts_per_rank;
    u32 streaming;              // rows are stored past the caches
    u32 rows;                   // of the output: as many as come, or more
    const u8* x;                // [tokens, row_bytes]
    const u32* scales;          // [tokens, scales], of whatever 4 bytes; null: rows have none
    i64 scales_stride[2];       // from token to token, from scale to scale, in scales
    u32 scales_in_pieces;       // each token's lie side by side and can be copied 16 bytes at a time, there and here
    ExpertIds topk_idx;         // [tokens, topk], null: rows carry no top-k
    const float* topk_weights;  // [tokens, topk], null with topk_idx
    Plan plan;
    wire::Offer offer;         // where the output lies, if peers can see it
    u8* recv_x;                // [rows, row_bytes]
    u32* recv_scales;          // [rows, scales]
    ExpertIds recv_topk_idx;   // [rows, topk] local expert ids, -1: not of this rank
    float* recv_topk_weights;  // [rows, topk]
    i32* recv_src_idx;         // [rows] token index at the source; null in cached dispatch
};

struct CombineArgs {
    CallArgs call;
    RuntimeShape shape;
    wire::RegionLayout layout;
    u32 tokens;
    u32 rows;                   // received in dispatch, or more
    const u8* x;                // [rows, row_bytes]
    const float* topk_weights;  // [rows, topk], null: no weights are combined
    const i32* src_idx;         // [rows] token index at the owner
    Plan plan;
    wire::Offer offer;        // where x and topk_weights lie, if peers can see them
    u8* combined_x;           // [tokens, row_bytes]
    float* combined_weights;  // [tokens, topk]
    const u8* bias[2];        // [tokens, row_bytes] or null
};

}  // namespace deep_ep
