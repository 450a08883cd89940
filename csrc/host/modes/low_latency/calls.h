// The calls of low-latency mode: turns sizes and addresses into launches. No tensors.
#pragma once

#include <memory>

#include "device/fp8_scales.h"
#include "host/session/runtime.h"
#include "kernels/low_latency/origins.h"

namespace deep_ep::host::low_latency {

// The sizes that are the same on all ranks.
struct Sizes {
    uint32_t max_tokens;  // of a rank
    uint32_t hidden;      // elements of a row, bfloat16
    uint32_t topk;
    uint32_t experts;                 // of all ranks
    uint32_t id_bytes = sizeof(i64);  // of an expert id
    Scales scales = Scales::kNone;    // not kNone: rows travel as e4m3
    bool logfmt = false;              // results travel as LogFMT; then hidden is a multiple of kLogGroup
    uint32_t per_node = 1;            // ranks of a node to which rows are sent once: wire/low_latency.h
    bool weighted = false;            // the dispatch has the weights
};

// How a call is launched. `whole`: in one launch. Otherwise only its sending half is launched; `forward` later launches
// the part that waits for other ranks' rows and forwards them, with `forward_blocks`, and `finish` the last part.
struct Launches {
    bool whole;
    unsigned blocks;
    unsigned forward_blocks;
};

// Addresses of the tensors that a dispatch reads and writes; 0: not given. For their shapes see DispatchArgs.
struct DispatchTensors {
    uint64_t x = 0, topk_idx = 0, topk_weights = 0, recv_x = 0, recv_scales = 0, recv_count = 0, stats = 0;
    uint64_t waited_ns = 0;
    uint32_t scales_stride = 0;
};

// The same for a combine. `publish`: let mapped ranks read x in place, if they can; the call ends when they have.
struct CombineTensors {
    uint64_t x = 0, topk_idx = 0, topk_weights = 0, combined_x = 0, waited_ns = 0;
    bool publish = false;
};

// Bytes of one region that a dispatch and its combine need among `ranks` ranks. `has_remote`: some are not mapped.
uint64_t region_bytes(const Sizes& sizes, uint32_t ranks, bool has_remote);
// The number of 4-byte words that a handle keeps in addition to its two tensors.
uint64_t places_words(const Sizes& sizes, uint32_t ranks, uint32_t tokens);
// Bytes of the largest message that they send to a rank that is not mapped; 0: there is none. And the maximum that the
// networks accept.
uint64_t put_bytes(const Runtime& runtime, const Sizes& sizes);
uint64_t max_put_bytes(const Runtime& runtime, const Sizes& sizes);
// Whether the shared memory of a thread block suffices.
bool fits_shared_memory(const Runtime& runtime, const Sizes& sizes);

// Addresses of the data that a dispatch leaves for its combine: the two tensors of a handle and its places_words().
struct HandleTensors {
    uint64_t src_info = 0, ranges = 0, places = 0;
};

std::shared_ptr<Call> dispatch(Runtime& runtime, const Sizes& sizes, uint32_t tokens, const DispatchTensors& tensors,
                               const HandleTensors& handle, const Launches& launches);
// `number`: that of the dispatch.
std::shared_ptr<Call> combine(Runtime& runtime, const Sizes& sizes, uint32_t tokens, const CombineTensors& tensors,
                              const HandleTensors& handle, uint64_t number, const Launches& launches);
// Whether the call has a launch that only forwards, which forward() is to make. Returns its serial number.
bool forwards(const Call& call);
uint64_t forward(Runtime& runtime, Call& call);
void finish(Runtime& runtime, Call& call);

}  // namespace deep_ep::host::low_latency
