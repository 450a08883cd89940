#include "interpret.h"

#include <cstdio>
#include <cstdlib>

#include "sim/ptx/kernel.h"
#include "sim/ptx/order/order.h"

namespace driver_double {

namespace ptx = deep_ep::ptx;

struct Program {
    explicit Program(const char* text) : image(ptx::parse(text)) {}
    const ptx::Image image;
};

namespace {

std::shared_ptr<ptx::Order> watched() {
    static const bool asked = [] {
        const char* const seed = std::getenv("DOUBLE_WATCH");
        if (seed != nullptr) ptx::Order::watch(true, std::strtoull(seed, nullptr, 10));
        return true;
    }();
    static_cast<void>(asked);
    return ptx::Order::watched();
}

}  // namespace

std::shared_ptr<const Program> load_ptx(const char* text) {
    try {
        return std::make_shared<const Program>(text);
    } catch (const ptx::PtxError& error) {
        std::fprintf(stderr, "libcuda (stand-in): %s\n", error.what());
        return nullptr;
    }
}

bool has(const Program& program, const std::string& symbol) {
    return program.image.module().function_numbers.count(symbol) != 0;
}

void interpret(const Program& program, const std::string& symbol, int rank, unsigned row, deep_ep::cpu::Launch& launch,
               std::string& held) {
    ptx::prepare(launch, held, program.image, symbol, {static_cast<deep_ep::u32>(rank), row});
}

void note_memory(const void* memory, size_t bytes) {
    const auto order = watched();
    if (order == nullptr) return;
    const std::lock_guard<std::mutex> lock(order->mutex);
    order->add_heap(reinterpret_cast<deep_ep::u64>(memory), bytes);
}

void drop_memory(const void* memory) {
    const auto order = watched();
    if (order == nullptr) return;
    const std::lock_guard<std::mutex> lock(order->mutex);
    order->remove_heap(reinterpret_cast<deep_ep::u64>(memory));
}

}  // namespace driver_double
