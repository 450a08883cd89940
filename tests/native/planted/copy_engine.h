// An agent that copies for a kernel, like a DMA engine or a NIC: it takes commands from a queue, copies, and raises a
// flag.
#pragma once

#include "../program.h"

namespace planted::copy_engine {

constexpr u32 kCopies = 24, kWords = 64, kSlots = 4;

struct Engine {
    struct Command {
        u64 ready = 0;  // number of the command in the slot, from 1
        const u32* source = nullptr;
        u32* target = nullptr;
    };
    Command commands[kSlots];
    u64 done = 0;     // for the sender: its source may be used again
    u64 arrived = 0;  // for the receiver: the data is there
};

inline void serve(Engine& engine) {
    for (u64 number = 1;; number++) {
        Engine::Command& command = engine.commands[number % kSlots];
        cpu::wait_until([&] { return load_acquire<Scope::kSystem>(&command.ready) == number; }, "a command");
        for (u64 delay = Executor::get().random() % 8; delay; delay--) cpu::yield();
        for (u32 i = 0; i < kWords; i++) command.target[i] = command.source[i];
        if (bug("relaxed flag"))
            add_relaxed<Scope::kSystem>(&engine.arrived, 1);
        else
            add_release<Scope::kSystem>(&engine.arrived, 1);
        add_release<Scope::kSystem>(&engine.done, 1);
    }
}

struct Args {
    Engine* engine;
    u32* source;  // [kWords]
    u32* target;  // [kCopies][kWords]
    u32* out;     // [kCopies][kWords]
};

DEEP_EP_KERNEL void send(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    for (u32 copy = 0; copy < kCopies; copy++) {
        if (lane() == 0 && !bug("source reused")) {
            WaitNote note{"the copy before", -1, copy, &a.engine->done};
            spin_until([&] { return load_acquire<Scope::kSystem>(&a.engine->done) >= copy; }, cpu::kForever, &note);
        }
        __syncwarp();
        for (u32 i = lane(); i < kWords; i += kWarpSize) a.source[i] = copy * 1000 + i;
        __syncwarp();
        if (lane() != 0) continue;
        Engine::Command& command = a.engine->commands[(copy + 1) % kSlots];
        WaitNote note{"a slot", -1, copy + 1, &a.engine->done};
        spin_until([&] { return load_acquire<Scope::kSystem>(&a.engine->done) + kSlots > copy; }, cpu::kForever, &note);
        command.source = a.source;
        command.target = a.target + copy * kWords;
        if (bug("relaxed post"))
            store_relaxed<Scope::kSystem>(&command.ready, copy + 1);
        else
            store_release<Scope::kSystem>(&command.ready, copy + 1);
    }
}

DEEP_EP_KERNEL void receive(const void* args) {
    const Args& a = *static_cast<const Args*>(args);
    for (u32 copy = 0; copy < kCopies; copy++) {
        if (lane() == 0) {
            WaitNote note{"a copy", 0, copy + 1, &a.engine->arrived};
            spin_until([&] { return load_acquire<Scope::kSystem>(&a.engine->arrived) > copy; }, cpu::kForever, &note);
        }
        __syncwarp();
        for (u32 i = lane(); i < kWords; i += kWarpSize) a.out[copy * kWords + i] = a.target[copy * kWords + i];
    }
}

inline void run(uint64_t seed) {
    Engine engine;
    std::vector<u32> source(kWords), target(kCopies * kWords), out(kCopies * kWords);
    const Args args{&engine, source.data(), target.data(), out.data()};
    run_world(2, seed, [&](int rank) {
        Executor& executor = Executor::get();
        if (rank == 0) {
            const int agent = executor.add_agent(0, "copy engine", [&] { serve(engine); });
            launch("send", 0, 1, 1, send, args);
            executor.synchronize(0, 0);
            executor.remove_agent(agent);
            return;
        }
        launch("receive", 1, 1, 1, receive, args);
        executor.synchronize(1, 0);
        for (u32 i = 0; i < kCopies * kWords; i++)
            expect(out[i] == i / kWords * 1000 + i % kWords, "copy " + std::to_string(i / kWords) + " is wrong");
    });
}

}  // namespace planted::copy_engine
