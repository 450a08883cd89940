// Loads, stores and atomics with an order and a scope. The scope is only checked: on a CPU all scopes compile to the
// same instruction. Under a random schedule each access is a point at which another thread may run first.
#pragma once

#include "device/read_once.h"
#include "sim/executor/device_calls.h"
#include "wire/types.h"

namespace deep_ep::device {

enum class Scope;

namespace detail {

template <Scope S>
void before_access(const void* address, const char* file, int line) {
    if (cpu::kExact && S != Scope::kSystem) cpu::check_scope(address, {file, line});
    if (__builtin_expect(cpu::memory_switches, 0)) cpu::switch_point({file, line});
}

// A read-modify-write of host memory by a GPU: hosts may store between its two halves. Not under ThreadSanitizer, which
// would take the halves for orders of their own. Returns false if this is not one.
template <Scope S, class T, class Change>
bool update_in_halves(T* address, Change change, T& old, const char* file, int line) {
    if (cpu::kTsan || S != Scope::kSystem || __builtin_expect(!cpu::memory_switches, 1)) return false;
    if (!cpu::begin_update(address, {file, line})) return false;
    old = __atomic_load_n(address, __ATOMIC_ACQUIRE);
    cpu::switch_point({file, line});
    __atomic_store_n(address, change(old), __ATOMIC_RELEASE);
    cpu::end_update(address);
    return true;
}

// The fast build runs all threads of a rank in turns on one processor, so within a device nothing intervenes.
template <Scope S, class T>
T fetch_add(T* address, T value, int order, const char* file, int line) {
    T old;
    if (update_in_halves<S>(address, [=](T before) { return static_cast<T>(before + value); }, old, file, line))
        return old;
    if (cpu::kExact || S == Scope::kSystem) return __atomic_fetch_add(address, value, order);
    old = *address;
    *address = old + value;
    return old;
}

}  // namespace detail

#define DEEP_EP_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <Scope S, class T>
T load_relaxed(const T* address, DEEP_EP_HERE) {
    detail::before_access<S>(address, file, line);
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}

template <Scope S, class T>
T load_acquire(const T* address, DEEP_EP_HERE) {
    detail::before_access<S>(address, file, line);
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <class T>
struct SameType {
    using Type = T;
};

template <Scope S, class T>
void store_relaxed(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    detail::before_access<S>(address, file, line);
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

template <Scope S, class T>
void store_release(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    detail::before_access<S>(address, file, line);
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

// A store or an atomic behind a fence releases by itself: ThreadSanitizer knows no fences, and x86 needs none.
template <Scope S>
void fence_release() {}

template <Scope S, class T>
void store_fenced(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    store_release<S>(address, value, file, line);
}

#define DEEP_EP_FETCH_ADD(function, order)                                   \
    template <Scope S, class T>                                              \
    T function(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) { \
        detail::before_access<S>(address, file, line);                       \
        return detail::fetch_add<S, T>(address, value, order, file, line);   \
    }
DEEP_EP_FETCH_ADD(fetch_add_relaxed, __ATOMIC_RELAXED)
DEEP_EP_FETCH_ADD(fetch_add_release, __ATOMIC_RELEASE)
DEEP_EP_FETCH_ADD(fetch_add_acq_rel, __ATOMIC_ACQ_REL)
#undef DEEP_EP_FETCH_ADD

template <Scope S, class T>
void add_relaxed(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    if (cpu::kExact) cpu::check_space(address, S == Scope::kBlock, {file, line});
    fetch_add_relaxed<S, T>(address, value, file, line);
}

template <Scope S, class T>
void add_release(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    if (cpu::kExact) cpu::check_space(address, S == Scope::kBlock, {file, line});
    fetch_add_release<S, T>(address, value, file, line);
}

template <Scope S, class T>
void add_fenced(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    if (cpu::kExact) cpu::check_space(address, S == Scope::kBlock, {file, line});
    fetch_add_acq_rel<S, T>(address, value, file, line);
}

#define DEEP_EP_COMPARE_AND_SWAP(function, order, failed)                                                           \
    template <Scope S, class T>                                                                                     \
    T function(T* address, typename SameType<T>::Type expected, typename SameType<T>::Type desired, DEEP_EP_HERE) { \
        detail::before_access<S>(address, file, line);                                                              \
        __atomic_compare_exchange_n(address, &expected, desired, false, order, failed);                             \
        return expected;                                                                                            \
    }
DEEP_EP_COMPARE_AND_SWAP(cas_relaxed, __ATOMIC_RELAXED, __ATOMIC_RELAXED)
DEEP_EP_COMPARE_AND_SWAP(cas_acquire, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)
DEEP_EP_COMPARE_AND_SWAP(cas_release, __ATOMIC_RELEASE, __ATOMIC_RELAXED)
DEEP_EP_COMPARE_AND_SWAP(cas_acq_rel, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
#undef DEEP_EP_COMPARE_AND_SWAP

template <Scope S, class T>
T exchange_acquire(T* address, typename SameType<T>::Type value, DEEP_EP_HERE) {
    detail::before_access<S>(address, file, line);
    T old;
    if (detail::update_in_halves<S>(address, [=](T) { return value; }, old, file, line)) return old;
    return __atomic_exchange_n(address, value, __ATOMIC_ACQUIRE);
}

#undef DEEP_EP_HERE

inline bool barrier_or(u32 id, u32 threads, bool value, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
    return cpu::barrier(id, threads, value, {file, line});
}

}  // namespace deep_ep::device
