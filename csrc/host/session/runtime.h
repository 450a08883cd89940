// The host's half of a Buffer: device state, and the launches of each operation. No tensors: addresses and sizes.
#pragma once

#include <any>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "host/control/control_plane.h"
#include "host/control/progress.h"
#include "host/control/warden.h"
#include "host/heap/arena.h"
#include "host/heap/heap.h"
#include "host/heap/memory.h"
#include "host/launch/launcher.h"
#include "host/network/networks.h"
#include "host/session/failure_count.h"
#include "kernels/common/context.h"
#include "kernels/common/kernel.h"
#include "kernels/common/shape.h"
#include "observe/observer.h"

namespace deep_ep::host {

struct BufferOptions {
    int rank;
    int ranks;
    int regions;
    uint64_t region_bytes;
    uint64_t arena_bytes;
    uint64_t timeout_ns;                // at first: Runtime::set_timeout
    int calls;                          // how many may be on their way at once before more records are made
    uint32_t call_words;                // of each call, in which its mode's kernels tell the host: Call::words
    bool masks_ranks;                   // a wait in vain does not fail all ranks but masks the one (P17)
    bool poison;                        // fill outputs with a pattern before they are written
    bool has_remote;                    // some pair of ranks of the Buffer is not mapped
    std::vector<fabric::Route> routes;  // per rank: how it is reached, if it is
    uint64_t rank_key;                  // FailureCount::of
    int ranks_per_node;                 // the ranks of a node are neighbours in number
    bool near_audience;                 // all operations take two hops: wire::Audience
    uint64_t bytes_in_flight;           // that keep a NIC busy: its bandwidth times a round trip
};

// One call of a collective: what its kernels share, and what they tell the host while they run.
struct Call {
    wire::Kind kind;
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<wire::Outcome> outcome;  // host-visible, as are the next two
    std::shared_ptr<i32> words;              // [BufferOptions::call_words] its mode's
    std::shared_ptr<u64> heap_bytes;         // [ranks] what each announces of its heap (P10)
    struct Mismatch {
        int peer = -1;  // -1: none
        wire::Kind kind = wire::Kind::kNone;
    } mismatch;           // a peer found to be in another call than this
    std::any mode;        // what its mode keeps of it from one of its kernels to the next
    uint64_t serial = 0;  // of its latest launch; 0: it is a part of a graph
    uint64_t timeout_ns = 0;
    uint32_t generation = 0;
    uint32_t rank = 0;
    GraphGone graph_gone;  // of the graph that it is a part of

    // What its kernels have failed of in this generation; reason 0: nothing.
    wire::Failure failure() const;
    uint32_t reason() const { return wire::mark_reason(failure().mark); }
};

// What has come of a meeting of ranks that recover (P16).
struct Meeting {
    enum Result { kMet, kLate, kGone, kOtherMask, kGivenUp };
    Result result = kMet;
    int peer = -1;          // the rank that it is about
    wire::RankMask mask{};  // which that one has
};

class Runtime final : private FailureCount::Member {
  public:
    Runtime(const BufferOptions& options, std::shared_ptr<Heap> own, std::vector<std::shared_ptr<Heap>> heaps,
            std::unique_ptr<Memory> memory, std::shared_ptr<Launcher> launcher, const MakeControl& make_control,
            MakeWarden make_warden, MakeNetworks make_networks);
    ~Runtime() override;
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    static wire::HeapLayout heap_layout(const BufferOptions& options);

    // What modes launch their kernels with. A new call; its first kernel takes the operation's number.
    std::shared_ptr<Call> open(wire::Kind kind);
    CallArgs call_args(Call& call) { return {context_.get(), call.ticket.get(), call.outcome.get(), call.timeout_ns}; }
    // kernels/common/kernel.h; `experts` for a kernel whose shared memory depends on them. -> the launch's serial
    // number.
    template <class Kernel>
    uint64_t launch(const typename Kernel::Args& args, unsigned blocks, uint32_t experts = 0) {
        RuntimeShape shape{};
        if constexpr (!requires { Kernel::kOfAnyShape; }) shape = args.shape;
        const BlockSizes block{static_cast<u32>(options_.ranks),
                               experts,
                               shape.topk_,
                               launcher_->warps(),
                               launcher_->copies_bytes(),
                               static_cast<u32>(options_.ranks_per_node)};
        return launch(Kernel::kName, shape, blocks, Kernel::shared_bytes(block), &args, sizeof(args));
    }
    // When the latest launch was handed to the launcher, in ns of the host's steady clock; 0: there was none.
    uint64_t launched_ns() const { return launched_ns_; }
    // After the last kernel of a call: notes whether it is a part of a graph.
    void note_graph(Call& call);
    const Launcher& launcher() const { return *launcher_; }
    // The most bytes of a put of so many pieces that every network takes.
    uint64_t max_put_bytes(uint32_t pieces = fabric::kUsualPieces) const { return networks_.max_put_bytes(pieces); }
    // Host-visible: what a launch that is no operation's leaves for its mode, -1: nothing.
    i64* remark() const { return remark_.get(); }
    // The same, once.
    int64_t take_remark();
    // In this rank's heap; 0 for the address 0.
    uint64_t offset_of(uint64_t address) const { return address == 0 ? 0 : address - heap_base(options_.rank); }

    // Until its kernels have told what its mode waits for (Outcome::counts_ready), or the call has ended without.
    void wait_counts(Call& call);

    // Heaps that grow (P10). What peers have been handed of this rank's heap: the next notify that a host waits for
    // announces it.
    void announce(uint64_t heap_bytes) { announced_ = heap_bytes; }
    uint64_t announced() const { return announced_; }
    // After wait_counts: ranks that have announced more of their heap than is mapped here, and how much.
    std::vector<std::pair<int, uint64_t>> behind(const Call& call) const;
    // When nothing is behind: outputs of this and later calls may lie in what this rank has announced with it.
    void share(const Call& call);
    // Until all launched kernels of the call have ended.
    void wait(Call& call);
    // Until a launch that is no operation's has ended.
    void wait_launch(uint64_t serial);
    bool finished(const Call& call) const { return launcher_->finished(call.serial); }

    // A call whose kernels have ended well, and will not run again.
    void retire(const std::shared_ptr<Call>& call);
    // Until all kernels launched here have ended, or so long: -> whether they have. After abort() they leave by
    // themselves.
    bool settle(uint64_t nanoseconds);
    // Until the puts that no operation waits for have left; before a rank goes away in good order. -> whether they
    // have, all of them.
    bool drain();
    // This rank's kernels have ended and none will be launched, and its network is gone: it says so in its heap.
    void leave();

    // Peers live in processes whose end shows on these descriptors: (rank, descriptor). They stay the caller's.
    void watch(const Lifelines::Descriptors& sockets, const Lifelines::Descriptors& processes);

    // Tells every rank, this one included, that this rank has failed (P15). When it returns all of them have the word.
    void abort(uint32_t reason, int peer = -1);
    // This rank has the abort word, of its generation or a newer one.
    bool aborted() const;
    // The same as abort() in a generation that others may have begun.
    void abort_generation(uint32_t generation, uint32_t reason);
    // Tells every rank what this one has been told: the rank that told it may not have come to all of them yet.
    void pass_abort_on();
    // This rank's caller is about to learn that the Buffer has failed.
    void note_told();
    // Another Buffer of this rank has failed, and its caller has been told since this one last asked.
    bool others_have_failed() const { return forgiven_ != failures_->told(); }
    // Leaves these failures behind, when all of this rank's kernels have ended that were to leave; false where some
    // of them have not in time, or some Buffer's caller has not been told yet. This Buffer's own kernels have ended.
    bool forgive(uint64_t nanoseconds);

    // With BufferOptions::masks_ranks: masks a rank now. When it returns that one and this rank's kernels know it.
    // False: this rank has failed, and masks none.
    bool mask(int rank);
    // The ranks that are masked in this generation, as far as this rank knows.
    wire::RankMask masked() const;

    // A rank is known to store nothing any more.
    bool gone(int rank) const;
    // Whether some ranks are left out.
    bool leaves_out() const { return mask_.first_difference({}) != wire::kMaxRanks; }
    // Recovery, in this order (P16); the ranks' attempts are numbered alike. First: what this rank has launched or
    // posted in this generation is over, or never will be.
    bool stop_all(uint64_t nanoseconds);
    // Has this rank's networks look up the endpoints of the ranks that they reach, which have all made theirs: -> one
    // whose endpoint is not to be found after so long, or -1.
    int look_up_peers(uint64_t nanoseconds);
    // The network made anew for a generation, to the ranks that this one talks to without those of `mask`.
    void connect(const wire::RankMask& mask, uint32_t generation);
    // The ranks of `mask` are known to store nothing any more: -> one that may after so long, or -1.
    int wait_gone(const wire::RankMask& mask, uint64_t nanoseconds);
    // All ranks but those of `mask` have come so far too.
    Meeting meet(const wire::RankMask& mask, uint64_t attempt, bool again, uint64_t nanoseconds);
    // Fresh signal words; between the two meetings.
    void clear_words(uint32_t generation);
    // After the second: generation, number and bank, in one store.
    void publish(uint32_t generation, const wire::RankMask& mask);

    // Of calls from now on.
    void set_timeout(uint64_t nanoseconds) { timeout_ns_ = nanoseconds; }

    // This rank makes kernels ready, or has done so: others may wait for it meanwhile.
    void set_compiling(bool compiling);
    std::vector<int> compiling_peers() const;
    // Called once for each peer that is found compiling by a long wait of this rank's, in that wait.
    void on_compiling_peer(std::function<void(const Call&, int peer)> tell) { tell_ = std::move(tell); }

    const std::shared_ptr<Arena>& arena() const { return arena_; }
    const Networks& networks() const { return networks_; }
    const std::vector<std::shared_ptr<Heap>>& heaps() const { return heaps_; }
    const BufferOptions& options() const { return options_; }
    uint64_t heap_base(int rank) const { return reinterpret_cast<uint64_t>(heaps_[static_cast<size_t>(rank)]->base()); }
    uint32_t generation() const { return generation_; }
    wire::HostWords host_words() const;

  private:
    bool untold() const override;
    std::function<bool(uint64_t)> leaving() const override;
    std::unique_ptr<Teller> teller() const;
    template <class T>
    std::shared_ptr<T> make_private(size_t count = 1) {
        return std::static_pointer_cast<T>(memory_->make_private(count * sizeof(T)));
    }

    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, size_t shared_bytes,
                    const void* args, size_t bytes);
    void make_spare(size_t count);
    void wait_until(Call& call, const std::function<bool()>& ready);
    bool compare_with_peers(Call& call);
    // A rank that is not mapped, as a look of a wait has found it lost.
    struct Lost {
        int peer = -1;
        bool left = false;
        bool operator==(const Lost&) const = default;
    };
    bool abort_if_lost(Lost& seen);
    int find_lost(bool left) const;
    bool present(int rank) const { return !mask_.has(static_cast<u32>(rank)); }
    std::vector<fabric::Route> routes(const wire::RankMask& mask) const;
    std::shared_ptr<Warden> new_warden() const;
    // The one that there is now; null without masks. Callers on other threads may hold it a little longer.
    std::shared_ptr<Warden> warden() const;
    void set_warden(std::shared_ptr<Warden> warden);
    void tell_failure(uint64_t word);
    Progress progress() const {
        return {options_.rank, heap_layout(options_), heaps_[static_cast<size_t>(options_.rank)]->base(), host_words()};
    }
    void write_context(uint64_t sequence);
    wire::Audience audience() const { return {options_.near_audience ? static_cast<u32>(options_.ranks_per_node) : 0}; }
    size_t slots_read() const { return heaps_.size() * static_cast<size_t>(options_.regions) * wire::kSlots; }
    void tell_of_compiling_peers(const Call& call, std::vector<int>& told) const;

    const BufferOptions options_;
    const std::vector<std::shared_ptr<Heap>> heaps_;
    const std::shared_ptr<Arena> arena_;
    const std::unique_ptr<Memory> memory_;
    const std::unique_ptr<ControlPlane> control_;
    const std::shared_ptr<Launcher> launcher_;
    std::atomic<uint64_t> latest_{0};                     // serial of the latest launch
    std::atomic<uint64_t> launched_ns_{0};                // launched_ns()
    std::atomic<bool> in_graphs_{false};                  // some of its calls are parts of graphs
    const std::shared_ptr<u8*> mapped_;                   // Context::peers.base
    const std::shared_ptr<fabric::Route> routes_;         // Context::peers.route
    const std::shared_ptr<u64> mapped_bytes_;             // Context::peers.mapped_bytes
    const std::shared_ptr<u64> base_;                     // Context::base
    const std::shared_ptr<u8> host_words_;                // both banks of host_words()
    const std::shared_ptr<fabric::Completion> farewell_;  // Context::farewell
    const std::shared_ptr<i64> remark_;                   // remark()
    const std::shared_ptr<u64> claimed_;                  // Context::claimed
    const std::shared_ptr<u64> suspects_;                 // Context::suspects
    const std::shared_ptr<u64> decisions_;                // Context::decisions
    const std::shared_ptr<u32> slots_read_;               // Context::slots_read
    const std::shared_ptr<FailureCount> failures_;
    const std::shared_ptr<Context> context_;
    uint64_t timeout_ns_;
    uint64_t announced_ = 0;
    std::vector<u64> told_mapped_;  // what mapped_bytes_ holds
    uint32_t generation_ = 1;       // of Context::sequence
    wire::RankMask mask_{};         // Context::mask
    // Kept until retired: a failed one forever, since agents may still hold its addresses; a graph's likewise.
    std::vector<std::shared_ptr<Call>> calls_;
    struct Spare {
        std::shared_ptr<Ticket> ticket;
        std::shared_ptr<wire::Outcome> outcome;
        std::shared_ptr<i32> words;
        std::shared_ptr<u64> heap_bytes;
    };
    std::vector<Spare> spare_;  // of retired calls, or new
    std::function<void(const Call&, int)> tell_;
    std::atomic<bool> told_{false};  // its caller knows that this generation has failed
    uint64_t forgiven_ = 0;          // FailureCount::told() when this Buffer last left failures behind
    Lifelines lifelines_;
    const MakeWarden make_warden_;
    const MakeNetworks make_networks_;
    Networks networks_;  // these last, so that they stop first
    std::unique_ptr<Teller> teller_;
    mutable std::mutex warden_mutex_;  // of the pointer
    std::shared_ptr<Warden> warden_;
};

}  // namespace deep_ep::host
