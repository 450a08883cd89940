// The hooks by which the sanitizers learn about fibers, as no-ops in the builds without them.
//
// ThreadSanitizer sees one of its own fibers per CUDA thread and agent, and exactly the happens-before edges declared
// here: this directory is compiled without instrumentation, so nothing that the scheduler does orders anything.
#pragma once

#include <cstddef>

#include "cpu/executor/config.h"

#if DEEP_EP_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
int __tsan_atomic32_load(const volatile int* address, int order);
void __tsan_atomic32_store(volatile int* address, int value, int order);
int __tsan_atomic32_fetch_add(volatile int* address, int value, int order);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
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

// A point where clocks meet: who acquires comes after all who released. open() also forgets what the point knew: a
// barrier's next round, perhaps joined by other threads, must not inherit the edges of the round before.
// The words must be memory that no instrumented code and no allocator ever wrote (Pages).
struct SyncPoint {
    int word;
};

#if DEEP_EP_TSAN
inline void open(SyncPoint* point) { __tsan_atomic32_store(&point->word, 0, __ATOMIC_RELEASE); }
inline void release(SyncPoint* point) { __tsan_atomic32_fetch_add(&point->word, 1, __ATOMIC_RELEASE); }
inline void acquire(SyncPoint* point) { __tsan_atomic32_load(&point->word, __ATOMIC_ACQUIRE); }
#else
inline void open(SyncPoint*) {}
inline void release(SyncPoint*) {}
inline void acquire(SyncPoint*) {}
#endif

#if DEEP_EP_TSAN
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, 1); }  // 1: the switch itself orders nothing

// While one host thread looks at what another waits for: the looker learns nothing by it.
class Blindfold {
  public:
    Blindfold() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    }
    ~Blindfold() {
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
    Blindfold(const Blindfold&) = delete;
};
#else
inline void* current_fiber() { return nullptr; }
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void*) {}
inline void switch_to(void*) {}
class Blindfold {
  public:
    Blindfold() {}
    ~Blindfold() {}
};
#endif

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
