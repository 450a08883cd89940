#include "sim/ptx/order/others.h"

#include "sim/executor/executor.h"

namespace deep_ep::ptx {
namespace {

Made made(const observe::Accessor& by, const Actor& actor, const void* memory, u64 bytes, Scope scope) {
    return {actor.now(), by.rank, actor.block, scope, reinterpret_cast<u64>(memory), bytes, nullptr, 0, by.kind};
}

}  // namespace

std::string describe(const Made& made) {
    const std::string rank = "rank " + std::to_string(made.rank);
    if (made.module != nullptr) return "a thread of " + rank + " at " + made.module->describe(made.place);
    switch (made.kind) {
        case observe::Kind::kHost:
            return "the host of " + rank;
        case observe::Kind::kProxy:
            return "the proxy of " + rank;
        case observe::Kind::kNic:
            break;
    }
    return "the NIC of " + rank;
}

void Others::note(const observe::Accessor& by, const Actor& actor, const Made& access, bool writes) {
    const Made* const earlier = order->global(access.address, by.rank).note(writes, access, actor.clock);
    if (earlier == nullptr) return;
    throw cpu::SimtError("data race: " + describe(access) + (writes ? " writes" : " reads") + " memory accessed by " +
                         describe(*earlier));
}

u64 Others::load_word(const observe::Accessor& by, const void* word, u32 bytes, u64 newest,
                      const observe::Accessor* behind) {
    Actor& actor = order->other(by);
    const Made access = made(by, actor, word, bytes, Scope::kSystem);
    note(by, actor, access, false);
    Clock knows = actor.clock;
    if (behind != nullptr) knows.join(order->other(*behind).clock);
    cpu::Random* const random = behind != nullptr ? order->random() : nullptr;
    return order->global(access.address, by.rank).load(newest, true, access, knows, actor.clock, random);
}

void Others::look(const observe::Accessor& by, const void* word, u32 bytes) {
    const Actor& actor = order->other(by);
    note(by, actor, made(by, actor, word, bytes, Scope::kSystem), false);
}

void Others::store_word(const observe::Accessor& by, const void* word, u32 bytes, u64 before, u64 after, bool updates) {
    Actor& actor = order->other(by);
    const Made access = made(by, actor, word, bytes, Scope::kSystem);
    note(by, actor, access, true);
    order->global(access.address, by.rank).store({before, after, updates}, access, {{actor.clock, access}});
    actor.tick();
}

void Others::read(const observe::Accessor& by, const void* memory, u64 bytes) {
    const Actor& actor = order->other(by);
    note(by, actor, made(by, actor, memory, bytes, Scope::kNone), false);
}

void Others::write(const observe::Accessor& by, const void* memory, u64 bytes) {
    const Actor& actor = order->other(by);
    note(by, actor, made(by, actor, memory, bytes, Scope::kNone), true);
}

}  // namespace deep_ep::ptx
