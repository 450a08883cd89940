#include "sim/executor/context_switch.h"

#include <cstdint>

#ifdef DEEP_EP_UCONTEXT

namespace deep_ep::cpu {

void context_init(Context& context, char* low, size_t size, void (*entry)()) {
    getcontext(&context.ucontext);
    context.ucontext.uc_stack.ss_sp = low;
    context.ucontext.uc_stack.ss_size = size;
    context.ucontext.uc_link = nullptr;
    makecontext(&context.ucontext, entry, 0);
}

void context_switch(Context& from, Context& to) { swapcontext(&from.ucontext, &to.ucontext); }

}  // namespace deep_ep::cpu

#else

// Saves only the callee-saved registers: the compiler sees a call and saves the rest.
// deep_ep_context_switch(void** save_sp, void* load_sp)
extern "C" void deep_ep_context_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
    .text
    .p2align 4
    .globl deep_ep_context_switch
    .hidden deep_ep_context_switch
    .type deep_ep_context_switch, @function
deep_ep_context_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
    .size deep_ep_context_switch, . - deep_ep_context_switch
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .p2align 4
    .globl deep_ep_context_switch
    .hidden deep_ep_context_switch
    .type deep_ep_context_switch, %function
deep_ep_context_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size deep_ep_context_switch, . - deep_ep_context_switch
)");
#endif

namespace deep_ep::cpu {

void context_init(Context& context, char* low, size_t size, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(low + size) & ~uintptr_t{15});
#if defined(__x86_64__)
    *--top =
        nullptr;  // the return address of `entry`: ends a debugger's backtrace, and aligns the stack as a call does
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;  // rbp (0 ends a frame chain) and the other callee-saved registers
#elif defined(__aarch64__)
    top -= 20;
    for (int i = 0; i < 20; i++) top[i] = nullptr;
    top[11] = reinterpret_cast<void*>(entry);  // x30, the link register
#endif
    context.stack_pointer = top;
}

void context_switch(Context& from, Context& to) { deep_ep_context_switch(&from.stack_pointer, to.stack_pointer); }

}  // namespace deep_ep::cpu

#endif
