// Where the rows of a dispatch go and come from, as stored in handles.
#pragma once

#include "wire/types.h"

namespace deep_ep {

// Where this rank's rows go and where the others' rows come from. Written by notify. Device pointers; kernels do not
// read the last four, which are for callers: null where a handle does not have them, token_node also without tokens.
struct Plan {
    i32* token_row;                 // [tokens, ranks] index of a token among this rank's tokens for that rank; -1: none
    i32* row_token;                 // [ranks, tokens] the inverse: the token at an index
    i32* rank_prefix;               // [ranks, ranks] [i][j]: rows that ranks <= i send to rank j
    i32* source_tokens;             // [ranks] number of tokens of each rank
    i32* rows_to_rank;              // [ranks] rows this rank sends to each rank
    i32* rank_begin = nullptr;      // [ranks] where each source's rows begin among those that this rank receives
    i32* rank_end = nullptr;        // [ranks] where they end
    i32* token_node = nullptr;      // [tokens, nodes] index of a token among this rank's tokens for that node; -1: none
    i32* tokens_to_node = nullptr;  // [nodes] tokens of this rank for each node
};

}  // namespace deep_ep
