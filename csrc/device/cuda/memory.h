// Loads, stores and atomics with an order and a scope, on words of 4 or 8 bytes.
//
// Addresses are generic: a word may be in shared memory, this GPU's memory, a peer's memory or host memory. Additions
// whose result is not asked for know which: at block scope the first, else one of the others. The relaxed accesses
// clobber "memory" too: the compiler must not move a plain access across a poll.
#pragma once

#include "device/cuda/qualifiers.h"
#include "device/read_once.h"
#include "wire/types.h"

namespace deep_ep::device {

enum class Scope;

namespace detail {

// Excludes a parameter from the deduction of T: add_relaxed<S>(&word64, 1u) adds 64 bits.
template <class T>
struct SameType {
    using Type = T;
};
template <class T>
using Same = typename SameType<T>::Type;

// Address of a variable in the shared window.
DEEP_EP_DEVICE u64 shared_address(const void* variable) {
    u64 address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(variable));
    return address;
}

}  // namespace detail

// One instruction `name.<scope>.tail` for the scope S of the surrounding function; the operands of asm follow.
#define DEEP_EP_SCOPED_ASM(name, tail, ...)          \
    if constexpr (S == Scope::kBlock) {              \
        asm volatile(name ".cta." tail __VA_ARGS__); \
    } else if constexpr (S == Scope::kDevice) {      \
        asm volatile(name ".gpu." tail __VA_ARGS__); \
    } else {                                         \
        asm volatile(name ".sys." tail __VA_ARGS__); \
    }

template <Scope S, class T>
DEEP_EP_DEVICE T load_relaxed(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");
    T value;
    if constexpr (sizeof(T) == 4) {
        DEEP_EP_SCOPED_ASM("ld.relaxed", "b32 %0, [%1];", : "=r"(value) : "l"(address) : "memory")
    } else {
        DEEP_EP_SCOPED_ASM("ld.relaxed", "b64 %0, [%1];", : "=l"(value) : "l"(address) : "memory")
    }
    return value;
}

template <Scope S, class T>
DEEP_EP_DEVICE T load_acquire(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");
    T value;
    if constexpr (sizeof(T) == 4) {
        DEEP_EP_SCOPED_ASM("ld.acquire", "b32 %0, [%1];", : "=r"(value) : "l"(address) : "memory")
    } else {
        DEEP_EP_SCOPED_ASM("ld.acquire", "b64 %0, [%1];", : "=l"(value) : "l"(address) : "memory")
    }
    return value;
}

template <Scope S, class T>
DEEP_EP_DEVICE void store_relaxed(T* address, detail::Same<T> value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");
    if constexpr (sizeof(T) == 4) {
        DEEP_EP_SCOPED_ASM("st.relaxed", "b32 [%0], %1;", ::"l"(address), "r"(value) : "memory")
    } else {
        DEEP_EP_SCOPED_ASM("st.relaxed", "b64 [%0], %1;", ::"l"(address), "l"(value) : "memory")
    }
}

template <Scope S, class T>
DEEP_EP_DEVICE void store_release(T* address, detail::Same<T> value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");
    if constexpr (sizeof(T) == 4) {
        DEEP_EP_SCOPED_ASM("st.release", "b32 [%0], %1;", ::"l"(address), "r"(value) : "memory")
    } else {
        DEEP_EP_SCOPED_ASM("st.release", "b64 [%0], %1;", ::"l"(address), "l"(value) : "memory")
    }
}

template <Scope S>
DEEP_EP_DEVICE void fence_release() {
    if constexpr (S == Scope::kBlock) {
        asm volatile("fence.acq_rel.cta;" ::: "memory");
    } else if constexpr (S == Scope::kDevice) {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    } else {
        asm volatile("fence.acq_rel.sys;" ::: "memory");
    }
}

template <Scope S, class T>
DEEP_EP_DEVICE void store_fenced(T* address, detail::Same<T> value) {
    store_relaxed<S>(address, value);
}

// A reduction, for which the thread does not wait. It names the state space: for a generic address, ptxas emits an
// atomic and a branch on its result.
#define DEEP_EP_RED_ASM(order, tail, ...)                                \
    if constexpr (S == Scope::kBlock) {                                  \
        asm volatile("red." order ".cta.shared::cta." tail __VA_ARGS__); \
    } else if constexpr (S == Scope::kDevice) {                          \
        asm volatile("red." order ".gpu.global." tail __VA_ARGS__);      \
    } else {                                                             \
        asm volatile("red." order ".sys.global." tail __VA_ARGS__);      \
    }
#define DEEP_EP_ADD(function, order)                                                                             \
    template <Scope S, class T>                                                                                  \
    DEEP_EP_DEVICE void function(T* address, detail::Same<T> value) {                                            \
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");                                               \
        const u64 place = S == Scope::kBlock ? detail::shared_address(address) : reinterpret_cast<u64>(address); \
        if constexpr (sizeof(T) == 4) {                                                                          \
            DEEP_EP_RED_ASM(order, "add.u32 [%0], %1;", ::"l"(place), "r"(value) : "memory")                     \
        } else {                                                                                                 \
            DEEP_EP_RED_ASM(order, "add.u64 [%0], %1;", ::"l"(place), "l"(value) : "memory")                     \
        }                                                                                                        \
    }
DEEP_EP_ADD(add_relaxed, "relaxed")
DEEP_EP_ADD(add_release, "release")
#undef DEEP_EP_ADD

template <Scope S, class T>
DEEP_EP_DEVICE void add_fenced(T* address, detail::Same<T> value) {
    add_relaxed<S>(address, value);
}

#undef DEEP_EP_RED_ASM

#define DEEP_EP_FETCH_ADD(function, instruction)                                                 \
    template <Scope S, class T>                                                                  \
    DEEP_EP_DEVICE T function(T* address, detail::Same<T> value) {                               \
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");                               \
        T old;                                                                                   \
        if constexpr (sizeof(T) == 4) {                                                          \
            DEEP_EP_SCOPED_ASM(instruction, "add.u32 %0, [%1], %2;", : "=r"(old) : "l"(address), \
                               "r"(value) : "memory")                                            \
        } else {                                                                                 \
            DEEP_EP_SCOPED_ASM(instruction, "add.u64 %0, [%1], %2;", : "=l"(old) : "l"(address), \
                               "l"(value) : "memory")                                            \
        }                                                                                        \
        return old;                                                                              \
    }
DEEP_EP_FETCH_ADD(fetch_add_relaxed, "atom.relaxed")
DEEP_EP_FETCH_ADD(fetch_add_release, "atom.release")
DEEP_EP_FETCH_ADD(fetch_add_acq_rel, "atom.acq_rel")
#undef DEEP_EP_FETCH_ADD

#define DEEP_EP_COMPARE_AND_SWAP(function, instruction)                                                             \
    template <Scope S, class T>                                                                                     \
    DEEP_EP_DEVICE T function(T* address, detail::Same<T> expected, detail::Same<T> desired) {                      \
        static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word");                                                  \
        T old;                                                                                                      \
        if constexpr (sizeof(T) == 4) {                                                                             \
            DEEP_EP_SCOPED_ASM(instruction, "cas.b32 %0, [%1], %2, %3;", : "=r"(old) : "l"(address), "r"(expected), \
                               "r"(desired) : "memory")                                                             \
        } else {                                                                                                    \
            DEEP_EP_SCOPED_ASM(instruction, "cas.b64 %0, [%1], %2, %3;", : "=l"(old) : "l"(address), "l"(expected), \
                               "l"(desired) : "memory")                                                             \
        }                                                                                                           \
        return old;                                                                                                 \
    }
DEEP_EP_COMPARE_AND_SWAP(cas_relaxed, "atom.relaxed")
DEEP_EP_COMPARE_AND_SWAP(cas_acquire, "atom.acquire")
DEEP_EP_COMPARE_AND_SWAP(cas_release, "atom.release")
DEEP_EP_COMPARE_AND_SWAP(cas_acq_rel, "atom.acq_rel")
#undef DEEP_EP_COMPARE_AND_SWAP

template <Scope S, class T>
DEEP_EP_DEVICE T exchange_acquire(T* address, detail::Same<T> value) {
    static_assert(sizeof(T) == 8, "a word of 8 bytes");
    T old;
    DEEP_EP_SCOPED_ASM("atom.acquire", "exch.b64 %0, [%1], %2;", : "=l"(old) : "l"(address), "l"(value) : "memory")
    return old;
}

#undef DEEP_EP_SCOPED_ASM

}  // namespace deep_ep::device
