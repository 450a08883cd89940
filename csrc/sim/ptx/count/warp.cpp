#include "sim/ptx/count/warp.h"

#include <algorithm>
#include <set>

namespace deep_ep::ptx {
namespace {

constexpr u64 kSector = 32, kBank = 4, kBanks = 32, kWavefront = kBank * kBanks;

// Wavefronts of these accesses. Threads that together request 128 bytes are served at once; each pass over the banks
// then delivers one 4-byte word per bank to all threads that request it.
u64 wavefronts_of(const std::vector<CountedAccess>& accesses) {
    u64 all = 0;
    for (size_t begin = 0; begin < accesses.size();) {
        std::array<std::set<u64>, kBanks> words;
        const size_t count = std::max<u64>(kWavefront / std::max<u32>(accesses[begin].bytes, kBank), 1);
        const size_t end = std::min(accesses.size(), begin + count);
        for (; begin < end; ++begin) {
            const CountedAccess& access = accesses[begin];
            for (u64 at = access.address; at < access.address + access.bytes; at += kBank) {
                words[at / kBank % kBanks].insert(at / kBank);
            }
        }
        u64 most = 0;
        for (const auto& bank : words) most = std::max<u64>(most, bank.size());
        all += most;
    }
    return all;
}

// The fewest possible: all distinct words, spread evenly over the banks.
u64 min_wavefronts_of(const std::vector<CountedAccess>& accesses) {
    std::set<u64> words;
    for (const CountedAccess& access : accesses) {
        for (u64 at = access.address; at < access.address + access.bytes; at += kBank) words.insert(at / kBank);
    }
    return (words.size() + kBanks - 1) / kBanks;
}

u64 sectors_of(const std::vector<CountedAccess>& accesses, bool peers) {
    std::vector<u64> sectors;
    for (const CountedAccess& access : accesses) {
        if (access.is_shared || access.is_peers != peers) continue;
        const u64 first = access.address / kSector, last = (access.address + access.bytes - 1) / kSector;
        for (u64 sector = first; sector <= last; ++sector) sectors.push_back(sector);
    }
    std::sort(sectors.begin(), sectors.end());
    return static_cast<u64>(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
}

}  // namespace

WarpCount::~WarpCount() {
    ++kernel_.warps;
    u64 trips = 0;
    for (const ThreadLog& log : logs_) {
        kernel_.row_bytes += log.row_bytes_;
        trips = std::max(trips, log.row_trips_);
        kernel_.max_block_barriers = std::max(kernel_.max_block_barriers, log.block_barriers_);
    }
    kernel_.row_trips += trips;
    for (const auto& [number, interval] : open_) {  // left by threads that failed
        for (const auto& [execution, accesses] : interval.accesses) finish(execution.first, accesses);
    }
}

void WarpCount::meet(u32 lane) {
    put(lane);
    ++logs_[lane].interval_;
    finish();
}

void WarpCount::end(u32 lane) {
    put(lane);
    logs_[lane].has_ended_ = true;
    finish();
}

void WarpCount::put(u32 lane) {
    ThreadLog& log = logs_[lane];
    if (log.executed_.empty()) return;
    Interval& interval = open_[log.interval_];
    std::unordered_map<u32, u32> executions;
    size_t next = 0;
    for (const u32 executed : log.executed_) {
        const u32 instruction = executed >> 1, execution = ++executions[instruction];
        if ((executed & 1) == 0) continue;
        CountedAccess& access = log.accesses_[next++];
        access.lane = static_cast<u8>(lane);
        interval.accesses[{instruction, execution}].push_back(access);
    }
    for (const auto& [instruction, count] : executions) {
        InstructionCount& counted = kernel_.instructions[instruction];
        u32& most = interval.executions[instruction];
        if (count <= most) continue;
        counted.warps += count - most;
        most = count;
    }
    log.executed_.clear();
    log.accesses_.clear();
}

void WarpCount::finish() {
    u64 reached = ~u64{0};
    for (const ThreadLog& log : logs_) {
        if (!log.has_ended_) reached = std::min(reached, log.interval_);
    }
    while (!open_.empty() && open_.begin()->first < reached) {
        for (const auto& [execution, accesses] : open_.begin()->second.accesses) finish(execution.first, accesses);
        open_.erase(open_.begin());
    }
}

void WarpCount::finish(u32 instruction, std::vector<CountedAccess> accesses) {
    InstructionCount& counted = kernel_.instructions[instruction];
    if (accesses.front().is_shared) {
        std::sort(accesses.begin(), accesses.end(),
                  [](const auto& one, const auto& other) { return one.lane < other.lane; });
        counted.wavefronts += wavefronts_of(accesses);
        counted.min_wavefronts += min_wavefronts_of(accesses);
        return;
    }
    for (const CountedAccess& access : accesses) {
        counted.bytes += access.bytes;
        if (access.is_peers) counted.peer_bytes += access.bytes;
    }
    const u64 peers = sectors_of(accesses, true);
    counted.sectors += peers + sectors_of(accesses, false);
    counted.peer_sectors += peers;
}

}  // namespace deep_ep::ptx
