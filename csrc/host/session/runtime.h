// The host side of a Buffer: device state and the launches of each operation. It handles addresses and sizes, not
// tensors.
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
#include "host/heap/near_parts.h"
#include "host/launch/launcher.h"
#include "host/network/networks.h"
#include "host/session/failure_count.h"
#include "host/session/stage_record.h"
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
    uint64_t timeout_ns;                // initial value: Runtime::set_timeout
    int calls;                          // calls that may be in flight at once before more records are allocated
    uint32_t call_words;                // words per call in which its mode's kernels report to the host: Call::words
    bool notes_stages;                  // kernels can note when they end their stages: StageRecord
    bool masks_ranks;                   // a wait that times out masks the peer instead of failing all ranks (P17)
    bool poison;                        // fill outputs with a pattern before they are written
    bool has_remote;                    // some pair of ranks of the Buffer is not mapped
    std::vector<fabric::Route> routes;  // per rank: how it is reached, if it is
    uint64_t rank_key;                  // FailureCount::of
    int ranks_per_node;                 // the ranks of a node have consecutive numbers
    bool near_audience;                 // all operations take two hops: wire::Audience
    uint64_t bytes_in_flight;           // needed to keep a NIC busy: its bandwidth times the round-trip time
};

// One call of a collective: the state that its kernels share and that they report to the host while they run.
struct Call {
    wire::Kind kind;
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<wire::Outcome> outcome;  // host-visible, as are the next two
    std::shared_ptr<i32> words;              // [BufferOptions::call_words], used by its mode
    std::shared_ptr<u64> heap_bytes;         // [ranks], the heap size that each announces (P10)
    struct Mismatch {
        int peer = -1;  // -1: none
        wire::Kind kind = wire::Kind::kNone;
    } mismatch;  // a peer found to be in a different call
    struct Argument {
        const char* name;
        uint64_t value;
    };
    std::vector<Argument> arguments;  // on which all ranks must agree
    uint64_t hash = 0;                // of these
    std::any mode;                    // state that its mode keeps between its kernels
    uint64_t serial = 0;              // of its latest launch; 0: it is part of a graph
    uint32_t launches = 0;            // so far
    uint64_t timeout_ns = 0;
    uint32_t generation = 0;
    uint32_t rank = 0;
    GraphGone graph_gone;  // of the graph that contains it

    // The failure of its kernels in this generation; reason 0: none.
    wire::Failure failure() const;
    uint32_t reason() const { return wire::mark_reason(failure().mark); }
};

// The result of a meeting of recovering ranks (P16).
struct Meeting {
    enum Result { kMet, kLate, kGone, kOtherMask, kLaterAttempt };
    Result result = kMet;
    int peer = -1;          // the rank that caused it
    wire::RankMask mask{};  // the mask of that rank
    uint64_t attempt = 0;   // kLaterAttempt: the one that it has begun, which this rank is to join
};

class Runtime final : private FailureCount::Member {
  public:
    Runtime(const BufferOptions& options, std::shared_ptr<Heap> own, std::vector<std::shared_ptr<Heap>> heaps,
            NearParts near, std::unique_ptr<Memory> memory, std::shared_ptr<Launcher> launcher,
            const MakeControl& make_control, MakeWarden make_warden, MakeNetworks make_networks);
    ~Runtime() override;
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    static wire::HeapLayout heap_layout(const BufferOptions& options);

    // The launch interface of the modes. Opens a new call, whose first kernel takes the operation's number.
    std::shared_ptr<Call> open(wire::Kind kind);
    // The arguments of a call's next kernel.
    CallArgs call_args(const Call& call) const {
        return {context_.get(), call.ticket.get(), call.outcome.get(), call.timeout_ns, call.launches + 1, nullptr};
    }
    // `Kernel`: see kernels/common/kernel.h. `experts`: for a kernel whose shared memory depends on it. Returns the
    // serial number of the launch.
    template <class Kernel>
    uint64_t launch(const typename Kernel::Args& args, unsigned blocks, uint32_t experts = 0) {
        const RuntimeShape shape = shape_of<Kernel>(args);
        const BlockSizes block = block_of<Kernel>(shape, experts);
        return launch(Kernel::kName, shape, blocks, block.warps, Kernel::shared_bytes(block), &args, sizeof(args));
    }
    // The same for the next kernel of a call, which need not fill in `args.call`.
    template <class Kernel>
    void launch(Call& call, typename Kernel::Args args, unsigned blocks, uint32_t experts = 0) {
        args.call = call_args(call);
        if (stages_.on()) {
            const BlockSizes block = block_of<Kernel>(shape_of<Kernel>(args), experts);
            args.call.stages = stages_place(Kernel::kName, blocks, block.warps);
        }
        const uint64_t serial = launch<Kernel>(args, blocks, experts);
        const std::lock_guard<std::mutex> guard(calls_->mutex);
        call.serial = serial;
        ++call.launches;
    }
    // Records the stages of the kernels that are launched from now on, in `bytes` of memory.
    void record_stages(size_t bytes) { stages_.start(bytes); }
    // Ends the record. Waits for the kernels of this Buffer, for at most `nanoseconds`; returns nothing if some still
    // run.
    std::vector<StageRecord::Launch> take_stages(uint64_t nanoseconds);
    uint64_t stages_lost() const { return stages_.lost(); }  // launches for which there was no room
    // The time at which the latest launch was handed to the launcher, in ns of the host's steady clock; 0: none yet.
    uint64_t launched_ns() const { return launched_ns_; }
    // Called after the last kernel of a call: records whether the call is part of a graph.
    void note_graph(Call& call);
    const Launcher& launcher() const { return *launcher_; }
    // Maximum size of a put of `pieces` pieces that every network accepts.
    uint64_t max_put_bytes(uint32_t pieces = fabric::kUsualPieces) const { return networks_.max_put_bytes(pieces); }
    // Host-visible word that a launch outside any operation leaves for its mode; -1: nothing.
    i64* remark() const { return remark_.get(); }
    // Returns and clears it.
    int64_t take_remark();
    // At least `count` words of kernel memory, zero, for a kernel outside any operation that leaves them zero.
    u32* zero_words(size_t count);
    // The offset in this rank's heap; 0 for address 0.
    uint64_t offset_of(uint64_t address) const { return address == 0 ? 0 : address - heap_base(options_.rank); }

    // Waits until its kernels have reported the counts that its mode waits for (Outcome::counts_ready), or the call has
    // ended without them.
    void wait_counts(Call& call);

    // Heaps that grow (P10). `heap_bytes`: the part of this rank's heap that peers have been given access to. The next
    // notify kernel that a host waits for announces it.
    void announce(uint64_t heap_bytes) { announced_ = heap_bytes; }
    uint64_t announced() const { return announced_; }
    // After wait_counts: the ranks that have announced more of their heap than is mapped here, and how much.
    std::vector<std::pair<int, uint64_t>> behind(const Call& call) const;
    // Called when nothing is behind: outputs of this and later calls may use the memory announced with this call.
    void share(const Call& call);
    // Waits until all launched kernels of the call have ended.
    void wait(Call& call);
    // Waits until a launch outside any operation has ended.
    void wait_launch(uint64_t serial);
    bool finished(const Call& call) const;

    // Recycles a call whose kernels have succeeded and will not run again.
    void retire(const std::shared_ptr<Call>& call);
    // Waits until all kernels launched here have ended, for at most `nanoseconds`. Returns whether they have. After
    // abort() they leave by themselves.
    bool settle(uint64_t nanoseconds);
    // Waits until the puts that no operation waits for have left; called before an orderly exit of the rank. Returns
    // whether all of them have.
    bool drain();
    // Announces in this rank's heap that it stores nothing any more. Its kernels have ended; launches throw from now
    // on.
    void leave();

    // Watches (rank, descriptor) pairs that show the end of peers' processes. The caller keeps ownership.
    void watch(const Lifelines::Descriptors& sockets, const Lifelines::Descriptors& processes);

    // Notifies every rank, including this one, that this rank has failed (P15); see ControlPlane::tell_failure().
    void abort(uint32_t reason, int peer = -1);
    // Whether this rank has an abort word of its generation or a newer one.
    bool aborted() const;
    // Like abort(), in a generation that other ranks may have begun.
    void abort_generation(uint32_t generation, uint32_t reason);
    // Forwards the abort word of this rank to every rank: the rank that sent it may not have reached all of them yet.
    void pass_abort_on();
    // Records that this rank's caller is about to be notified of the Buffer's failure.
    void note_told();
    // Whether another Buffer of this rank has failed and its caller has been notified since the last forgive().
    bool others_have_failed() const { return forgiven_ != failures_->told(); }
    // Leaves these failures behind once all of this rank's kernels that were told to leave have ended. Returns false if
    // some of them have not in time, or if the caller of some Buffer has not been notified yet. This Buffer's own
    // kernels have ended.
    bool forgive(uint64_t nanoseconds);

    // With BufferOptions::masks_ranks: masks a rank now. On return that rank and this rank's kernels have been
    // notified. Returns false if this rank has failed, and therefore masks none.
    bool mask(int rank);
    // The ranks known here to be masked in this generation.
    wire::RankMask masked() const;

    // Whether a rank is known to store nothing any more.
    bool gone(int rank) const;
    // Whether any ranks are left out.
    bool leaves_out() const { return mask_.first_difference({}) != wire::kMaxRanks; }
    // Recovery, in this order (P16). First, everything that this rank has launched in this generation is ended. Returns
    // false if that is impossible in time.
    bool stop_all(uint64_t nanoseconds);
    // Lets this rank's networks look up the endpoints of the ranks that they reach, all of which have made theirs.
    // Returns a rank whose endpoint cannot be found in time, or -1.
    int look_up_peers(uint64_t nanoseconds);
    // Ends everything posted, and makes the network anew for a generation, to the ranks with which this one
    // communicates, without those in `mask`.
    void connect(const wire::RankMask& mask, uint32_t generation);
    // Waits until the ranks in `mask` are known to store nothing any more. Returns one that still may, or -1.
    int wait_gone(const wire::RankMask& mask, uint64_t nanoseconds);
    // Waits until all ranks except those in `mask` have reached the same stage of the same attempt. A rank that finds
    // another in a later attempt joins that one, from connect() on.
    Meeting meet(const wire::RankMask& mask, uint64_t attempt, bool again, uint64_t nanoseconds);
    // Clears the signal words of a generation; called between the two meetings.
    void clear_words(uint32_t generation);
    // After the second meeting: publishes generation, number, and bank in a single store.
    void publish(uint32_t generation, const wire::RankMask& mask);

    // Applies to calls from now on.
    void set_timeout(uint64_t nanoseconds) { timeout_ns_ = nanoseconds; }

    // Announces whether this rank is compiling kernels: others may wait for it meanwhile.
    void set_compiling(bool compiling);
    std::vector<int> compiling_peers() const;
    // Sets the function that a long wait of this rank calls once for each peer that it finds compiling.
    void on_compiling_peer(std::function<void(const Call&, int peer)> tell) { tell_ = std::move(tell); }

    const std::shared_ptr<Arena>& arena() const { return arena_; }
    const Networks& networks() const { return networks_; }
    const std::vector<std::shared_ptr<Heap>>& heaps() const { return heaps_; }
    const BufferOptions& options() const { return options_; }
    uint64_t heap_base(int rank) const { return reinterpret_cast<uint64_t>(heaps_[static_cast<size_t>(rank)]->base()); }
    const NearParts& near_parts() const { return near_; }
    uint32_t generation() const { return generation_; }
    wire::FarWords far_words() const;

  private:
    bool untold() const override;
    std::function<bool(uint64_t)> leaving() const override;
    std::unique_ptr<Teller> teller() const;
    template <class T>
    std::shared_ptr<T> make_private(size_t count = 1) {
        return std::static_pointer_cast<T>(memory_->make_private(count * sizeof(T)));
    }

    template <class Kernel>
    static RuntimeShape shape_of(const typename Kernel::Args& args) {
        if constexpr (requires { Kernel::kOfAnyShape; })
            return {};
        else
            return args.shape;
    }
    template <class Kernel>
    BlockSizes block_of(const RuntimeShape& shape, uint32_t experts) const {
        return fitting<Kernel>(*launcher_, {static_cast<u32>(options_.ranks), experts, shape.topk_, launcher_->warps(),
                                            launcher_->copies_bytes(), static_cast<u32>(options_.ranks_per_node)});
    }
    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t bytes);
    u64* stages_place(const char* kernel, unsigned blocks, unsigned warps);
    void make_spare(size_t count);
    void wait_until(Call& call, const std::function<bool()>& ready);
    static bool ended(const Launcher& launcher, const Call& call);
    // Tells whether all kernels launched here so far have ended; for any thread, also when this object no longer
    // exists.
    std::function<bool()> all_ended() const;
    bool compare_with_peers(Call& call);
    // The lost peer found by the previous check of a wait.
    struct Lost {
        int peer = -1;
        bool left = false;
        bool operator==(const Lost&) const = default;
    };
    bool abort_if_lost(Lost& seen);
    int find_lost(bool left) const;
    // [ranks] an address for each rank that is mapped, otherwise null.
    std::vector<u8*> of_mapped(const std::function<u8*(int)>& address) const;
    std::vector<u8*> bases() const {
        return of_mapped([this](int rank) { return heaps_[static_cast<size_t>(rank)]->base(); });
    }
    std::vector<u8*> nears() const {
        return of_mapped([this](int rank) { return near_.of(rank); });
    }
    bool mapped(size_t rank) const { return options_.routes[rank] == fabric::kMapped; }
    bool present(int rank) const { return !mask_.has(static_cast<u32>(rank)); }
    std::vector<fabric::Route> routes(const wire::RankMask& mask) const;
    std::shared_ptr<Warden> new_warden() const;
    // The current warden; null without masks. Callers on other threads may keep it alive a little longer.
    std::shared_ptr<Warden> warden() const;
    void set_warden(std::shared_ptr<Warden> warden);
    void tell_failure(uint64_t word);
    Progress progress() const { return {options_.rank, heap_layout(options_), near_.of(options_.rank), far_words()}; }
    void write_context(uint64_t sequence);
    wire::Audience audience() const { return {options_.near_audience ? static_cast<u32>(options_.ranks_per_node) : 0}; }
    size_t slots_read() const { return heaps_.size() * static_cast<size_t>(options_.regions) * wire::kSlots; }
    void tell_of_compiling_peers(const Call& call, std::vector<int>& told) const;

    const BufferOptions options_;
    const std::vector<std::shared_ptr<Heap>> heaps_;
    const NearParts near_;
    const std::shared_ptr<Arena> arena_;
    const std::unique_ptr<Memory> memory_;
    StageRecord stages_{*memory_};
    const std::unique_ptr<ControlPlane> control_;
    const std::shared_ptr<Launcher> launcher_;
    std::atomic<uint64_t> latest_{0};                     // serial of the latest launch
    std::atomic<bool> left_{false};                       // leave() has been called
    std::atomic<uint64_t> launched_ns_{0};                // launched_ns()
    std::atomic<bool> in_graphs_{false};                  // some of its calls are part of graphs
    const std::shared_ptr<u8*> mapped_;                   // Context::peers.base; null if blocks keep it
    const std::shared_ptr<u8*> nears_;                    // Context::peers.nears; likewise
    const std::shared_ptr<fabric::Route> routes_;         // Context::peers.route
    const std::shared_ptr<u64> mapped_bytes_;             // Context::peers.mapped_bytes
    const std::shared_ptr<u64> base_;                     // Context::base
    const std::shared_ptr<fabric::Completion> farewell_;  // Context::farewell
    const std::shared_ptr<i64> remark_;                   // remark()
    const std::shared_ptr<u64> claimed_;                  // Context::claimed
    const std::shared_ptr<u64> suspects_;                 // Context::suspects
    const std::shared_ptr<u64> decisions_;                // Context::decisions
    const std::shared_ptr<u32> slots_read_;               // Context::slots_read
    const std::shared_ptr<FailureCount> failures_;
    const std::shared_ptr<Context> context_;
    uint64_t timeout_ns_;
    std::vector<std::shared_ptr<u32>> zero_words_;  // each larger than those before, which kernels may still use
    size_t zero_count_ = 0;                         // of the last
    uint64_t announced_ = 0;
    std::vector<u64> told_mapped_;  // the contents of mapped_bytes_
    uint32_t generation_ = 1;       // of Context::sequence
    wire::RankMask mask_{};         // Context::mask
    // Kept until retired. A failed call is kept forever, since agents may still hold its addresses; likewise a call in
    // a graph.
    struct Calls {
        std::mutex mutex;  // guards the list, and what ended() reads of a call
        std::vector<std::shared_ptr<Call>> in_use;
    };
    const std::shared_ptr<Calls> calls_ = std::make_shared<Calls>();
    struct Spare {
        std::shared_ptr<Ticket> ticket;
        std::shared_ptr<wire::Outcome> outcome;
        std::shared_ptr<i32> words;
        std::shared_ptr<u64> heap_bytes;
    };
    std::vector<Spare> spare_;  // from retired calls, or new
    std::function<void(const Call&, int)> tell_;
    std::atomic<bool> told_{false};  // the caller has been notified that this generation has failed
    uint64_t forgiven_ = 0;          // FailureCount::told() when this Buffer last left failures behind
    Lifelines lifelines_;
    const MakeWarden make_warden_;
    const MakeNetworks make_networks_;
    Networks networks_;  // this and the following members last, so that they stop first
    std::unique_ptr<Teller> teller_;
    mutable std::mutex warden_mutex_;  // guards the pointer
    std::shared_ptr<Warden> warden_;
};

}  // namespace deep_ep::host
