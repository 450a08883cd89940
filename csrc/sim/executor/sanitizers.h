// Hooks that tell the sanitizers about fibers; no-ops in builds without them.
//
// ThreadSanitizer has one fiber of its own per CUDA thread and agent, and one for the executor, in which reads, writes
// and synchronization are ignored: the scheduler's accesses belong to no thread and order nothing. Happens-before
// follows only from the SyncPoints that the executor declares and from the atomics of the code under test.
#pragma once

#include <cstddef>
#include <utility>

#include "sim/executor/config.h"

#if DEEP_EP_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
int __tsan_atomic32_load(const volatile int* address, int order);
void __tsan_atomic32_store(volatile int* address, int value, int order);
int __tsan_atomic32_fetch_add(volatile int* address, int value, int order);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
}
#endif

#if DEEP_EP_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old, size_t* size_old);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}
#endif

namespace deep_ep::cpu::tsan {

// A synchronization point: a thread that acquires is ordered after all threads that have released. open() is a release
// that first clears the point: the next round of a barrier, perhaps with other threads, must not inherit the edges of
// the previous round. To be used in the context of the thread that is ordered, never in that of the executor.
struct SyncPoint {
#if DEEP_EP_TSAN
    int word = 0;
    void open() { __tsan_atomic32_store(&word, 0, __ATOMIC_RELEASE); }
    void release() { __tsan_atomic32_fetch_add(&word, 1, __ATOMIC_RELEASE); }
    void acquire() const { __tsan_atomic32_load(&word, __ATOMIC_ACQUIRE); }
#else
    void open() {}
    void release() {}
    void acquire() const {}
#endif
};

#if DEEP_EP_TSAN
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: the switch itself orders nothing

// The executor's own context. Memory allocated in it belongs to no thread.
inline void* executor_fiber() {
    static void* const fiber = [] {
        void* const executor = create_fiber();
        void* const caller = current_fiber();
        switch_to(executor);
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        switch_to(caller);
        return executor;
    }();
    return fiber;
}
#else
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void*) {}
inline void* current_fiber() { return nullptr; }
inline void switch_to(void*) {}
inline void* executor_fiber() { return nullptr; }
#endif

// The host thread that holds the executor's lock.
inline void* host_fiber = nullptr;

// Calls a function in the context of another fiber, for example that of the host thread that called the executor.
template <class Function>
auto as(void* fiber, Function function) {
    struct Back {
        void* const caller = current_fiber();
        ~Back() { switch_to(caller); }
    } back;
    switch_to(fiber);
    return function();
}

}  // namespace deep_ep::cpu::tsan

namespace deep_ep::cpu::asan {

#if DEEP_EP_ASAN
inline void start_switch(void** save, const void* bottom, size_t size) {
    __sanitizer_start_switch_fiber(save, bottom, size);
}
inline void finish_switch(void* save, const void** old_bottom, size_t* old_size) {
    __sanitizer_finish_switch_fiber(save, old_bottom, old_size);
}
inline void unpoison(const void* address, size_t size) { __asan_unpoison_memory_region(address, size); }
#else
inline void start_switch(void**, const void*, size_t) {}
inline void finish_switch(void*, const void**, size_t*) {}
inline void unpoison(const void*, size_t) {}
#endif

}  // namespace deep_ep::cpu::asan
