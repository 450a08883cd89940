// A thread of a kernel: its registers, call frames, local memory and program counter.
//
// It runs on a fiber of the executor, which schedules threads and implements barriers. A thread gives up its turn only
// at strong accesses, barriers and waits.
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "sim/executor/device_calls.h"
#include "sim/ptx/bulk_stores.h"
#include "sim/ptx/count/thread.h"
#include "sim/ptx/image.h"
#include "sim/ptx/order/barrier_clocks.h"
#include "sim/ptx/order/order.h"

namespace deep_ep::ptx {

class Block;

// Windows of the generic address space. Global memory has no window: its generic addresses are host addresses.
constexpr u64 kSharedWindow = 1ull << 60, kLocalWindow = 2ull << 60, kParamWindow = 3ull << 60;
constexpr u64 kWindowMask = 3ull << 60;

class Lane {
  public:
    // `arguments`: the kernel's arguments, laid out like its parameters.
    Lane(const Image& image, const Function& entry, Block& block, const void* arguments);
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    // Runs until the kernel returns. Throws PtxError.
    void run();

    template <class T>
    T get(const Operand& operand) const {
        if (operand.kind == OperandKind::kRegister) return as<T>(read(operand.index));
        return as<T>(value_of(operand));
    }
    template <class T>
    void set(const Operand& operand, T value) {
        if (operand.kind == OperandKind::kNothing) return;
        u64 bits = 0;
        if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
            bits = static_cast<u64>(static_cast<i64>(value));
        } else {
            std::memcpy(&bits, &value, sizeof(value));
        }
        write(operand.index, bits);
    }
    bool holds(const Operand& predicate) const { return get<bool>(predicate) != predicate.negated; }

    void jump(const Operand& label) { next_ = label.index; }
    void call(const Instruction& instruction);
    void leave();

    // Resolves an operand's address for a plain access. Fails if the `bytes` there are out of range, or are read before
    // they have been written.
    enum class Access { kRead, kWrite, kUpdate };
    u8* reach(const Operand& operand, Space space, u64 bytes, Access access);
    // The same, for an access that happens later or is not a plain one.
    u8* locate(const Operand& operand, Space space, u64 bytes, Access access);
    // Counts an access of the current instruction, if counting is on.
    void count_access(const u8* memory, u64 bytes, Access access);
    void count_load(const u8* memory, u64 bytes);  // a plain load into registers
    // Bulk copies into shared memory, and from there. The first returns when it was issued, for count_wait.
    u64 count_bulk_load(const u8* source, u64 bytes, Moment& arrives);
    void count_bulk_store(const u8* target, u64 bytes);
    void count_wait(u64 issued) {
        if (count_) count_->wait_for(issued);
    }
    // Before the SM's unit for bulk copies is used, which serves its threads by time.
    void turn_by_time() {
        if (time() != nullptr) turn();
    }
    // Null if no times are predicted.
    LaneTime* time() { return count_ && count_->time ? &*count_->time : nullptr; }
    // Other threads may run first: by time, all whose time is earlier.
    void turn() {
        if (const LaneTime* const spent = time()) cpu::spend(spent->cycles());
        cpu::switch_point(site());
    }
    // An access of a bulk copy to shared or global memory, ordered after `after`.
    void note_copy(const u8* memory, u64 bytes, bool writes, const Epoch& moment, const Clock& after,
                   Scope scope = Scope::kNone);
    // Null if the order of accesses is not watched.
    Actor* actor() { return actor_ ? &*actor_ : nullptr; }
    // An access to an mbarrier, which is a word in shared memory that the threads of the block share.
    void note_barrier(const u8* memory, bool writes);
    void fence_copies(bool of_global, bool of_shared) {
        if (actor_) actor_->fence_copies(of_global, of_shared);
    }
    void fence(Scope scope) {
        if (actor_) actor_->fence(scope);
    }
    // Scope and ordering of a strong access to a word that `locate` has returned.
    struct Strong {
        Scope scope;
        bool acquires, releases;
    };
    // Held across an access and the call that notes it.
    std::unique_lock<std::mutex> hold() {
        return order_ ? std::unique_lock(order_->mutex) : std::unique_lock<std::mutex>();
    }
    // A load of a word that holds `newest`. Returns the value that the load sees: an older one only if `may_be_old`,
    // which is for pure loads (not the load of an atomic).
    template <class T>
    T load_word(const T* word, T newest, const Strong& strong, bool may_be_old) {
        if (!actor_) return newest;
        return static_cast<T>(note_load(word, sizeof(T), newest, strong, may_be_old));
    }
    // A store that changes a word from `before` to `after`.
    template <class T>
    void store_word(const T* word, T before, T after, const Strong& strong, bool updates) {
        if (actor_) note_store(word, sizeof(T), {before, after, updates}, strong);
    }
    // Waits for other threads of the block at the barrier with this number, by calling `sync`.
    template <class Sync>
    auto sync(u64 barrier, Sync sync) {
        return meet(barrier, [&] {
            if (!actor_) return sync();
            BarrierClocks& clocks = clocks_of(barrier);
            const u64 round = clocks.arrive(actor_->clock);
            actor_->tick();
            const auto result = sync();
            clocks.leave(round, actor_->clock);
            return result;
        });
    }
    // The same without an order of memory: a thread only learns when the others have come.
    template <class Sync>
    auto meet(u64 barrier, Sync sync) {
        LaneTime* const mine = time();
        if (mine == nullptr) return sync();
        BarrierMoments& moments = moments_of(barrier);
        const u64 round = mine->cycles() > moments.latest().cycles ? moments.arrive(mine->here()) : moments.number();
        cpu::spend(mine->cycles());
        const auto result = sync();
        const bool of_warp = here().meets == Meets::kWarp;
        mine->join(moments.leave(round), of_warp ? machine::kWarpBarrier : machine::kBarrier);
        if (!of_warp) mine->count_barrier();
        return result;
    }
    // The generic address of an address in `space`.
    u64 generic(u64 address, Space space) const;

    // Counts nanosleeps since the last strong store.
    u32 sleep() { return sleeps_++; }
    void wake() { sleeps_ = 0; }

    Block& block() { return block_; }
    BulkStores& stores() { return stores_; }
    // Checks an aligned instruction: all threads of the warp must execute it together.
    void align(const Instruction& instruction);
    cpu::Site site() const;  // the line of CUDA C++
    const Instruction& here() const { return function().code[next_ - 1]; }
    [[noreturn]] void fail(const std::string& why) const;

  private:
    struct Frame {
        const Function* function;
        u32 next;  // the caller's instruction to return to
        const Instruction* called_by;
        size_t slots, parameters, local;  // where the frame's begin
    };

    template <class T>
    static T as(u64 bits) {
        if constexpr (std::is_same_v<T, bool>) {
            return bits != 0;
        } else {
            T value;
            std::memcpy(&value, &bits, sizeof(value));
            return value;
        }
    }

    const Function& function() const { return *frames_.back().function; }
    void enter(const Function& function, const Instruction* called_by);
    u64 read(u32 slot) const {
        const size_t place = frames_.back().slots + slot;
        if (__builtin_expect(!written_[place], 0)) unwritten();
        return registers_[place];
    }
    void write(u32 slot, u64 bits) {
        const size_t place = frames_.back().slots + slot;
        registers_[place] = bits;
        written_[place] = true;
    }
    [[noreturn]] void unwritten() const;
    u64 value_of(const Operand& operand) const;
    u64 special(SpecialRegister which) const;
    u8* part(std::vector<u8>& memory, u64 offset, u64 bytes, const char* what);
    u8* shared(u64 offset, u64 bytes, Access access);
    void count(const Instruction& instruction);
    BarrierClocks& clocks_of(u64 barrier);
    BarrierMoments& moments_of(u64 barrier);
    u64 note_load(const void* word, u64 bytes, u64 newest, const Strong& strong, bool may_be_old);
    std::vector<Word::Released> releases_of(const Made& access, bool releases) const;
    void note_store(const void* word, u64 bytes, const Word::Stored& stored, const Strong& strong);
    Made made(const void* memory, u64 bytes, Scope scope) const;
    bool is_own(const u8* memory) const;  // private to this thread
    Shadow& shadow_of(const void* memory);
    void check(const Made* earlier, bool writes) const;

    const Image& image_;
    Block& block_;
    u32 next_ = 0;
    std::vector<Frame> frames_;
    std::vector<u64> registers_;
    std::vector<u8> written_;
    std::vector<u8> parameters_, local_;
    BulkStores stores_;
    const std::shared_ptr<Order> order_ = Order::watched();
    std::optional<Actor> actor_;  // set if the order of accesses is watched
    const std::unique_ptr<ThreadCount> count_;
    u32 sleeps_ = 0;
    u64 aligned_ = 0;  // aligned instructions executed so far
};

}  // namespace deep_ep::ptx
