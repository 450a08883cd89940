// Switches between stacks: in assembly on x86-64 and AArch64 (3 ns), by ucontext elsewhere or with -DDEEP_EP_UCONTEXT
// (50 times slower: it saves the signal mask with a system call).
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(DEEP_EP_UCONTEXT)
#define DEEP_EP_UCONTEXT 1
#endif

#ifdef DEEP_EP_UCONTEXT
#include <ucontext.h>
#endif

namespace deep_ep::cpu {

// A suspended flow of control. The rest of its state is on its stack.
struct Context {
#ifdef DEEP_EP_UCONTEXT
    ucontext_t ucontext;
#else
    void* stack_pointer = nullptr;
#endif
};

// Makes `context` start in `entry`, which never returns, on the stack [low, low + size).
void context_init(Context& context, char* low, size_t size, void (*entry)());

// Suspends the caller in `from` and continues in `to`.
void context_switch(Context& from, Context& to);

}  // namespace deep_ep::cpu
