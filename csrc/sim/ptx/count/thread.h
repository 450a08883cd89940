// What a thread reports to its warp's counts: the instructions that it executes, when it must wait for its loads, and
// the time at which it executes them.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "sim/ptx/count/warp.h"
#include "sim/ptx/time/lane_time.h"

namespace deep_ep::ptx {

class ThreadCount {
  public:
    // `warp`: null if only times are asked for. `block`: null if none are.
    ThreadCount(Counts& counts, u64 launch, Counts::Kernel& kernel, WarpCount* warp, u32 lane, BlockTime* block)
        : counts_(counts), launch_(launch), kernel_(kernel), warp_(warp), lane_(lane) {
        if (block != nullptr) time.emplace(counts.memory(), *block, counts.begin_of(launch));
    }
    ~ThreadCount() {
        if (warp_ != nullptr) {
            wait();
            warp_->end(lane_);
        }
        if (time) counts_.end(launch_, time->here(), time->work());
    }
    ThreadCount(const ThreadCount&) = delete;
    ThreadCount& operator=(const ThreadCount&) = delete;

    // `registers`: where the registers of the function's frame begin. `all`: the instruction meets all threads of the
    // warp (or none).
    void execute(const Instruction& instruction, size_t registers, bool all) {
        if (time) time->execute(instruction, kernel_.costs[instruction.number], registers);
        ++kernel_.count.instructions[instruction.number].threads;
        if (warp_ == nullptr) return;
        if (!pending_.empty()) wait_where_used(instruction, registers);
        warp_->log(lane_).execute(instruction.number);
        if (instruction.meets == Meets::kNone || !all) return;
        if (instruction.meets == Meets::kBlock) warp_->meet_block(lane_);
        warp_->meet(lane_);
    }
    void access(const Instruction& instruction, size_t registers, const CountedAccess& access, TimedAccess::Kind kind) {
        if (warp_ != nullptr) warp_->log(lane_).access(access);
        if (!time) return;
        time->access(
            instruction, kernel_.costs[instruction.number], registers,
            {access.address, access.bytes, kind, instruction.scope != Scope::kNone, access.is_shared, access.is_peers});
    }
    // A bulk copy, which accesses memory by itself.
    void access(const CountedAccess& access) {
        if (warp_ != nullptr) warp_->log(lane_).access(access);
    }

    std::optional<LaneTime> time;

    // A load from global memory into registers. The thread waits for it when it first uses one of them.
    void load(const Instruction& instruction, size_t registers, u64 bytes) {
        if (warp_ == nullptr) return;
        add(instruction, bytes);
        for (u32 i = 0; i < instruction.vector; ++i) {
            if (instruction.operands[i].kind == OperandKind::kRegister) {
                pending_.push_back(registers + instruction.operands[i].index);
            }
        }
    }
    // A bulk copy into shared memory. Returns the number of waits so far: any later wait covers the copy too.
    u64 add(const Instruction& instruction, u64 bytes) {
        if (bytes_ == 0) first_ = instruction.number;
        bytes_ += bytes;
        if (bytes >= kRowBytes) row_bytes_ += bytes;
        return waits_;
    }
    void wait_for(u64 issued) {
        if (issued == waits_) wait();
    }
    void wait() {
        if (bytes_ == 0) return;
        ++waits_;
        InstructionCount& counted = kernel_.count.instructions[first_];
        ++counted.trips;
        counted.trip_bytes += bytes_;
        if (row_bytes_ != 0 && warp_ != nullptr) warp_->wait_for_rows(lane_, row_bytes_);
        bytes_ = row_bytes_ = 0;
        pending_.clear();
    }

  private:
    static constexpr u64 kRowBytes = 16;

    void wait_where_used(const Instruction& instruction, size_t registers) {
        const auto is_pending = [&](const Operand& operand) {
            if (operand.kind != OperandKind::kRegister && operand.kind != OperandKind::kAddress) return false;
            return std::find(pending_.begin(), pending_.end(), registers + operand.index) != pending_.end();
        };
        if (std::any_of(instruction.operands, instruction.operands + instruction.count, is_pending)) wait();
    }

    Counts& counts_;
    const u64 launch_;
    Counts::Kernel& kernel_;
    WarpCount* const warp_;
    const u32 lane_;
    std::vector<size_t> pending_;  // registers
    u64 bytes_ = 0, row_bytes_ = 0;
    u32 first_ = 0;
    u64 waits_ = 0;
};

}  // namespace deep_ep::ptx
