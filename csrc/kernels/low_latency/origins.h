// State that a low-latency dispatch leaves for its combine.
#pragma once

#include "wire/low_latency.h"

namespace deep_ep::low_latency {

// Device pointers, written by the dispatch. The caller may have modified the memory since.
struct Origins {
    i32* tokens;        // [experts of this rank, ranks * max_tokens] token of a row, as an index at its source
    i64* ranges;        // [experts of this rank, ranks] where a source's rows begin; in the lower half, their number
    u32* positions;     // wire::position, indexed as `tokens`
    u32* first_result;  // [ranks] where the results for a rank that is not mapped begin, at that rank
    u32* own_slots;     // [tokens, topk] wire::position of the result of each of this rank's choices, or kNoPosition

    // Only if the dispatch was given the weights. For this rank's own tokens:
    float* own_weights;  // [tokens, topk]
    u32* sum_slots;      // [nodes, tokens] index of a token's sum among those from a node, or kNoPosition
    // For the source in each other node for which this rank forwards, all of its choices:
    u32* forwarded_tokens;     // [nodes] number of its tokens
    u32* forwarded_ids;        // [nodes, max_tokens, topk] expert ids, or wire::kNoExpert
    float* forwarded_weights;  // likewise

    // `places` is memory of places_words() words.
    static Origins at(const wire::LowLatencyLayout& layout, u32 tokens, i32* src_info, i64* ranges, u32* places) {
        Origins origins{};
        origins.tokens = src_info;
        origins.ranges = ranges;
        const Words words = Words::of(layout, tokens);
        origins.positions = places;
        origins.first_result = origins.positions + words.positions;
        origins.own_slots = origins.first_result + layout.ranks;
        if (layout.weighted == 0) return origins;
        origins.own_weights = reinterpret_cast<float*>(origins.own_slots + words.choices);
        origins.sum_slots = origins.own_slots + 2 * words.choices;
        origins.forwarded_tokens = origins.sum_slots + words.sum_slots;
        origins.forwarded_ids = origins.forwarded_tokens + layout.nodes();
        origins.forwarded_weights = reinterpret_cast<float*>(origins.forwarded_ids + words.forwarded);
        return origins;
    }
    static u64 places_words(const wire::LowLatencyLayout& layout, u32 tokens) {
        const Words words = Words::of(layout, tokens);
        const u64 usual = words.positions + layout.ranks + words.choices;
        const u64 weighted = words.choices + words.sum_slots + layout.nodes() + 2 * words.forwarded;
        return usual + (layout.weighted != 0 ? weighted : 0);
    }

  private:
    struct Words {
        u64 positions, choices, sum_slots, forwarded;

        static Words of(const wire::LowLatencyLayout& layout, u32 tokens) {
            return {u64{layout.ranks} * layout.experts_per_rank * layout.max_tokens, u64{tokens} * layout.topk,
                    u64{layout.nodes()} * tokens, layout.nodes() * layout.max_results()};
        }
    };
};

}  // namespace deep_ep::low_latency
