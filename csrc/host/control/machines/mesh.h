// The connections of one rank's process to the ranks on other machines, one for each pair. A dedicated thread serves
// them, so that messages arrive and a silent machine is detected whatever the rank's other threads do.
//
// A rank whose connection ends has ended: the death of its process closes it. A machine from which nothing arrives for
// kSilentNs while its connections stay open is cut off, has failed, or has all its ranks stopped; its connections are
// closed here. Nothing is concluded if a single rank is stopped: waits for it have their own bounds. Time in which this
// process itself did not run does not count.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "host/control/machines/link.h"

namespace deep_ep::host {

class Mesh {
  public:
    struct End {
        int rank;
        int socket;           // see Link
        std::string machine;  // identifies the machine
        TagKey own, theirs;   // see Link
    };
    enum class State { kHeard, kEnded, kSilent, kUnheard };  // kUnheard: the peer has heard nothing from this rank

    // Receives the messages of other ranks, in the mesh's thread.
    class Listener {
      public:
        virtual ~Listener() = default;
        virtual wire::control::Beat own_beat() = 0;
        virtual void beat(int from, const wire::control::Beat& beat) = 0;
        virtual void abort(const wire::control::Abort& abort) = 0;
        virtual void stage(int from, const wire::RecoveryWord& stage) = 0;
        virtual void address(int from, const wire::NetworkAddress& address) = 0;
    };

    explicit Mesh(const std::vector<End>& ends);
    ~Mesh();
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;

    std::vector<int> ranks() const;
    bool connects(int rank) const { return peers_.contains(rank); }
    // Returns kHeard also for ranks that the mesh does not connect.
    State state(int rank) const;

    // Null removes the listener, which is not called after the return. Earlier messages are kept for the first
    // listener.
    void listen(Listener* listener);
    // Sends to all connected ranks, to each in the order of the calls.
    template <class Payload>
    void tell(wire::control::Kind kind, const Payload& payload) {
        tell(kind, &payload, sizeof(payload));
    }
    // Sends a beat ahead of schedule.
    void tell_beat();
    // Waits until everything that this rank has sent so far is in place at all connected ranks, for at most
    // `nanoseconds`.
    void confirm(u64 nanoseconds);

    // Sends a message to one rank. Messages arrive in order.
    void send(int rank, const std::string& message);
    // Takes the oldest message that has arrived from a rank, if any.
    std::optional<std::string> receive(int rank);
    // Whether a message has arrived, or the rank is no longer connected.
    bool has_news(int rank) const;
    // A descriptor that is readable if a message has arrived or a state has changed since the last clear_news().
    int news() const { return news_; }
    void clear_news();

    // Closes the connection to a rank.
    void drop(int rank);
    // Closes a forked child's copies, so that the parent's connections end with the parent.
    void close_in_child();

  private:
    struct Told {
        wire::control::Kind kind;
        std::string payload;
    };
    struct Peer {
        Peer(const End& end, size_t machine) : machine(machine), link(end.socket, end.own, end.theirs) {}

        const size_t machine;
        Link link;
        State state = State::kHeard, comes_to = State::kHeard;  // as shown, and as it will be shown
        u64 heard_ns = 0;                                       // 0: it may still be meeting others
        u64 answered = 0;
        bool waits_for_room = false;  // the connection cannot accept all unsent data
        std::deque<std::string> messages;
        std::deque<Told> told;  // not yet passed on
    };
    // Owns a descriptor. Throws std::system_error if it could not be created.
    class Descriptor {
      public:
        Descriptor(int descriptor, const char* what);
        ~Descriptor();
        Descriptor(const Descriptor&) = delete;
        Descriptor& operator=(const Descriptor&) = delete;
        operator int() const { return descriptor_; }

      private:
        const int descriptor_;
    };

    void tell(wire::control::Kind kind, const void* payload, size_t bytes);
    Peer* find(int rank) const;  // null if the mesh does not connect the rank
    void serve();
    void serve_until_stopped();
    std::vector<int> wait(u64 nanoseconds);
    void watch(int rank, Peer& peer, int operation);
    void take(int rank);
    void take(Peer& peer, wire::control::Kind kind, std::string_view payload);
    void pass_on(int from);  // with `listening_` held
    void pass_on(int from, const Told& told);
    void add_beats();
    void send_all();
    void judge(u64 now);
    bool is_quiet(const Peer& peer, u64 now) const;
    void end(Peer& peer, State state);
    void show_end(Peer& peer);
    static void set(int event);

    std::map<int, std::unique_ptr<Peer>> peers_;  // by rank; the map itself never changes
    size_t machines_ = 0;
    mutable std::mutex mutex_;  // guards the contents of the peers
    std::condition_variable answered_;
    u64 asked_ = 0;
    std::vector<int> unsent_;  // ranks with frames added since the last send
    std::atomic<bool> beat_due_{true};
    std::mutex listening_;  // held while the listener is called; taken before `mutex_`
    Listener* listener_ = nullptr;
    u64 resumed_ns_ = 0;  // when the thread last resumed after a pause; used by the thread alone
    const Descriptor wake_, news_, ready_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace deep_ep::host
