// A call in progress, as seen by one block: its number, its words, bounded waits, and giving up as a block (PROTOCOL P1
// to P8, P14, P15).
#pragma once

#include "fabric/fabric.h"
#include "kernels/common/context.h"
#include "kernels/common/patience.h"
#include "kernels/common/stages.h"
#include "wire/messages.h"

namespace deep_ep {

using wire::Phase;

// Shared memory of a block.
struct BlockState {
    u32 gave_up;              // some thread of this block gave up: the whole block leaves at the next barrier
    u32 sent_last;            // this block was the last of the sending blocks to finish
    Environment environment;  // as the block found it
};

// One lane of a warp found something. All lanes continue with its value, ordered after that lane's loads (a shuffle
// orders nothing).
DEEP_EP_DEVICE int broadcast(int value) {
    __syncwarp();
    return __shfl_sync(device::kFullMask, value, 0);
}

// A warp: returns the sum over its lanes, in all lanes.
DEEP_EP_DEVICE u32 warp_total(u32 value) {
    for (u32 step = device::kWarpSize / 2; step != 0; step /= 2) {
        value += __shfl_xor_sync(device::kFullMask, value, static_cast<int>(step));
    }
    return value;
}

// A word of this rank that must reach a value, and the rank that is expected to add to it.
struct Awaited {
    Phase phase;
    i32 peer;
    const u64* word;
    u64 expected;
};

class Operation : public StageNotes<kNotesStages> {
  public:
    DEEP_EP_DEVICE Operation(const CallArgs& call, BlockState* block)
        : StageNotes(call.stages),
          environment_(copied(*call.context, *block)),
          context_(*call.context),
          ticket_(*call.ticket),
          outcome_(*call.outcome),
          block_(*block),
          timeout_ns_(call.timeout_ns),
          launch_(call.launch),
          generation_(Sequence::of(environment_.sequence).generation),
          bank_(environment_.peers.heap.bank_offset(generation_)) {}

    // The whole block, at the end of the kernel, whatever its outcome. The last block of the launch to leave tells the
    // host that nothing of the call is used any longer: the host may give the ticket and the records to another call. A
    // block that has finished its part has left already, unless it is the last one (leave()). The host acquires from
    // the release here. The next kernel that is given the ticket follows this one, so that a plain store of the counter
    // suffices.
    DEEP_EP_DEVICE ~Operation() {
        if (!finished_ || is_last_) ended(Stage::kFinish);
        __syncthreads();
        if (threadIdx.x == 0) end_launch();
    }
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    // The whole block, before anything else. No thread may call failed() before it.
    DEEP_EP_DEVICE bool enter() {
        // Loaded before the check, so that both wait for memory at the same time.
        const u64 number = ticket_.operation, use = ticket_.use, arguments = ticket_.arguments;
        const u32 region = ticket_.region;
        const bool goes_on = !__syncthreads_or(must_leave_at_entry());
        set_number(number, use, region, arguments);
        ended(Stage::kEnter);
        return goes_on;
    }

    // The same for a kernel whose blocks all begin an operation, without an earlier launch that takes its number: each
    // block reads the number here, and the last one to get to take_number_once() takes it. Everything a block must
    // check is loaded at once, each word by its own thread, and one barrier joins the results. The block waits, and
    // synchronizes again, only if some rank has not given its region back yet.
    //
    // `ranks` is a constant where the shape is, so that no load waits for it.
    //
    // Where ranks may be masked, every block takes the slow path: the other ranks may have continued without this one
    // and given `free`, so the abort word is conclusive only if it is read after `free`.
    DEEP_EP_DEVICE bool enter_first(wire::Kind kind, u64 arguments, u32 ranks) {
        read_sequence(arguments);
        u64* const announcement = &header()->announcement;
        bool goes_on = !masks_ranks();
        for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
            const bool counts = present(r), free = is_free(r);  // neither load waits for the other's result
            goes_on = (free || !counts) && goes_on;
        }
        const bool leaves = must_leave_at_entry();
        // After the check, since a kernel that leaves is no operation; before any wait, since hosts compare
        // announcements while kernels wait.
        if (blockIdx.x == 0 && threadIdx.x == blockDim.x - 1 && !leaves) announce(announcement, kind);
        goes_on = goes_on && !leaves;
        const bool entered = !__syncthreads_or(!goes_on) || await_free();
        ended(Stage::kEnter);
        return entered;
    }
    // The same, if it does not matter which block takes the number.
    DEEP_EP_DEVICE bool enter_and_begin(wire::Kind kind, u64 arguments, u32 ranks) {
        if (!enter_first(kind, arguments, ranks)) return false;
        if (threadIdx.x == blockDim.x - 1) take_number_once();
        return true;
    }
    // One thread of each block, after the barrier that joins what the block has posted. Other threads may still add the
    // block's shares of signals, which no NIC reads.
    DEEP_EP_DEVICE void end_send() {
        if (take_number_once()) block_.sent_last = 1;
    }

    // One thread of each block, after enter_first(). The last block to get here takes the number, which all have read
    // by then, and gets true. Kernels of this Buffer are ordered by their launches; only a graph that is replayed
    // alongside a call breaks that order, and then the ranks' numbers differ.
    DEEP_EP_DEVICE bool take_number_once() {
        if (failed() || !is_last_at(kSent)) return false;
        fill_ticket();
        const Sequence mine{generation_, use_, region_};
        // Relaxed: it publishes nothing else, and the next kernel is ordered by its launch.
        const u64 found = device::cas_relaxed<Scope::kDevice>(&context_.sequence, mine.word(), next().word());
        if (found != mine.word()) fail(wire::kMismatch, Phase::kNone, static_cast<i32>(rank()), mine.word(), found);
        return true;
    }

    // One thread of an operation's first kernel: takes the number. Other kernels of this Buffer are ordered before and
    // after it by their launches, so plain accesses suffice.
    DEEP_EP_DEVICE void take_number(wire::Kind kind, u64 arguments) {
        read_sequence(arguments);
        fill_ticket();
        context_.sequence = next().word();
        announce(&header()->announcement, kind);
    }
    // All threads, after the barrier that follows take_number().
    DEEP_EP_DEVICE void read_number() { set_number(ticket_.operation, ticket_.use, ticket_.region, ticket_.arguments); }

    DEEP_EP_DEVICE u32 generation() const { return generation_; }
    DEEP_EP_DEVICE u64 number() const { return number_; }
    DEEP_EP_DEVICE u64 arguments() const { return arguments_; }
    DEEP_EP_DEVICE const fabric::Peers& peers() const { return environment_.peers; }
    DEEP_EP_DEVICE u32 rank() const { return environment_.peers.rank; }
    DEEP_EP_DEVICE u32 ranks() const { return environment_.peers.ranks; }
    DEEP_EP_DEVICE const Environment& environment() const { return environment_; }
    // False for a rank that was left out when the Buffer recovered: it is neither sent to nor waited for (P17).
    DEEP_EP_DEVICE bool present(u32 rank) const { return !environment_.mask.has(rank); }
    // Whether this Buffer continues without ranks that do not answer (P17).
    DEEP_EP_DEVICE bool masks_ranks() const { return kMayMask && environment_.suspects != nullptr; }
    // True for a rank that this Buffer continues without, since a wait for it timed out (P17). This rank's host stores
    // the bit once that rank has been notified. The acquire orders all later stores, which that rank might still read,
    // after its abort word, which it reads last. Threads may see the bit at different times, so nothing that a block
    // does together may depend on it.
    DEEP_EP_DEVICE bool masked(u32 rank) const {
        if (!masks_ranks()) return false;
        constexpr u32 kBits = wire::RankMask::kBits;
        const u64* const word = &header()->masked.ranks.words[rank / kBits];
        return (device::load_acquire<Scope::kSystem>(word) >> rank % kBits & 1) != 0;
    }
    // Present, and reached by loads and stores.
    DEEP_EP_DEVICE bool mapped(u32 rank) const { return present(rank) && maps(rank); }
    // The same for a rank that is known to be present.
    DEEP_EP_DEVICE bool maps(u32 rank) const { return fabric::mapped(peers(), rank); }

    // --- places
    // -----------------------------------------------------------------------------------------------------------------
    DEEP_EP_DEVICE u32 region() const { return region_; }
    DEEP_EP_DEVICE u64 region_offset() const { return heap().region_offset(region()); }
    DEEP_EP_DEVICE u8* local_region() const { return peers().local + region_offset(); }
    // A word of this rank, wherever it is. The Context alone determines its address, so the load of the word waits for
    // no other load.
    DEEP_EP_DEVICE const u64* word(u32 kind, u32 source) const {
        return peers().far_words.place(peers().near + word_offset(kind, source), kind, source);
    }
    // The value of a word once `puts` puts of this operation have arrived (P7).
    DEEP_EP_DEVICE u64 target(u32 kind, u32 source, u64 puts) const {
        return *consumed(kind, source) + puts * wire::kUnit;
    }
    // Ends this operation's use of a word. Only after every block has finished waiting on it.
    DEEP_EP_DEVICE void consume(u32 kind, u32 source, u64 puts) {
        // Only later kernels of this rank read it, ordered by their launches: relaxed, and nothing waits for the value.
        device::add_relaxed<Scope::kDevice>(consumed(kind, source), puts * wire::kUnit);
    }

    // Counters of this rank's kernels, [ranks, kSlots]: see Context.
    DEEP_EP_DEVICE u32* slots_read() const { return environment_.slots_read + u64{region_} * ranks() * wire::kSlots; }

    // --- failing
    // ----------------------------------------------------------------------------------------------------------------
    // True once this block has given up: after that nothing is stored, signaled, offered or freed (P14).
    DEEP_EP_DEVICE bool failed() const { return device::load_relaxed<Scope::kBlock>(&block_.gave_up) != 0; }

    // One thread: gives up. `told` is the abort word if that is the reason.
    //
    // The first thread of the call to give up claims the failure. Whether or not it was itself notified of the failure,
    // it passes the abort word on before it stores the reason that the host acts on, and its block leaves only after
    // that. Therefore the work queued behind this kernel, including the user's own kernels, runs only once every mapped
    // rank has the word. A rank without the word could sum rows that a user kernel overwrites here, and end well (P12,
    // P15).
    DEEP_EP_DEVICE_CALL void fail(wire::Reason reason, Phase phase, i32 peer, u64 expected, u64 seen, u64 told = 0) {
        if (claim()) {
            tell(told != 0 ? told : wire::abort_word(generation_, reason, rank(), peer));
            outcome_.failure.phase = static_cast<u32>(phase);
            outcome_.failure.peer = peer;
            outcome_.failure.expected = expected;
            outcome_.failure.seen = seen;
            outcome_.failure.cause_rank = known_rank(static_cast<i32>(wire::abort_rank(told)));
            outcome_.failure.cause = wire::abort_reason(told);
            outcome_.failure.cause_peer = known_rank(wire::abort_peer(told));
            // The host reads the record after the kernel has ended, or once it acquires the mark.
            device::store_release<Scope::kSystem>(&outcome_.failure.mark, wire::failure_mark(generation_, reason));
        }
        // Hints that end waits early. Their consequences are decided at a barrier, so no order is needed.
        device::store_relaxed<Scope::kDevice>(&ticket_.failed, generation_);
        device::store_relaxed<Scope::kBlock>(&block_.gave_up, 1u);
    }

    // --- waiting
    // ----------------------------------------------------------------------------------------------------------------
    // One thread: rejects a message that does not belong to this operation, before any of its content is used.
    DEEP_EP_DEVICE bool check_message(Phase phase, u32 source, u64 operation, u64 arguments) {
        if (operation == number_ && arguments == arguments_) return true;
        const bool other = operation != number_;
        fail(wire::kMismatch, other ? phase : Phase::kHeader, static_cast<i32>(source), other ? number_ : arguments_,
             other ? operation : arguments);
        return false;
    }

    // One thread: waits until `ready()` returns true. The wait is bounded: returns false once the operation must be
    // given up or the peer is masked. `what` is what a failure report names; `ready` may change it when it waits for
    // one of several things.
    template <class Ready>
    DEEP_EP_DEVICE bool wait(const Awaited& what, Ready ready) {
        if (failed()) return false;
        if (ready()) return true;
        const device::WaitNote note{wire::phase_name(what.phase), what.peer, what.expected, what.word};
        Patience patience(environment_, what.phase, what.peer, timeout_ns_);
        bool arrived = false, over = false, broken = false;
        fabric::Fault fault{};
        do {
            device::spin_until(
                [&] {
                    arrived = ready();
                    over = arrived || failed() || must_leave() || masked_peer(what);
                    return over;
                },
                [&] { return broken = !masks_ranks() && fabric::fault(peers(), fault); }, patience.deadline(), &note);
        } while (!over && !broken && patience.extend());
        patience.end(arrived);
        if (arrived) return true;
        if (!failed() && !must_leave() && masked_peer(what)) return false;
        if (broken) {
            fail(wire::kNetwork, what.phase, static_cast<i32>(fault.peer), fault.request, fault.error);
            return false;
        }
        give_up(what.phase, what.peer, what.expected, device::load_relaxed<Scope::kSystem>(what.word));
        return false;
    }
    template <class Ready>
    DEEP_EP_DEVICE bool wait(Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        return wait(Awaited{phase, peer, shown, expected}, ready);
    }

    // One thread: waits until `ready()` returns true, even if the operation is given up meanwhile. It is for completing
    // work that must not be left half done. Gives up and returns false once the time is over.
    template <class Ready>
    DEEP_EP_DEVICE bool outlast(Phase phase, i32 peer, const u64* shown, u64 expected, Ready ready) {
        if (ready()) return true;
        const device::WaitNote note{wire::phase_name(phase), peer, expected, shown};
        if (device::spin_until(ready, device::now_ns() + timeout_ns_, &note)) return true;
        give_up(phase, peer, expected, device::load_relaxed<Scope::kSystem>(shown));
        return false;
    }

    // One thread: waits until a word in this rank's memory has reached `expected`. The acquire pairs with the release
    // of the side that adds to it (a peer's kernel, an agent or a NIC): everything ordered before its signal is visible
    // afterwards.
    //
    // While it waits it polls relaxed: an acquire takes the lines of all warps out of the SM's L1, also when it finds
    // nothing. Once the value is there, the acquire reads it or a later one, since it follows that load in the word's
    // order. Litmus: poll_then_acquire.
    DEEP_EP_DEVICE_CALL bool wait_word(Phase phase, i32 peer, const u64* shown, u64 expected) {
        if (failed()) return false;
        const auto acquired = [&] { return device::load_acquire<Scope::kSystem>(shown) >= expected; };
        return acquired() || wait(phase, peer, shown, expected, [&] {
                   return device::load_relaxed<Scope::kSystem>(shown) >= expected && acquired();
               });
    }
    DEEP_EP_DEVICE bool wait_signal(Phase phase, u32 kind, u32 source, u64 puts) {
        return wait_word(phase, static_cast<i32>(source), word(kind, source), target(kind, source, puts));
    }

    // One thread, once the source has sent or been masked: returns whether its rows take part in this operation. The
    // first thread of this rank to ask decides, and every block obeys (P17). Everything that the deciding thread has
    // acquired from the source is visible to all threads that read the decision.
    DEEP_EP_DEVICE bool takes_part(u32 source) {
        if (!masks_ranks()) return true;
        u64* const decision = environment_.decisions + region() * ranks() + source;
        const u64 mine = (number_ + 1) << 1 | (masked(source) ? 0 : 1);
        u64 found = device::load_acquire<Scope::kDevice>(decision);
        if (found >> 1 != mine >> 1) {  // of an older operation of the region
            const u64 before = device::cas_acq_rel<Scope::kDevice>(decision, found, mine);
            found = before == found ? mine : before;
        }
        return (found & 1) != 0;
    }

    // One thread: the same as wait_signal() without waiting. The acquire pairs as in wait_word().
    DEEP_EP_DEVICE bool has_arrived(u32 kind, u32 source, u64 puts) {
        // Neither load waits for the other's result. The word is never behind what has been consumed of it.
        const u64 before = *consumed(kind, source), now = device::load_acquire<Scope::kSystem>(word(kind, source));
        return now - before >= puts * wire::kUnit;
    }

    // The whole block: waits until every rank has given back the previous use of its region, so that it may be stored
    // into (P4).
    DEEP_EP_DEVICE bool await_free() {
        for (u32 r = threadIdx.x; r < ranks(); r += blockDim.x) {
            if (!hears(r) || masked(r)) continue;
            wait_word(Phase::kFree, static_cast<i32>(r), word(wire::kFree, r), free_target());
        }
        // `free` may have arrived because the others continued without this rank.
        if (threadIdx.x == 0 && masks_ranks() && !failed() && must_leave()) give_up(Phase::kNone, -1, 0, 0);
        return sync_block();
    }

    // --- barrier
    // ----------------------------------------------------------------------------------------------------------------
    // The whole block: a barrier that all threads leave with the same answer to whether to continue (P14). Each thread
    // checks before it arrives, so a thread that has given up itself reports that, and the barrier joins the reports.
    // Answers that the threads read separately after the barrier could differ, since other threads may have given up by
    // then.
    DEEP_EP_DEVICE bool sync_block() { return !__syncthreads_or(failed()); }

    // The same for a warp.
    DEEP_EP_DEVICE bool sync_warp() {
        __syncwarp();  // a vote orders nothing
        return !__any_sync(device::kFullMask, failed());
    }

    // The whole block: a barrier. Then returns true in the last block of the kernel to get here, which sees what the
    // others stored before. A block that has given up never gets here, so the counter is not completed (P14).
    DEEP_EP_DEVICE bool last_block(Arrival arrival) {
        if (!sync_block()) return false;
        return __syncthreads_or(threadIdx.x == 0 && is_last_at(arrival)) != 0;
    }
    // The whole block, once it has done its part of the operation: the same, for the block that goes on to finish it.
    // The others have left the kernel: they use nothing of the call any longer.
    DEEP_EP_DEVICE bool last_to_finish() {
        return has_finished() && __syncthreads_or(threadIdx.x == 0 && leave(1)) != 0;
    }
    // The same, but true only in that block's first warp, which does not wait for the other warps.
    DEEP_EP_DEVICE bool last_warp_to_finish() {
        if (!has_finished() || device::warp() != 0) return false;
        return broadcast(device::lane() == 0 && leave(1)) != 0;
    }

    // --- sending
    // ----------------------------------------------------------------------------------------------------------------
    // One thread: returns whether it may still send to a rank. Where ranks are masked, the others may have continued
    // without this rank, and anything it sends from then on could reach another operation. It therefore checks before
    // each send (P17).
    DEEP_EP_DEVICE bool may_send(u32 to) {
        if (failed()) return false;
        if (!masks_ranks()) return true;
        if (must_leave()) give_up(Phase::kNone, -1, 0, 0);
        return !failed() && !masked(to);
    }
    // One thread: adds one unit to this rank's word of `kind` at `to`.
    DEEP_EP_DEVICE bool signal(u32 to, u32 kind) {
        return may_send(to) && fabric::signal(peers(), *this, ticket_.completion, to, word_at_peer(kind));
    }
    // One thread: adds one unit to the word of `kind` and `source` at `to`, which is mapped. For rows that this rank
    // passes on: it is the only writer of that word in this operation (P6).
    DEEP_EP_DEVICE void signal_for(u32 to, u32 kind, u32 source) {
        if (may_send(to)) fabric::peer::signal(peers(), to, {word_offset(kind, source), 0});
    }
    // One thread of each block: adds the block's share of one unit to this rank's word of `kind` at `to`, which is
    // mapped. All shares add up to the unit, whatever the grid size (P8). A release at system scope, after the block's
    // barrier: a thread of `to` that acquires the whole unit has read from every block's release, and sees the stores
    // of all blocks.
    DEEP_EP_DEVICE void signal_share(u32 to, u32 kind) {
        const u32 each = static_cast<u32>(wire::kUnit) / gridDim.x;
        const u64 share = blockIdx.x == 0 ? wire::kUnit - u64{each} * (gridDim.x - 1) : each;
        if (may_send(to)) fabric::peer::signal(peers(), to, word_at_peer(kind), share);
    }
    // A warp: puts pieces into `to`'s heap, then signals. Offsets as in fabric::Piece.
    DEEP_EP_DEVICE bool put_signal(u32 to, u32 kind, const fabric::Piece* pieces, u32 count) {
        // Another warp may give up at any time: one lane decides, since otherwise the remaining lanes would wait for
        // those that left.
        if (!broadcast(may_send(to))) return false;
        return fabric::put_signal(peers(), *this, ticket_.completion, to, pieces, count, word_at_peer(kind));
    }

    // The whole block, once all blocks of the call have posted: waits until no NIC reads this rank's memory for this
    // call any longer (P4). A barrier must follow to join the threads.
    DEEP_EP_DEVICE void quiet() { fabric::quiet(peers(), *this, ticket_.completion); }

    // All threads of the block that was the last to send, after a barrier that follows end_send(): it sees what all
    // blocks have posted.
    DEEP_EP_DEVICE bool sent_last() const { return block_.sent_last != 0; }

    // The last block, once every word of the operation has been waited for and consumed: gives the region back to all
    // ranks (P4).
    //
    // `reads`, for the first thread: rows have been loaded that others had published (P12). Where ranks may be masked,
    // every operation looks last: a rank that others have masked may have taken zeros for what they no longer send it
    // (P17).
    DEEP_EP_DEVICE void finish(bool reads) {
        quiet();
        if (threadIdx.x == 0 && (reads || masks_ranks())) look_last();
        // Some threads may have given up and others not: the barrier decides for all, and joins what they waited for.
        // It also orders the consume() calls of all threads before the release below.
        if (sync_block()) give_back(threadIdx.x, blockDim.x);
    }
    // The same for the first warp of the last block, where a block has already called quiet().
    DEEP_EP_DEVICE void finish_warp(bool reads) {
        if (device::lane() == 0 && (reads || masks_ranks())) look_last();
        if (sync_warp()) give_back(device::lane(), device::kWarpSize);
    }
    // One thread: the last look (look_last()) for rows of others that this rank passes on to a third rank (P12). It
    // follows the warp's loads of these rows and precedes the sending of what was computed from them.
    DEEP_EP_DEVICE_CALL bool looks_clear() {
        look_last();
        return !failed();
    }

  private:
    // The block: copies the environment into its shared memory. The host changes it while no kernel of this Buffer
    // runs. Earlier and later kernels, which advance the sequence, are ordered by their launches; this kernel does so
    // once all of its blocks have got further (take_number_once()).
    DEEP_EP_DEVICE static const Environment& copied(const Environment& environment, BlockState& block) {
        const auto* const from = reinterpret_cast<const u64*>(&environment);
        Environment& own = block.environment;
        auto* const to = reinterpret_cast<u64*>(&own);
        for (u32 i = threadIdx.x; i < sizeof(Environment) / sizeof(u64); i += blockDim.x) {
            u64 word = from[i];
            // The pointers to addresses that the block keeps itself. No other load depends on this one.
            if (to + i == reinterpret_cast<u64*>(&own.peers.base)) word = word != 0 ? word : address_of(own.bases);
            if (to + i == reinterpret_cast<u64*>(&own.peers.nears)) word = word != 0 ? word : address_of(own.nears);
            to[i] = word;
        }
        __syncthreads();  // the copy is complete
        return own;
    }
    DEEP_EP_DEVICE static u64 address_of(u8** list) { return reinterpret_cast<u64>(list); }
    // Each thread of the block, once: returns whether to leave at once. One thread checks for all. A kernel that starts
    // with the abort word set leaves (P14). So does one queued behind a failure of another Buffer of this rank, since
    // its inputs may be that Buffer's results.
    DEEP_EP_DEVICE bool must_leave_at_entry() {
        // Not the first thread, which reads words of other ranks meanwhile.
        if (threadIdx.x != blockDim.x - 1) return false;
        block_.gave_up = 0;
        block_.sent_last = 0;
        // None of these loads waits for the result of another: every decision follows all of them. The acquire in
        // renew_ticket() comes last, so that it delays none of them.
        const u64 known = environment_.failures_known;
        const bool here = has_failed();
        const u64 word = aborted();
        // The kernels that added to it ended before this one was launched, if this one works on their results.
        const bool elsewhere = device::load_relaxed<Scope::kSystem>(environment_.failures) != known;
        renew_ticket();
        const bool gives_up = here || word != 0;
        if (gives_up) {
            give_up(Phase::kNone, -1, 0, 0);
        } else if (elsewhere) {
            fail(wire::kElsewhere, Phase::kNone, -1, 0, 0);
        }
        return gives_up || elsewhere;
    }
    // The whole block: a barrier. Returns whether it has done its part without giving up.
    DEEP_EP_DEVICE bool has_finished() {
        ended(Stage::kFinish);  // later the memory may be another launch's
        return finished_ = sync_block();
    }
    // The first thread of each block, at the end. Not inlined, since a kernel ends at several places.
    DEEP_EP_DEVICE_CALL void end_launch() {
        if (!finished_) leave(1 + kGaveUp);
        if (!is_last_) return;
        ticket_.blocks_left = 0;
        device::store_release<Scope::kSystem>(&outcome_.launches_ended, launch_);
    }
    // The first thread of each block, once: counts it among those that have left the kernel. Returns whether it is the
    // last one and none has given up. Otherwise words of the operation have not been waited for, and its region may not
    // be given back. As is_last_at().
    DEEP_EP_DEVICE bool leave(u32 count) {
        const u32 before = device::fetch_add_acq_rel<Scope::kDevice>(&ticket_.blocks_left, count);
        is_last_ = before % kGaveUp == gridDim.x - 1;
        return before == gridDim.x - 1;
    }
    // One thread of each block: returns whether its block is the last of the kernel to get here. It then sees what the
    // others stored before (its acquire reads from their releases). Litmus: count_by_atomics.
    DEEP_EP_DEVICE bool is_last_at(Arrival arrival) {
        return device::fetch_add_acq_rel<Scope::kDevice>(&ticket_.blocks_arrived[arrival], 1u) == gridDim.x - 1;
    }
    // Threads `first`, `first + step`, ... of the last block, after the barrier that joins them.
    DEEP_EP_DEVICE void give_back(u32 first, u32 step) {
        // All other blocks have reached their last barrier: no block of this call adds to the counts any longer.
        for (u32 i = first; i < kArrivals; i += step) ticket_.blocks_arrived[i] = 0;
        for (u32 r = first; r < ranks(); r += step) {
            if (!hears(r) || masked(r)) continue;
            fabric::signal(peers(), *this, *environment_.farewell, r, word_at_peer(wire::kFree));
        }
    }
    // One thread: returns whether a rank has given back the previous use of its region. The acquire pairs as in
    // wait_word().
    DEEP_EP_DEVICE bool is_free(u32 rank) const {
        return device::load_acquire<Scope::kSystem>(word(wire::kFree, rank)) >= free_target();
    }
    DEEP_EP_DEVICE u64 free_target() const { return use_ * wire::kUnit; }
    DEEP_EP_DEVICE bool masked_peer(const Awaited& what) const {
        return what.peer >= 0 && masked(static_cast<u32>(what.peer));
    }
    DEEP_EP_DEVICE wire::HeapHeader* header() const { return reinterpret_cast<wire::HeapHeader*>(peers().local); }
    DEEP_EP_DEVICE void set_number(u64 number, u64 use, u32 region, u64 arguments) {
        number_ = number;
        use_ = use;
        region_ = region;
        arguments_ = arguments;
    }
    // How much of a word earlier uses of its region have consumed.
    DEEP_EP_DEVICE u64* consumed(u32 kind, u32 source) const {
        return environment_.base + wire::word_index(region(), kind, source, ranks());
    }
    // Reads the number of the operation that begins now.
    DEEP_EP_DEVICE void read_sequence(u64 arguments) {
        const Sequence now = Sequence::of(environment_.sequence);
        set_number(now.use * heap().regions + now.region, now.use, now.region, arguments);
    }
    DEEP_EP_DEVICE Sequence next() const { return Sequence{generation_, use_, region_}.next(heap().regions); }
    // One thread.
    DEEP_EP_DEVICE void fill_ticket() {
        ticket_.operation = number_;
        ticket_.use = use_;
        ticket_.region = region_;
        ticket_.arguments = arguments_;
    }
    // One thread, once: for this host's errors, and for hosts of other ranks, which load the word and compare it with
    // their own; nothing else must be visible with it.
    DEEP_EP_DEVICE void announce(u64* word, wire::Kind kind) {
        outcome_.operation = number_;
        device::store_relaxed<Scope::kSystem>(word, wire::announcement(number_, kind, arguments_));
    }

    DEEP_EP_DEVICE const wire::HeapLayout& heap() const { return environment_.peers.heap; }

    // Offset in any rank's heap.
    DEEP_EP_DEVICE u64 word_offset(u32 kind, u32 source) const {
        return bank_ + heap().word_in_bank(region(), kind, source);
    }
    // This rank's own word in a peer's heap. A kind, with its slot, selects the queue pair, so that the words at a peer
    // are spread over the queue pairs that lead to it.
    DEEP_EP_DEVICE fabric::Word word_at_peer(u32 kind) const {
        return {word_offset(kind, rank()), region() * wire::kOfRanks + kind};
    }
    // True for ranks that give regions back to each other with this one (P4).
    DEEP_EP_DEVICE bool hears(u32 other) const {
        return present(other) && (environment_.audience.per_node == 0 || joins(other));
    }
    DEEP_EP_DEVICE_CALL bool joins(u32 other) const {
        return environment_.audience.joins(rank(), other, environment_.mask);
    }
    // A rank number read from memory, or -1 if it is not a valid one.
    DEEP_EP_DEVICE i32 known_rank(i32 rank) const { return static_cast<u32>(rank) < ranks() ? rank : -1; }

    // One thread of each block. Marks of another generation count as clear (P16). One of the blocks that find such
    // marks resets them while the others wait for it; that block waits for nothing.
    DEEP_EP_DEVICE void renew_ticket() {
        constexpr u32 kRenewing = ~0u;
        // Acquire: sees what the block that stored this generation had reset before.
        const u32 seen = device::load_acquire<Scope::kDevice>(&ticket_.generation);
        if (seen == generation_) return;
        if (seen != kRenewing && device::cas_relaxed<Scope::kDevice>(&ticket_.generation, seen, kRenewing) == seen) {
            for (u32 i = 0; i < kArrivals; ++i) ticket_.blocks_arrived[i] = 0;
            ticket_.completion = {};
            device::store_release<Scope::kDevice>(&ticket_.generation, generation_);
            return;
        }
        device::spin_until([&] { return device::load_acquire<Scope::kDevice>(&ticket_.generation) == generation_; },
                           ~0ull, nullptr);
    }

    // Another block of this call has given up, or a rank has failed in this generation. Relaxed: it only ends a wait.
    DEEP_EP_DEVICE bool must_leave() const { return has_failed() || aborted() != 0; }
    DEEP_EP_DEVICE bool has_failed() const {
        return device::load_relaxed<Scope::kDevice>(&ticket_.failed) == generation_;
    }
    DEEP_EP_DEVICE u64* abort_word(u8* near) const {
        return &reinterpret_cast<wire::HeapHeader*>(near)->abort_of(generation_);
    }
    DEEP_EP_DEVICE u64* own_abort_word() const { return abort_word(peers().near); }
    DEEP_EP_DEVICE u64 if_current(u64 word) const { return wire::abort_generation(word) >= generation_ ? word : 0; }
    // The abort word if it is of this generation, or of a newer one that other ranks have begun; otherwise 0.
    DEEP_EP_DEVICE u64 aborted() const { return if_current(device::load_relaxed<Scope::kSystem>(own_abort_word())); }

    // One thread of the last block, after the barriers that join all loads of rows. A producer that gave up has let its
    // user overwrite the rows it had published, but before that it has exchanged the abort word into this heap.
    // Therefore the sums are valid only if the word is clear now. It is a read-modify-write: either it reads the word
    // stored by the exchange, or the exchange acquires from its release, and the rows are overwritten after they were
    // loaded (P12). Litmus: last_look.
    DEEP_EP_DEVICE void look_last() {
        const u64 word = if_current(device::fetch_add_release<Scope::kSystem>(own_abort_word(), 0ull));
        if (word != 0) fail(wire::kAborted, Phase::kNone, -1, 0, 0, word);
    }

    // One thread: returns whether it is the first of this call to give up. A mark of another generation does not count.
    // Relaxed: it only selects one thread, and the others read nothing that the first has written.
    DEEP_EP_DEVICE bool claim() {
        const u32 seen = device::load_relaxed<Scope::kDevice>(&ticket_.claimed);
        return seen != generation_ && device::cas_relaxed<Scope::kDevice>(&ticket_.claimed, seen, generation_) == seen;
    }
    // The thread that has claimed a failure: when it returns, it has the answer of every mapped rank. It uses exchanges
    // because only the returned value proves that the word is in place, and because an owner's last look pairs with
    // them (look_last()). A peer over a link without atomics is not mapped, since signals need them too. The host
    // notifies ranks that are not mapped (Teller).
    //
    // A masked rank notifies no other: the others continue without it and its failures (P17).
    DEEP_EP_DEVICE_CALL void tell(u64 word) {
        const u64 before = if_current(device::exchange_acquire<Scope::kSystem>(own_abort_word(), word));
        if (wire::abort_reason(before) == wire::kMasked) {
            word = before;
            device::exchange_acquire<Scope::kSystem>(own_abort_word(), word);
        }
        const bool alone = wire::abort_reason(word) == wire::kMasked;
#pragma unroll 1
        for (u32 r = 0; r < ranks(); ++r) {
            if (alone || r == rank() || !mapped(r) || masked(r)) continue;
            // A peer that has moved on to another generation may have a failure of its own there, which must not be
            // erased. Relaxed: the peer and other ranks exchange the word; only the exchange below orders anything.
            u64* const theirs = abort_word(peers().nears[r]);
            if (wire::abort_generation(device::load_relaxed<Scope::kSystem>(theirs)) > generation_) continue;
            device::exchange_acquire<Scope::kSystem>(theirs, word);
        }
        // A host thread polls it and notifies the others. Relaxed: it conveys the word alone.
        device::store_relaxed<Scope::kSystem>(environment_.claimed, word);
        // Later kernels of this rank's other Buffers load it on entry. A host that counts this failure must find it
        // claimed, which the release orders.
        const u32 counted = device::load_relaxed<Scope::kDevice>(&context_.counted);
        if (counted != generation_ &&
            device::cas_relaxed<Scope::kDevice>(&context_.counted, counted, generation_) == counted) {
            device::add_release<Scope::kSystem>(environment_.failures, 1ull);
        }
    }
    DEEP_EP_DEVICE_CALL void give_up(Phase phase, i32 peer, u64 expected, u64 seen) {
        const u64 word = aborted();
        fail(word != 0 ? wire::kAborted : wire::kTimeout, phase, peer, expected, seen, word);
    }

    const Environment& environment_;  // the block's
    Context& context_;
    Ticket& ticket_;
    wire::Outcome& outcome_;
    BlockState& block_;
    const u64 timeout_ns_;
    const u32 launch_;  // CallArgs::launch
    const u32 generation_;
    const u64 bank_;  // offset of this generation's words in every heap
    u64 number_ = 0;
    u64 use_ = 0;  // number of earlier uses of the region
    u32 region_ = 0;
    u64 arguments_ = 0;
    bool finished_ = false;  // this block has done its part
    bool is_last_ = false;   // of the first thread: the others have left
};

}  // namespace deep_ep
