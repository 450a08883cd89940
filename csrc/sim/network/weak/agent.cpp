#include "sim/network/weak/agent.h"

#include <algorithm>
#include <stdexcept>

#include "device/device.h"
#include "sim/executor/executor.h"
#include "sim/nic/place.h"

namespace deep_ep::host {
namespace {

using device::Scope;

constexpr uint32_t kInFlight = 16;  // puts that may overtake each other
constexpr uint32_t kMaxDelay = 8;   // switch points by which a step may be delayed
constexpr u64 kCutBytes = 64;       // size of a cut; long pieces have a few longer cuts
constexpr uint32_t kMaxCuts = 16;   // per put

// A part of a put that is copied in one step.
struct Cut {
    const uint8_t* source;
    uint8_t* target;
    u64 bytes;
};

struct Put {
    fabric::WeakCommand command;
    Cut cuts[kMaxCuts];
    uint32_t left;
};

std::unique_ptr<Network> make(const NetworkPlace& place) {
    if (!place.kernels_on_cpu) throw std::invalid_argument("the weak network needs kernels on the CPU: expected NICs");
    return std::make_unique<WeakAgent>(place);
}
[[maybe_unused]] const MakeNetwork made_known = make_network<fabric::WeakQueue> = make;

}  // namespace

WeakAgent::WeakAgent(const NetworkPlace& place)
    : place_(place), heaps_(place_.heaps), local_(heaps_[static_cast<size_t>(place.rank)]) {
    agent_ = cpu::Executor::get().add_agent(place.rank, "weak fabric", [this] { serve(); });
}

WeakAgent::~WeakAgent() { cpu::Executor::get().remove_agent(agent_); }

void WeakAgent::serve() {
    cpu::Executor& executor = cpu::Executor::get();
    const auto random = [&executor](uint32_t bound) { return static_cast<uint32_t>(executor.random() % bound); };
    Put puts[kInFlight];
    uint32_t flying = 0;
    u64 taken = 0;
    const auto next_ready = [&] {
        // Pairs with the posting thread's release: the command and the data its warp has built in the heap are visible.
        return device::load_acquire<Scope::kSystem>(&queue_.commands[taken % fabric::WeakQueue::kCapacity].ready) ==
               taken + 1;
    };
    for (;;) {
        if (flying == 0) cpu::wait_until(next_ready, "weak fabric: a put");
        while (flying < kInFlight && next_ready()) {
            Put& put = puts[flying++];
            put.command = queue_.commands[taken % fabric::WeakQueue::kCapacity];
            // Gives the slot back to posting threads, which acquire `taken`.
            device::store_release<Scope::kSystem>(&queue_.taken, ++taken);
            put.left = 0;
            for (uint32_t i = 0; i < put.command.count; ++i) {
                const fabric::Piece& piece = put.command.pieces[i];
                const u64 share = piece.bytes / (kMaxCuts / fabric::kMaxPieces) / kCutBytes * kCutBytes + kCutBytes;
                for (u64 at = 0; at < piece.bytes; at += share) {
                    put.cuts[put.left++] = {local_ + piece.source + at, heaps_[put.command.to] + piece.target + at,
                                            std::min(share, piece.bytes - at)};
                }
            }
        }
        for (uint32_t delay = random(kMaxDelay); delay != 0; --delay) cpu::yield();
        // One step of one put: a cut or, once all of them are copied, the signal.
        Put& put = puts[random(flying)];
        if (place_.closing(put.command.to).closed()) {
            // As below, except that none of the put arrives.
            device::add_release<Scope::kSystem>(&put.command.completion->completed, 1ull);
            put = puts[--flying];
            continue;
        }
        if (put.left != 0) {
            std::swap(put.cuts[random(put.left)], put.cuts[put.left - 1]);
            const Cut& cut = put.cuts[--put.left];
            nic::place(cut.target, cut.source, cut.bytes);
            place_.closing(put.command.to).placed();
            continue;
        }
        // The receiver acquires the word and then reads this put's pieces; the word says nothing about other puts.
        device::add_release<Scope::kSystem>(reinterpret_cast<u64*>(heaps_[put.command.to] + put.command.word_offset),
                                            wire::kUnit);
        // The sender acquires this and may then overwrite the source of the pieces.
        device::add_release<Scope::kSystem>(&put.command.completion->completed, 1ull);
        put = puts[--flying];
    }
}

}  // namespace deep_ep::host
