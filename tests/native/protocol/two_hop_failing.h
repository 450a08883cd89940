// The parts of failing.h for two hops: a forwarder sums rows that others of its node publish, and sends the sums to an
// owner in another node, which learns of failures late.
#pragma once

#include "failing.h"
#include "two_hop_tokens.h"

namespace protocol::two_hop_mode {

class Batch : public Dispatched {
  public:
    static constexpr u32 kHidden = two_hop_mode::kHidden;

    // The last rank has the most tokens; rank 1, which forwards for it, has few, and rank 0 none.
    Batch(Buffer& buffer, u32 lap) : Dispatched(buffer, lap + 1) {}
    ~Batch() { settle(); }

    void dispatch(host::Call& call) {
        Dispatched::dispatch(call, buffer_.setup.arena);
        recv_x = Output(runtime(), buffer_.setup.arena, u64{count()} * kRowBytes);
    }
    Output make_sums() { return {runtime(), false, u64{tokens_} * kRowBytes}; }
    std::shared_ptr<host::Call> combine(Buffer&, const Output& rows, const Output& sums) {
        host::normal::CombineTensors tensors;
        tensors.x = rows.address();
        tensors.combined_x = sums.address();
        return Dispatched::combine(tensors);
    }
    // As in the other Batch: for values whose sums are exact.
    template <class Value>
    void check_sums(const Output& sums, Value value) const {
        for (u32 t = 0; t < tokens_; ++t) {
            for (u32 h = 0; h < kHidden; ++h) {
                u32 sum = 0;
                for (u32 to = 0; to < routing_.ranks; ++to) sum += routing_.goes(rank_, t, to) ? value(to, t, h) : 0;
                expect(sums.as<u16>()[t * kHidden + h] == bf16(sum),
                       whose() + "sum of token " + std::to_string(t) + " is wrong");
            }
        }
    }
    void check_guards() const { recv_x.check(whose()); }

    Output recv_x;  // the user's results from the received rows
};

}  // namespace protocol::two_hop_mode
