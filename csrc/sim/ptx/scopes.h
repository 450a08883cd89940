// Name lookup inside a function: registers and parameters, in nested braces.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sim/ptx/module.h"

namespace deep_ep::ptx {

class Scopes {
  public:
    void open() { scopes_.emplace_back(); }
    void close() { scopes_.pop_back(); }

    void name(std::string_view name, Operand operand) { scopes_.back()[std::string(name)] = operand; }
    void single(std::string_view register_name) { name(register_name, next()); }
    // %r<3>: %r0, %r1 and %r2.
    void range(std::string_view prefix, u32 count) {
        for (u32 i = 0; i < count; ++i) name(std::string(prefix) + std::to_string(i), next());
    }

    // Null if the name is not declared.
    const Operand* find(std::string_view name) const {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            if (const auto found = scope->find(name); found != scope->end()) return &found->second;
        }
        return nullptr;
    }

    // Total number of registers.
    u32 slots() const { return slots_; }

  private:
    Operand next() { return {OperandKind::kRegister, false, slots_++, 0}; }

    std::vector<std::map<std::string, Operand, std::less<>>> scopes_;
    u32 slots_ = 0;
};

}  // namespace deep_ep::ptx
