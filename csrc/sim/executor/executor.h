// The executor as seen by the host: it launches kernels, waits for them, and runs ranks as threads of one process.
//
// There is one executor per process. Each CUDA thread is a fiber. Fibers run only while a host thread waits in here:
// the waiting thread drives them. Ranks in other processes are reached through shared memory alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace deep_ep::cpu {

// Nothing can ever run again. The message lists where each thread waits, and for what.
class DeadlockError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A kernel has broken a rule of the SIMT machine. The message names the rule and the line.
class SimtError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Entry = void (*)(const void* args);  // body of one CUDA thread

constexpr size_t kMaxSharedBytes = 227 << 10;  // dynamic shared memory per block, as on GPUs since Hopper

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
    uint64_t seed = 0;      // 0: first come, first served; otherwise all choices are drawn from it
    unsigned freeze = 512;  // one wake-up in `freeze` freezes a whole warp for a long time; 0: never
    bool by_time = false;   // among kernels' threads, one that has spent least time goes first, whatever the seed
};

// Extra work for a thread that drives kernels outside a world. It must not wait, throw or call the executor. It is not
// run in forked children.
struct Helper {
    std::function<bool()> help;        // between turns, and after the last; returns whether it has done anything
    std::function<void()> leave = {};  // when the thread stops driving; perhaps no thread drives for a long time
};

struct WorldStats {
    uint64_t event_hash = 0;  // over every decision of the schedule
    uint64_t switches = 0;    // turns given to fibers
    uint64_t launches = 0;
    uint64_t peak_fibers = 0;  // of kernels running at once; ThreadSanitizer can distinguish about 250
    uint64_t collectives = 0;
    uint64_t barriers = 0;
    uint64_t clock_jumps = 0;  // how often the virtual clock jumped to the next deadline because nothing could run
};

class Executor {
  public:
    static Executor& get();
    // How many lanes the warps of this build have.
    static unsigned warp_size();

    // Kernels. Launches on one (rank, stream) run one after the other; all others run concurrently with all blocks
    // resident. A kernel sees what the launching thread wrote; a thread that has waited for it sees what it wrote.
    int new_stream();                           // returns an unused number
    void release_stream(int rank, int stream);  // after its last kernel; the end of a world does it too
    uint64_t launch(const Launch& launch);      // returns the serial number
    bool finished(uint64_t serial) const;
    void synchronize(int rank, int stream);

    // Waits on a host thread until ready() returns true, or until the clock has passed the deadline; returns whether it
    // is ready. Any waiting thread may call ready(). The caller must not hold a lock that ready() or the thread of
    // another rank needs (such as the GIL).
    bool wait(const std::function<bool()>& ready, const char* what, uint64_t deadline_ns = UINT64_MAX);

    // Agents: daemon fibers that loop over cpu::wait_until. remove_agent waits until the agent is idle, then unwinds
    // it. Since destructors call it, it does not report a failure of the executor (which has dropped the agent
    // already), and it does not check signals.
    int add_agent(int rank, std::string name, std::function<void()> body);
    void remove_agent(int id);

    // A removed helper is not called again.
    int add_helper(Helper helper);
    void remove_helper(int id);

    // Draws from the schedule; 0 if it is first come, first served. For agents, and ranks of a world.
    uint64_t random();

    // A world: ranks as threads of one process. One of them runs at a time; the next is drawn from the seed. Fibers
    // run while all rank threads wait. The clock is virtual: it jumps to the next deadline when nothing can run.
    uint64_t world_begin(int ranks, Schedule schedule);  // returns the number of the world
    // The first call by the thread of each rank: blocks until its turn. Given a number, throws unless that world is
    // open.
    void world_enter(int rank, uint64_t number = 0);
    void world_leave(int rank);  // the last call by the thread of each rank
    // Called by a thread that belongs to no rank: every wait in that world, if it is still open, throws SimtError.
    void world_abort(uint64_t number, const std::string& why);
    // Called after all ranks have left. Completes the kernels that are still running, or drops them.
    WorldStats world_end(bool abandon = false);
    bool in_world() const;

    int new_event();
    void set_event(int id);
    void wait_event(int id, const char* what);  // the event stays set; ids are never reused within a world

    void set_schedule(Schedule schedule);  // outside a world; world_end restores it
    // Whether schedules, from this one on, are by time.
    void schedule_by_time(bool on);
    uint64_t now_ns();
    std::string last_stall() const;  // the dump at the last jump of the clock to a kernel's deadline
    std::string dump() const;        // where each thread waits now

    // Declares memory that others access. `owner`: the owner's rank, or -1 for all. There the exact builds refuse
    // scopes narrower than kSystem (unless the caller is the owner).
    void share_memory(const void* begin, size_t bytes, int owner);
    void unshare_memory(const void* begin);
    // Declares host memory that kernels of GPUs would have mapped: under a random schedule, a read-modify-write there
    // is atomic with respect to other kernels only; a host's store in the middle of it is lost.
    void map_host_memory(const void* begin, size_t bytes);
    void unmap_host_memory(const void* begin);

    // A host thread that waits outside a world calls `check` every 200 ms; its exceptions propagate out of wait().
    void set_interrupt_check(std::function<void()> check);
    // To be called when the calling thread has just checked signals elsewhere: its next check is 200 ms from now.
    static void interrupts_are_checked();

    struct State;

  private:
    Executor();
    ~Executor();
    std::unique_ptr<State> state_;
};

}  // namespace deep_ep::cpu
