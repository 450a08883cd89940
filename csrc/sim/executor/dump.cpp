#include "sim/executor/dump.h"

#include <map>
#include <tuple>

#include "device/device.h"
#include "sim/executor/misuse.h"

namespace deep_ep::cpu {

namespace {

constexpr size_t kMaxGroups = 64;

// Threads that wait at the same place for the same thing share a line. Sorted by rank, kernel, block, warp.
using Group = std::tuple<int, std::string, unsigned, unsigned, std::string>;

std::string wait_of(const Fiber& fiber) {
    std::string text;
    switch (fiber.state) {
        case State::kReady:
            text = "ready, last ";
            break;
        case State::kPolling:
            text = "waits: ";
            break;
        case State::kBarrier:
            text = "barrier: ";
            break;
        case State::kCollective:
            text = "collective: ";
            break;
        case State::kFailed:
            return "broke a rule";
        case State::kDone:
            return "exited";
    }
    const device::WaitNote* note = fiber.state == State::kPolling ? fiber.note : nullptr;
    text += note && note->what ? note->what : fiber.what;
    if (note) {
        if (note->peer >= 0) text += ", peer " + std::to_string(note->peer);
        if (note->word) {
            text += ", expected " + std::to_string(note->expected);
            text += ", sees " + std::to_string(__atomic_load_n(note->word, __ATOMIC_RELAXED));
        }
    }
    if (fiber.site.file) text += " at " + to_string(fiber.site);
    return text;
}

std::string format(const std::map<Group, unsigned>& groups) {
    std::string text;
    size_t shown = 0;
    for (const auto& [group, count] : groups) {
        if (shown++ == kMaxGroups) {
            text += "  ... and " + std::to_string(groups.size() - kMaxGroups) + " more groups\n";
            break;
        }
        const auto& [rank, kernel, block, warp, wait] = group;
        text += "  rank " + std::to_string(rank) + ", " + kernel;
        if (kernel.rfind("agent ", 0) != 0)
            text += ", block " + std::to_string(block) + ", warp " + std::to_string(warp) + ": " +
                    std::to_string(count) + (count == 1 ? " thread" : " threads");
        text += ": " + wait + "\n";
    }
    return text;
}

}  // namespace

std::string to_string(Site site) { return std::string(site.file ? site.file : "?") + ":" + std::to_string(site.line); }

std::string describe(const Fiber& fiber) {
    std::string text = "rank " + std::to_string(rank_of(fiber)) + ", ";
    if (fiber.agent) return text + "agent " + fiber.agent->name;
    const Block& block = *fiber.block;
    return text + block.grid->launch.name + ", block " + std::to_string(block.index) + ", thread " +
           std::to_string(fiber.thread);
}

std::string dump_fibers(const Scheduler& scheduler) {
    std::map<Group, unsigned> groups;
    size_t pending = 0;
    scheduler.streams.for_each([&](const Stream& stream) {
        pending += stream.pending.size();
        if (!stream.running) return;
        const Launch& launch = stream.grid.launch;
        for (size_t i = 0; i < stream.grid.size(); i++) {
            const Fiber& fiber = stream.grid.fibers[i];
            if (fiber.state == State::kDone) continue;
            groups[{launch.rank, launch.name, fiber.block->index, fiber.thread / kWarpWidth, wait_of(fiber)}]++;
        }
    });
    for (const auto& agent : scheduler.agents())
        groups[{agent->rank, "agent " + agent->name, 0, 0, wait_of(agent->fiber)}]++;
    std::string text = format(groups);
    if (pending) text += "  launches queued behind these: " + std::to_string(pending) + "\n";
    return text;
}

}  // namespace deep_ep::cpu
