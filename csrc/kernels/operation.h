// A call in progress, as one block sees it: its number, its words, bounded waits, giving up together (PROTOCOL P1 to
// P8, P14, P15).
#pragma once

#include "fabric/fabric.h"
#include "kernels/context.h"
#include "wire/messages.h"

namespace deep_ep {

using wire::Phase;

// Shared memory of a block. `groups` are sets of warps with a barrier of their own; group 0 is the whole block.
struct BlockState {
    static constexpr u32 kGroups = 2;
    u32 gave_up;            // some thread of this block gave up: all leave at the next meeting
    u32 decision[kGroups];  // what a group agreed on at its last meeting
    u32 is_last;
};

// One thread of a warp found something; all lanes go on with it, ordered behind that thread's loads (a shuffle orders
// nothing).
DEEP_EP_DEVICE int broadcast(int value) {
    __syncwarp();
    return __shfl_sync(device::kFullMask, value, 0);
}

class Operation {
  public:
    DEEP_EP_DEVICE Operation(const CallArgs& call, BlockState* block)
        : context_(*call.context),
          ticket_(*call.ticket),
          outcome_(*call.outcome),
          block_(*block),
          timeout_ns_(call.timeout_ns) {}

    // The whole block, first of all. A kernel that starts with the abort word set leaves at once (P14).
    DEEP_EP_DEVICE bool enter() {
        if (threadIdx.x == 0) {
            block_.gave_up = 0;
            if (must_leave()) give_up(Phase::kNone, -1, 0, 0);
        }
        read_number();
        return meet();
    }

    // One thread of an operation's first kernel: takes the number. Other kernels of this Buffer are ordered before and
    // after by their launches, so plain accesses do.
    DEEP_EP_DEVICE void take_number(wire::Kind kind, u64 arguments) {
        ticket_.operation = context_.operation;
        ticket_.use = ticket_.operation / heap().regions;
        ticket_.region = static_cast<u32>(ticket_.operation % heap().regions);
        ticket_.arguments = arguments;
        context_.operation = ticket_.operation + 1;
        outcome_.operation = ticket_.operation;
        // Hosts of other ranks load it to compare with their own; nothing else has to be visible with it.
        device::store_relaxed<Scope::kSystem>(&reinterpret_cast<wire::HeapHeader*>(peers().local)->announcement,
                                              wire::announcement(ticket_.operation, kind, arguments));
    }
    // All threads, after the barrier that follows take_number().
    DEEP_EP_DEVICE void read_number() {
        number_ = ticket_.operation;
        region_ = ticket_.region;
        arguments_ = ticket_.arguments;
    }

    DEEP_EP_DEVICE u64 number() const { return number_; }
    DEEP_EP_DEVICE u64 arguments() const { return arguments_; }
    DEEP_EP_DEVICE const fabric::Peers& peers() const { return context_.peers; }
    DEEP_EP_DEVICE u32 rank() const { return context_.peers.rank; }
    DEEP_EP_DEVICE u32 ranks() const { return context_.peers.ranks; }
    DEEP_EP_DEVICE const Context& context() const { return context_; }
    // False for a rank that was left out when the Buffer recovered: it is neither sent to nor waited for (P17).
    DEEP_EP_DEVICE bool present(u32 rank) const { return (context_.mask >> rank & 1) == 0; }
    // Present, and reached by loads and stores.
    DEEP_EP_DEVICE bool mapped(u32 rank) const { return present(rank) && fabric::mapped(peers(), rank); }

    // --- places
    // -----------------------------------------------------------------------------------------------------------------
    DEEP_EP_DEVICE u32 region() const { return region_; }
    DEEP_EP_DEVICE u64 region_offset() const { return heap().region_offset(region()); }
    DEEP_EP_DEVICE u8* local_region() const { return peers().local + region_offset(); }
    DEEP_EP_DEVICE const u64* word(u32 kind, u32 source) const {
        return reinterpret_cast<const u64*>(peers().local + heap().word_offset(region(), kind, source));
    }
    // The value of a word once `puts` puts of this operation have arrived (P7).
    DEEP_EP_DEVICE u64 target(u32 kind, u32 source, u64 puts) const {
        return context_.base[wire::word_index(region(), kind, source, ranks())] + puts * wire::kUnit;
    }
    // Ends this operation's use of a word. Only after every block has finished waiting on it.
    DEEP_EP_DEVICE void consume(u32 kind, u32 source, u64 puts) {
        context_.base[wire::word_index(region(), kind, source, ranks())] += puts * wire::kUnit;
    }

    // --- failing
    // ----------------------------------------------------------------------------------------------------------------
    // True once this block has given up: from then on nothing is stored, signalled, offered or freed (P14).
    DEEP_EP_DEVICE bool failed() const { return device::load_relaxed<Scope::kBlock>(&block_.gave_up) != 0; }

    // One thread: gives up. `told`: the abort word, where that is the reason.
    DEEP_EP_DEVICE_CALL void fail(wire::Reason reason, Phase phase, i32 peer, u64 expected, u64 seen, u64 told = 0) {
        // The first to give up writes the record; the host reads it after the kernel has ended, or once it sees
        // `reason`.
        if (device::cas_acq_rel<Scope::kDevice>(&ticket_.claimed, 0u, 1u) == 0) {
            outcome_.failure.phase = static_cast<u32>(phase);
            outcome_.failure.peer = peer;
            outcome_.failure.expected = expected;
            outcome_.failure.seen = seen;
            outcome_.failure.cause = wire::abort_reason(told);
            outcome_.failure.cause_peer = wire::abort_peer(told);
            device::store_release<Scope::kSystem>(&outcome_.failure.reason, static_cast<u32>(reason));
        }
        // Hints that end waits early; what follows from them is decided at a meeting, so no order is needed.
        device::store_relaxed<Scope::kDevice>(&ticket_.failed, 1u);
        device::store_relaxed<Scope::kBlock>(&block_.gave_up, 1u);
    }

    // --- waiting
    // ----------------------------------------------------------------------------------------------------------------
    // One thread: refuses a message that is not of this very operation, before anything it says is used.
    DEEP_EP_DEVICE bool check_message(Phase phase, u32 source, u64 operation, u64 arguments) {
        if (operation == number_ && arguments == arguments_) return true;
        const bool other = operation != number_;
        fail(wire::kMismatch, other ? phase : Phase::kHeader, static_cast<i32>(source), other ? number_ : arguments_,
             other ? operation : arguments);
        return false;
    }

    // One thread: waits until `ready()` returns true. Bounded: false once the operation has to be given up.
    template <class Ready>
    DEEP_EP_DEVICE bool wait(Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        if (failed()) return false;
        if (ready()) return true;
        const device::WaitNote note{wire::phase_name(phase), peer, expected, shown};
        bool arrived = false;
        const fabric::QueuePair* broken = nullptr;
        device::spin_until(
            [&] {
                arrived = ready();
                return arrived || failed() || must_leave();
            },
            [&] { return (broken = fabric::failed_queue_pair(peers())) != nullptr; }, device::now_ns() + timeout_ns_,
            &note);
        if (arrived) return true;
        if (broken != nullptr) {
            fail_for(*broken, phase);
            return false;
        }
        give_up(phase, peer, expected, device::load_relaxed<Scope::kSystem>(shown));
        return false;
    }

    // One thread: waits until a word of this rank's memory has reached `expected`. The acquire pairs with the release
    // of whoever adds to it (a peer's kernel, an agent, a NIC): what that side ordered before its signal is visible
    // afterwards.
    DEEP_EP_DEVICE_CALL bool wait_word(Phase phase, i32 peer, const u64* shown, u64 expected) {
        return wait(phase, peer, shown, expected,
                    [&] { return device::load_acquire<Scope::kSystem>(shown) >= expected; });
    }
    DEEP_EP_DEVICE bool wait_signal(Phase phase, u32 kind, u32 source, u64 puts) {
        return wait_word(phase, static_cast<i32>(source), word(kind, source), target(kind, source, puts));
    }

    // The whole block: every rank has given back its region's use before this one, so it may be stored into (P4).
    DEEP_EP_DEVICE bool await_free() {
        const u64 uses = ticket_.use;
        for (u32 r = threadIdx.x; r < ranks(); r += blockDim.x) {
            if (present(r)) wait_word(Phase::kFree, static_cast<i32>(r), word(wire::kFree, r), uses * wire::kUnit);
        }
        return meet();
    }

    // --- meeting
    // ----------------------------------------------------------------------------------------------------------------
    // The whole block: a barrier, and all leave it with the same answer to "shall we go on?" (P14).
    DEEP_EP_DEVICE bool meet() {
        __syncthreads();
        if (threadIdx.x == 0) block_.decision[0] = failed();
        __syncthreads();  // nobody gives up in between unless it waits, and waits come after
        return block_.decision[0] == 0;
    }

    // The same for the first or last `threads` threads of the block; `leader` is one of them. Another group may give up
    // at any time, so one thread decides for all.
    DEEP_EP_DEVICE bool meet_group(u32 threads, bool leader) {
        device::barrier_sync(1, threads);
        if (leader) block_.decision[1] = failed();
        device::barrier_sync(1, threads);
        return block_.decision[1] == 0;
    }

    // The whole block: true in the last block of the kernel to come here, which then sees what the others stored before
    // (the acquire of the last arrival reads from their releases). A block that has given up does not come: the counter
    // is never completed (P14). Litmus: count_by_atomics.
    DEEP_EP_DEVICE bool last_block(Meeting meeting) {
        __syncthreads();
        if (threadIdx.x == 0) {
            block_.is_last = device::add_acq_rel<Scope::kDevice>(&ticket_.blocks_met[meeting], 1u) == gridDim.x - 1;
        }
        __syncthreads();
        return block_.is_last != 0;
    }

    // --- sending
    // ----------------------------------------------------------------------------------------------------------------
    // One thread: adds one unit to this rank's word of `kind` at `to`.
    DEEP_EP_DEVICE bool signal(u32 to, u32 kind) {
        return !failed() &&
               fabric::signal(peers(), *this, ticket_.completion, to, heap().word_offset(region(), kind, rank()));
    }
    // A warp: puts pieces into `to`'s heap, then signals. Offsets as in fabric::Piece.
    DEEP_EP_DEVICE bool put_signal(u32 to, u32 kind, const fabric::Piece* pieces, u32 count) {
        // Another warp may give up at any time: one lane decides, or the rest would wait for those that left.
        if (!broadcast(!failed())) return false;
        return fabric::put_signal(peers(), *this, ticket_.completion, to, pieces, count,
                                  heap().word_offset(region(), kind, rank()));
    }

    // The last block, when every word of the operation has been waited for and consumed: gives the region back to
    // everyone (P4).
    DEEP_EP_DEVICE void finish() {
        if (threadIdx.x == 0) {
            fabric::quiet(peers(), *this, ticket_.completion);
            // A producer that gave up may have let its user write over the rows it had published; it has set the abort
            // word before. So what was summed counts only if the word is still clear now (P12, P15).
            if (must_leave()) give_up(Phase::kNone, -1, 0, 0);
        }
        if (!meet()) return;  // also orders the consume() of all threads before the release below
        // All other blocks have come to their last meeting: nobody of this call counts any more.
        for (u32 i = threadIdx.x; i < kMeetings; i += blockDim.x) ticket_.blocks_met[i] = 0;
        for (u32 r = threadIdx.x; r < ranks(); r += blockDim.x) {
            if (!present(r)) continue;
            fabric::signal(peers(), *this, *context_.farewell, r, heap().word_offset(region(), wire::kFree, rank()));
        }
    }

  private:
    DEEP_EP_DEVICE const wire::HeapLayout& heap() const { return context_.peers.heap; }

    // Another block of this call has given up, or some rank has failed in this generation. Relaxed: it only ends a
    // wait.
    DEEP_EP_DEVICE bool must_leave() const {
        return device::load_relaxed<Scope::kDevice>(&ticket_.failed) != 0 || aborted() != 0;
    }
    // The abort word, if it is of this generation; else 0.
    DEEP_EP_DEVICE u64 aborted() const {
        const u64 word = device::load_relaxed<Scope::kSystem>(reinterpret_cast<const u64*>(peers().local));
        return wire::abort_generation(word) == context_.generation ? word : 0;
    }
    // The record says which request it was, and what the NIC said of it.
    DEEP_EP_DEVICE_CALL void fail_for(const fabric::QueuePair& qp, Phase phase) {
        // The NIC has written these before the tail, which `failed` has acquired; what it writes later are errors too.
        const u32 error = qp.cqe->vendor << 8 | qp.cqe->syndrome;
        const u32 tail = device::load_relaxed<Scope::kSystem>(&qp.cqe->tail);
        fail(wire::kNetwork, phase, static_cast<i32>(qp.peer), wire::mlx5::cqe_index(tail), error);
    }
    DEEP_EP_DEVICE_CALL void give_up(Phase phase, i32 peer, u64 expected, u64 seen) {
        const u64 word = aborted();
        if (word != 0) {
            fail(wire::kAborted, phase, static_cast<i32>(wire::abort_rank(word)), expected, seen, word);
        } else {
            fail(wire::kTimeout, phase, peer, expected, seen);
        }
    }

    Context& context_;
    Ticket& ticket_;
    wire::Outcome& outcome_;
    BlockState& block_;
    const u64 timeout_ns_;
    u64 number_ = 0;
    u32 region_ = 0;
    u64 arguments_ = 0;
};

}  // namespace deep_ep
