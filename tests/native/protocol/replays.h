// Calls whose kernels run again and again, like a graph's: some replays fail, the Buffer recovers, and the next replay
// must find its ticket fit (P16).
#pragma once

#include "draw.h"
#include "ranks.h"
#include "slow_memory.h"

namespace protocol::replays {

constexpr u32 kRecoveries = 5;

// Captures launches, and replays them.
class Graph final : public Forwarding {
  public:
    using Forwarding::Forwarding;

    void capture(bool begins) { capturing_ = begins; }
    void replay() {
        for (const Node& node : nodes_) {
            latest_ = launcher_->launch(node.kernel.c_str(), node.shape, node.blocks, node.warps, node.shared_bytes,
                                        node.args.data(), node.args.size());
        }
    }
    bool over() const { return launcher_->finished(latest_); }

    uint64_t launch(const char* kernel, const RuntimeShape& shape, unsigned blocks, unsigned warps, size_t shared_bytes,
                    const void* args, size_t args_bytes) override {
        if (!capturing_) return launcher_->launch(kernel, shape, blocks, warps, shared_bytes, args, args_bytes);
        const u8* bytes = static_cast<const u8*>(args);
        nodes_.push_back({kernel, shape, blocks, warps, shared_bytes, {bytes, bytes + args_bytes}});
        return 0;
    }
    bool finished(uint64_t serial) const override { return serial == 0 || Forwarding::finished(serial); }
    bool wait_for_device(uint64_t nanoseconds) override {
        return wait_for([this] { return over(); }, "replays", nanoseconds);
    }

  private:
    struct Node {
        std::string kernel;
        RuntimeShape shape;
        unsigned blocks, warps;
        size_t shared_bytes;
        std::vector<u8> args;
    };

    bool capturing_ = false;
    std::vector<Node> nodes_;
    u64 latest_ = 0;
};

inline void run(uint64_t seed, const Setup& setup) {
    World world;
    planted::run_world(kRanks, seed, [&](int r) {
        const u32 rank = static_cast<u32>(r);
        cpu::Executor& executor = cpu::Executor::get();
        std::shared_ptr<Graph> graph;
        Parts parts;
        Draw draw(seed);
        parts.memory =
            std::make_unique<SlowMemory>(r, Delays{1u << draw.below(10), 1u << draw.below(10)}, [] { return true; });
        parts.launcher = [&](std::shared_ptr<host::CpuLauncher> own) { return graph = std::make_shared<Graph>(own); };
        Buffer buffer(world, rank, setup, std::move(parts));
        Batch batch(buffer, 0);
        auto dispatched = batch.notify();
        batch.dispatch(*dispatched);
        end_well(buffer, dispatched);
        Output sums = batch.make_sums();
        graph->capture(true);
        const auto call = batch.combine(buffer, batch.recv_x, sums);
        graph->capture(false);

        for (u32 attempt = 1;; ++attempt) {
            graph->replay();
            executor.wait([&] { return graph->over(); }, "a replay");
            const wire::Failure failure = call->failure();
            expect(failure.mark == 0,
                   batch.whose() + "a replay after " + std::to_string(attempt - 1) +
                       " recoveries failed: " + wire::phase_name(static_cast<wire::Phase>(failure.phase)));
            batch.check_echo(sums);
            sums.check(batch.whose());
            std::fill(sums.data(), sums.data() + u64{batch.tokens} * kRowBytes, u8{0xee});
            buffer.meet(world);  // no rank aborts while a peer is still in an operation that has ended here
            if (attempt > kRecoveries) break;
            graph->replay();
            if (rank == 0) buffer.runtime().abort(wire::kException);
            buffer.recover();
        }
        batch.check_guards();
        buffer.meet(world);
    });
}

}  // namespace protocol::replays
