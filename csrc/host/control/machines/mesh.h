// The connections of one rank's process to the ranks on other machines, each to each: a thread serves them, so that
// what they tell arrives, and a machine that has fallen silent is found, whatever the rank's own threads do.
//
// A rank whose connection ends has ended: its process's death closes it. A machine of which nothing comes for
// kSilentNs, while its connections stay open, is cut off, or has failed, or all its ranks are stopped; then they are
// closed here. Of a rank that alone is stopped nothing is concluded: waits for it have their own bounds. Time in which
// this process itself did not run does not count.
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
        std::string machine;  // the same for ranks of the same one
        TagKey own, theirs;   // see Link
    };
    enum class State { kHeard, kEnded, kSilent, kUnheard };  // kUnheard: it is the one that heard nothing from here

    // What takes what other ranks tell, in the mesh's thread.
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
    // kHeard also for ranks that it does not connect.
    State state(int rank) const;

    // Null takes it away: it is not called after this has returned. What was told before is kept for the first one.
    void listen(Listener* listener);
    // To all ranks that are heard, in this order for each.
    template <class Payload>
    void tell(wire::control::Kind kind, const Payload& payload) {
        tell(kind, &payload, sizeof(payload));
    }
    // Sends a beat before its time is due.
    void tell_beat();
    // Until all that this rank has told so far is in place at all ranks that are heard, or so long.
    void confirm(u64 nanoseconds);

    // Messages, for one rank, in order.
    void send(int rank, const std::string& message);
    // The oldest one that has come from a rank; none: none has yet.
    std::optional<std::string> receive(int rank);
    // Whether one has come, or the rank is heard no longer.
    bool has_news(int rank) const;
    // Readable when a message has come or a state has changed, since the last clear_news().
    int news() const { return news_; }
    void clear_news();

    // Let go of a rank.
    void drop(int rank);
    // Of a forked child's copy: its parent's connections end with the parent alone.
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
        State state = State::kHeard, comes_to = State::kHeard;  // as it is shown, and will be
        u64 heard_ns = 0;                                       // 0: it may still be meeting others
        u64 answered = 0;
        bool waits_for_room = false;  // in the connection, to send
        std::deque<std::string> messages;
        std::deque<Told> told;  // not passed on yet
    };
    // A descriptor that is closed with this. Throws std::system_error if it could not be made.
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
    Peer* find(int rank) const;  // null: it connects none such
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

    std::map<int, std::unique_ptr<Peer>> peers_;  // by rank; the map stays as it is
    size_t machines_ = 0;
    mutable std::mutex mutex_;  // of what they hold
    std::condition_variable answered_;
    u64 asked_ = 0;
    std::vector<int> unsent_;  // ranks, to which something has been told since it was last sent
    std::atomic<bool> beat_due_{true};
    std::mutex listening_;  // held while the listener is called; taken before the other
    Listener* listener_ = nullptr;
    u64 resumed_ns_ = 0;  // when the thread last ran again after it had not; its own
    const Descriptor wake_, news_, ready_;
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace deep_ep::host
