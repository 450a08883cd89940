#include "sim/ptx/image.h"

#include <algorithm>
#include <cstring>

namespace deep_ep::ptx {
namespace {

constexpr u64 kDynamicAlignment = 128;

u64 align(u64 offset, u64 alignment) { return (offset + alignment - 1) / alignment * alignment; }

}  // namespace

Image::Image(Module module) : module_(std::move(module)), addresses_(module_.variables.size()) {
    u64 bytes = 0;
    for (size_t i = 0; i < addresses_.size(); ++i) {
        const Variable& variable = module_.variables[i];
        u64& end = variable.space == Space::kShared ? static_shared_bytes_ : bytes;
        if (variable.space == Space::kShared && variable.bytes == 0) continue;
        addresses_[i] = align(end, variable.alignment);
        end = addresses_[i] + variable.bytes;
    }
    static_shared_bytes_ = align(static_shared_bytes_, kDynamicAlignment);
    memory_.resize(bytes / sizeof(u64) + 1);
    auto* const base = reinterpret_cast<u8*>(memory_.data());
    for (size_t i = 0; i < addresses_.size(); ++i) {
        const Variable& variable = module_.variables[i];
        if (variable.space == Space::kShared) {
            if (variable.bytes == 0) addresses_[i] = static_shared_bytes_;
            continue;
        }
        std::memcpy(base + addresses_[i], variable.initial.data(), variable.bytes);
        addresses_[i] += reinterpret_cast<u64>(base);
    }
    for (size_t i = 0; i < addresses_.size(); ++i) {
        for (const Variable::Reference& reference : module_.variables[i].references) {
            const u64 target = addresses_[reference.variable];
            std::memcpy(reinterpret_cast<u8*>(addresses_[i]) + reference.offset, &target, sizeof(target));
        }
    }
}

}  // namespace deep_ep::ptx
