#include "sim/executor/streams.h"

#include <cstring>
#include <utility>

#include "observe/timeline.h"

namespace deep_ep::cpu {

void Stream::enqueue(const Launch& launch, u64 serial) {
    if (free_args_.empty()) free_args_.emplace_back();
    pending.push_back({launch, serial, std::move(free_args_.back())});
    free_args_.pop_back();
    const Args& args = pending.back().args;
    std::memcpy(args.data(), launch.args, launch.args_bytes);
    tsan::as(tsan::host_fiber, [&] { args.launched().open(); });
    last_enqueued = serial;
}

void Stream::start(void (*entry)()) {
    PendingLaunch& next = pending.front();
    grid.launch = next.launch;
    grid.serial = next.serial;
    std::swap(grid.args, next.args);
    free_args_.push_back(std::move(next.args));
    pending.pop_front();
    running = true;
    grid.began = observe::timeline::now();
    kernels++;

    set_up_blocks();
    set_up_fibers(entry);
}

void Stream::set_up_blocks() {
    const Launch& launch = grid.launch;
    grid.live_blocks = launch.blocks;
    grid.blocks.assign(launch.blocks, Block{});
    const size_t pitch = ((launch.shared_bytes + 127) & ~size_t{127}) + kMaxStaticShared;
    if (shared_.size() < pitch * launch.blocks) shared_ = Pages(pitch * launch.blocks);
    for (unsigned b = 0; b < launch.blocks; b++) {
        Block& block = grid.blocks[b];
        block.grid = &grid;
        block.index = b;
        block.live = launch.threads;
        block.shared = shared_.data() + b * pitch;
        if (kExact) std::memset(block.shared, kPoison, launch.shared_bytes);
    }
}

void Stream::set_up_fibers(void (*entry)()) {
    const unsigned threads = grid.launch.threads;
    const unsigned warps_per_block = (threads + kWarpWidth - 1) / kWarpWidth;
    const size_t total = grid.size();
    grid.warps.assign(size_t{grid.launch.blocks} * warps_per_block, Warp{});
    if (grid.fibers.size() < total) grid.fibers.resize(total);
    stacks_.reserve(total);
    while (kTsan && tsan_fibers_.size() < total) tsan_fibers_.push_back(tsan::create_fiber());
    for (size_t i = 0; i < total; i++) {
        Fiber& fiber = grid.fibers[i];
        fiber = Fiber{};
        fiber.thread = static_cast<u32>(i % threads);
        fiber.lane = fiber.thread % kWarpWidth;
        fiber.block = &grid.blocks[i / threads];
        fiber.warp = &grid.warps[i / threads * warps_per_block + fiber.thread / kWarpWidth];
        fiber.warp->live |= 1u << fiber.lane;
        fiber.warp->lanes[fiber.lane] = &fiber;
        fiber.stack_low = stacks_.low(i);
        fiber.stack_size = stacks_.size(i);
        if (kTsan) fiber.tsan_fiber = tsan_fibers_[i];
        context_init(fiber.context, fiber.stack_low, fiber.stack_size, entry);
    }
}

void Stream::finish() {
    if (grid.began != 0) {
        observe::timeline::add({observe::timeline::Kind::kKernel, grid.launch.rank, -1,
                                static_cast<u32>(grid.launch.stream), 0, 0, grid.began, observe::timeline::now(),
                                grid.launch.blocks, nullptr, grid.launch.name});
    }
    running = false;
    finished.store(grid.serial, std::memory_order_release);
}

void Stream::abandon() {
    for (PendingLaunch& launch : pending) free_args_.push_back(std::move(launch.args));
    pending.clear();
    if (running) {
        forget_fibers();
        stacks_.forget();
    }
    running = false;
    finished.store(last_enqueued, std::memory_order_release);
}

void Stream::forget_fibers() {
    for (void* fiber : tsan_fibers_) tsan::destroy_fiber(fiber);
    tsan_fibers_.clear();
}

}  // namespace deep_ep::cpu
