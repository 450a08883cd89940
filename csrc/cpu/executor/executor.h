// The executor as the host sees it: launches kernels, waits for them, runs ranks as threads of one process.
//
// There is one executor per process. Each CUDA thread is a fiber; fibers run only while some host thread waits in here:
// the waiting thread drives them. Ranks of other processes are reached through shared memory alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace deep_ep::cpu {

// Nothing can ever run again. The message lists which thread waits where, and for what.
class DeadlockError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A kernel broke a rule of the SIMT machine. The message names the rule and the line.
class SimtError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Entry = void (*)(const void* args);  // body of one CUDA thread

constexpr size_t kMaxSharedBytes = 227 << 10;  // of a block, dynamic: a GPU's since Hopper

struct Launch {
    const char* name;  // must outlive the launch
    int rank;
    int stream;
    unsigned blocks, threads;
    size_t shared_bytes;  // dynamic shared memory per block
    Entry entry;
    const void* args;  // copied
    size_t args_bytes;
};

struct Schedule {
    uint64_t seed = 0;      // 0: first come, first served. Else all choices are drawn from it
    unsigned freeze = 512;  // one wake-up in `freeze` puts a whole warp to sleep for long; 0: never
};

// What a thread that drives kernels, outside a world, does besides. It waits for nothing, throws nothing and does not
// call the executor. A child that the process forks does not do it.
struct Helper {
    std::function<bool()> help;        // between their turns, and after the last one; -> whether it has done anything
    std::function<void()> leave = {};  // when it ceases to drive, and perhaps none does for long
};

struct WorldStats {
    uint64_t event_hash = 0;  // over every decision of the schedule
    uint64_t switches = 0;    // turns given to fibers
    uint64_t launches = 0;
    uint64_t peak_fibers = 0;  // of kernels running at once; ThreadSanitizer tells about 250 apart
    uint64_t collectives = 0;
    uint64_t barriers = 0;
    uint64_t clock_jumps = 0;  // times the virtual clock went to the next deadline because nothing could run
};

class Executor {
  public:
    static Executor& get();

    // Kernels. Launches of one (rank, stream) run one after the other, all others side by side with all blocks
    // resident. A kernel sees what the launching thread wrote; a thread that has waited for it sees what it wrote.
    int new_stream();                           // a number that no other stream has
    void release_stream(int rank, int stream);  // after its last kernel; a world's end does it too
    uint64_t launch(const Launch& launch);      // -> serial number
    bool finished(uint64_t serial) const;
    void synchronize(int rank, int stream);

    // A host thread waits until ready() (-> true) or until the clock has passed the deadline (-> false). Any waiting
    // thread may call ready(). The caller holds no lock that ready() or another rank's thread needs (such as the GIL).
    bool wait(const std::function<bool()>& ready, const char* what, uint64_t deadline_ns = UINT64_MAX);

    // Agents: daemon fibers that loop over cpu::wait_until. Removing one waits until it is idle, then unwinds it;
    // a failure of the executor has dropped it already, which is not told here, and signals are left for later:
    // destructors call this.
    int add_agent(int rank, std::string name, std::function<void()> body);
    void remove_agent(int id);

    // Once removed it is not called again.
    int add_helper(Helper helper);
    void remove_helper(int id);

    uint64_t random();  // the schedule's stream; 0 when first come, first served. For agents, and ranks of a world

    // A world: ranks as threads of one process. One of them runs at a time; the next is drawn from the seed. Fibers
    // run while all rank threads wait. The clock is virtual: it jumps to the next deadline when nothing can run.
    uint64_t world_begin(int ranks, Schedule schedule);  // -> the world's number
    // First call of each rank's thread: blocks until its turn comes. Given a number, throws unless that world is open.
    void world_enter(int rank, uint64_t number = 0);
    void world_leave(int rank);  // last call of each rank's thread
    // From a thread that is no rank's: every wait in that world, if it is still open, throws SimtError.
    void world_abort(uint64_t number, const std::string& why);
    // After all have left. Runs to its end what is still running, or drops it.
    WorldStats world_end(bool abandon = false);
    bool in_world() const;

    int new_event();
    void set_event(int id);
    void wait_event(int id, const char* what);  // the event stays set; ids are never reused within a world

    void set_schedule(Schedule schedule);  // outside a world; world_end restores it
    uint64_t now_ns();
    std::string last_stall() const;  // what the last jump of the clock found
    std::string dump() const;        // which thread waits where now

    // Memory that others access: owner's rank, or -1 for all. The exact builds refuse narrower scopes than kSystem
    // there (unless the caller is the owner).
    void share_memory(const void* begin, size_t bytes, int owner);
    void unshare_memory(const void* begin);

    // Called every 200 ms by a host thread that waits outside a world; what it throws leaves wait().
    void set_interrupt_check(std::function<void()> check);
    // The calling thread has just checked signals elsewhere: its next check is 200 ms from now.
    static void interrupts_are_checked();

    struct State;

  private:
    Executor();
    ~Executor();
    std::unique_ptr<State> state_;
};

}  // namespace deep_ep::cpu
