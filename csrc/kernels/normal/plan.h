// Where the rows of a dispatch go and come from, as stored in handles.
#pragma once

#include "wire/types.h"

namespace deep_ep {

// Where this rank's rows go and where the others' rows come from. Written by notify. Device pointers.
struct Plan {
    i32* token_row;      // [tokens, ranks] index of a token among this rank's tokens for that rank; -1: none
    i32* row_token;      // [ranks, tokens] the inverse: the token at an index
    i32* rank_prefix;    // [ranks, ranks] [i][j]: rows that ranks <= i send to rank j
    i32* source_tokens;  // [ranks] number of tokens of each rank
    i32* rows_to_rank;   // [ranks] rows this rank sends to each rank
};

}  // namespace deep_ep
