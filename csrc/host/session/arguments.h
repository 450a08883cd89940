// Helpers for the arguments of the calls of all modes.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "host/session/runtime.h"

namespace deep_ep::host {

// FNV-1a over the arguments on which all ranks must agree. The call keeps it, and them for the message of a mismatch.
inline uint64_t hash_arguments(Call& call, std::initializer_list<Call::Argument> arguments) {
    call.arguments.assign(arguments);
    uint64_t hash = 0xcbf29ce484222325ull ^ static_cast<uint64_t>(call.kind);
    for (const auto& [name, value] : arguments) {
        for (int byte = 0; byte < 8; ++byte) hash = (hash ^ (value >> (8 * byte) & 0xff)) * 0x100000001b3ull;
    }
    return call.hash = hash;
}

// Addresses come from Python as numbers.
template <class T>
T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace deep_ep::host
